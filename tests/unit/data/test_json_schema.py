"""Grammars of schemas and patterns: what is refused, how soon, and what fits the rest."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest

from random_schemas import draw_schema, draw_text
from tightfit.data.grammar import (
    Chars,
    Grammar,
    GrammarError,
    Node,
    children,
    read_grammar,
    write_gbnf,
    write_lark,
)
from tightfit.data.json_schema import SchemaCompiler, compile_schema, read_pattern

REFUSAL_SECONDS = 5.0
"""On a busy core; most take a millisecond."""
NODE = {"$ref": "#/$defs/node"}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _alternatives(other: str) -> dict[str, Any]:
    same = {"type": "object", "required": ["a"]}
    return {
        "anyOf": [
            {**same, "properties": {"a": NODE, "b": {"type": "null"}}},
            {**same, "properties": {"a": NODE, other: {"type": "null"}}},
            {"type": "null"},
        ]
    }


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (_nested(10_000), "nested more than"),
        ({"enum": list(range(50_000))}, "values"),
        ({"enum": list(range(5000))}, "more than 2,000"),
        ({"properties": {f"p{n}": {} for n in range(9000)}}, "readings|parts|values"),
        ({"$ref": "#"}, "names itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "finite"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "finite"),
        ({"$defs": {"node": _alternatives("c")}, **NODE}, "readings"),
        (
            {
                "$defs": {
                    f"d{n}": {
                        "anyOf": [
                            {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}, key: {}}}
                            for key in "bc"
                        ]
                    }
                    for n in range(25)
                }
                | {"d25": {"type": "null"}},
                "$ref": "#/$defs/d0",
            },
            "readings",
        ),
        ({"type": "string", "minLength": 10**6}, "above 2,000"),
        ({"type": "string", "pattern": "(a*)*b"}, "may be empty"),
        ({"type": "string", "pattern": "(.{0,100}x){0,100}"}, "written out"),
        ({"type": "string", "pattern": "(x+x+)+y" * 200}, "characters"),
        ({"type": "string", "pattern": "(" * 900}, "nested|`\\)`"),
        ({"type": "string", "pattern": "a{99999}"}, "repeats"),
        ({"type": "string", "pattern": r"(a)\1"}, "not supported"),
        ({"type": "string", "pattern": "(?=a)b"}, "not supported"),
        ({"type": "string", "pattern": "[z-a]"}, "before it begins"),
        ({"type": "string", "pattern": "\ud800"}, "surrogate"),
        ({"type": "string", "pattern": "ab", "maxLength": 1}, "maxLength"),
        ({"type": "string", "format": "hostname-of-mars"}, "there is: date"),
        ({"type": "string", "enum": [1, 2]}, "of its type"),
        ({"const": "\udfff"}, "surrogate"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "leave no whole number"),
        ({"type": "number", "minimum": 0.2, "maximum": 0.3}, "leave no whole number"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "null"}}, "not"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "allOf"),
        ({"anyOf": [{"type": "null"}], "required": ["a"]}, "beside"),
        ({"$ref": "https://elsewhere/schema"}, "outside"),
        ({"$ref": "#/nowhere"}, "not in the schema"),
        ({"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {"type": "null"}}}, "beside"),
        ({"type": "integer", "minimum": float("nan")}, "infinite or none"),
        ({"const": float("inf")}, "infinite or none"),
        ({"type": "string", "format": []}, "there is: date"),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]},
                    {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]},
                ]
            },
            "may overlap",
        ),
        *(
            (
                {
                    "$defs": {
                        **{f"d{n}": make(f"#/$defs/d{n + 1}") for n in range(500)},
                        "d500": {"type": "null"},
                    },
                    "$ref": "#/$defs/d0",
                },
                "nested more than",
            )
            for make in (
                lambda name: {"$ref": name},
                lambda name: {"type": "array", "items": {"$ref": name}},
                lambda name: {"type": "object", "properties": {"a": {"$ref": name}}},
            )
        ),
        ({"$ref": "#/$defs/" + "1" * 5000, "$defs": [1]}, "not in the schema"),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {key: {"const": 1}}, "required": [key, {}]}
                    for key in "ab"
                ]
            },
            "may overlap",
        ),
        ({"type": "string", "pattern": r"[\0]"}, "no character"),
        (False, "allows nothing"),
        (7, "no schema"),
        ({"type": "colour"}, "no type"),
        ({"properties": {"a": False}}, "allows nothing"),
    ],
)
def test_what_cannot_be_promised_is_refused_soon(schema: Any, why: str) -> None:
    began_s = time.process_time()
    with pytest.raises(GrammarError, match=why):
        compile_schema(schema)
    assert time.process_time() - began_s < REFUSAL_SECONDS


def test_many_alternatives_and_schemas_take_little_time() -> None:
    """Each pair of alternatives was compared; what was too large was first written out in full."""
    alternatives = [
        {"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in range(400)
    ]
    began_s = time.process_time()
    compile_schema({"oneOf": alternatives})
    compiler = SchemaCompiler()
    with pytest.raises(GrammarError, match="more than 50,000 parts"):
        compiler.add({"type": "object", "required": [str(n) for n in range(9000)]})
    assert time.process_time() - began_s < 4 * REFUSAL_SECONDS


def test_no_grammar_holds_the_character_that_ends_a_text() -> None:
    for pattern in (r"[\0-\x05]", "[^a]", ".", r"\W"):
        ranges = [one.ranges for one in _chars_of(_compile_pattern(pattern).rules["root"])]
        assert ranges
        assert all(low > 0 for (low, _), *_ in ranges)
    with pytest.raises(GrammarError, match="number zero"):
        _compile_pattern(r"a\0b")


def _compile_pattern(pattern: str) -> Grammar:
    return SchemaCompiler().finish(read_pattern(pattern))


def _chars_of(node: Node) -> list[Chars]:
    below = [one for child in children(node) for one in _chars_of(child)]
    return [node, *below] if isinstance(node, Chars) else below


def test_alternatives_that_can_be_told_apart_may_contain_themselves() -> None:
    said = {"type": "object", "required": ["kind", "of"]}
    tree = {
        "anyOf": [
            {**said, "properties": {"kind": {"const": name}, "of": NODE}} for name in ("not", "neg")
        ]
    }
    tree["anyOf"].append({"type": "null"})

    compile_schema({"$defs": {"node": tree}, **NODE})
    compile_schema({"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}})


def _derive(grammar: Grammar, drawn: random.Random) -> str:
    """Any text of a grammar: an engine without a model."""
    return draw_text(grammar, drawn)


def test_every_text_of_a_grammar_is_valid() -> None:
    drawn = random.Random(5)
    num_texts = 0
    for _ in range(150):
        schema = draw_schema(drawn)
        grammar = compile_schema(schema)
        assert read_grammar(grammar.to_json()) == grammar
        check = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for _ in range(4):
            text = _derive(grammar, drawn)
            check.validate(json.loads(text))
            num_texts += 1
    assert num_texts == 600
    assert isinstance(json.loads(_derive(compile_schema({"type": "object"}), drawn)), dict)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[A-Z]{2}-\d{3,5}$",
        r"(yes|no|perhaps)( sir)?",
        r"[^a-z\s]+\.[\w.-]*?x{0,3}",
        r"\u0041\x42[\]\\^-]",
        r"(?:a|(?<name>b))+|^c$",
        r"é*[à-ü]{1,2}\.",
    ],
)
def test_every_text_of_a_pattern_matches_it(pattern: str) -> None:
    drawn = random.Random(3)
    expected = re.compile(pattern.replace("(?<", "(?P<"))
    for _ in range(30):
        assert expected.fullmatch(_derive(_compile_pattern(pattern), drawn))


def test_both_notations_are_those_that_the_engines_read() -> None:
    import llguidance

    drawn = random.Random(7)
    for _ in range(40):
        grammar = compile_schema(draw_schema(drawn))
        lark = write_lark(grammar, {"<tool_call>": 5})
        assert llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("lark", lark)) == ""
        for line in write_gbnf(grammar).splitlines():
            assert re.fullmatch(r"[a-z][a-z0-9]* ::= .+", line)
