"""Random JSON schemas of finite values, and random texts of a grammar."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tightfit.data.grammar import (
    Chars,
    Choice,
    Grammar,
    Literal,
    Node,
    Repeat,
    Rule,
    children,
)

WORDS = ("name", "age", "city", "tags", "price", "größe", 'a"b', "next item", "x", "note")
PATTERNS = (
    r"^[A-Z]{2}\d{1,4}$",
    r"(red|green|blue)( dark)?",
    r"\w{1,8}@[a-z]{2,6}\.org",
    '"?a+"?$',
)


_Draw = Callable[[random.Random, int], dict[str, Any]]


def draw_schema(drawn: random.Random) -> dict[str, Any]:
    """An object's schema. Texts, lists and depths are bounded, so that a value ends."""
    made = _draw_object(drawn, 3)
    if drawn.random() < 0.2:  # a tree, a list
        node = {
            "type": "object",
            "properties": {
                "value": _draw_value(drawn, 0),
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
        made["$defs"] = {"node": node}
        made["properties"]["first"] = {"$ref": "#/$defs/node"}
    return made


def _draw_value(drawn: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[_Draw] = [_draw_string, _draw_number, _draw_enum, _draw_plain, _draw_format]
    if depth > 0:
        kinds += [_draw_object, _draw_array, _draw_choice, _draw_object]
    made = drawn.choice(kinds)(drawn, depth)
    if drawn.random() < 0.1 and isinstance(made.get("type"), str):
        made = {**made, "type": [made["type"], "null"]}
    if drawn.random() < 0.2:
        made["description"] = "What it is."
    return made


def _draw_object(drawn: random.Random, depth: int) -> dict[str, Any]:
    names = drawn.sample(WORDS, drawn.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _draw_value(drawn, depth - 1) for name in names},
        "required": [name for name in names if drawn.random() < 0.6],
        **({"additionalProperties": False} if drawn.random() < 0.5 else {}),
    }


def _draw_array(drawn: random.Random, depth: int) -> dict[str, Any]:
    least = drawn.randint(0, 2)
    made: dict[str, Any] = {"type": "array", "items": _draw_value(drawn, depth - 1)}
    made |= {"minItems": least, "maxItems": least + drawn.randint(0, 2)}
    if drawn.random() < 0.2:
        made["prefixItems"] = [_draw_value(drawn, 0)]
    return made


def _draw_choice(drawn: random.Random, depth: int) -> dict[str, Any]:
    if drawn.random() < 0.3:
        return {"oneOf": [_draw_string(drawn, 0), _draw_number(drawn, 0), {"type": "null"}]}
    return {"anyOf": [_draw_value(drawn, depth - 1) for _ in range(drawn.randint(1, 3))]}


def _draw_string(drawn: random.Random, _: int) -> dict[str, Any]:
    if drawn.random() < 0.3:
        return {"type": "string", "pattern": drawn.choice(PATTERNS)}
    least = drawn.choice((0, 0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + drawn.randint(1, 12)}


def _draw_format(drawn: random.Random, _: int) -> dict[str, Any]:
    names = ("date", "time", "date-time", "uuid", "ipv4", "email")
    return {"type": "string", "format": drawn.choice(names)}


def _draw_number(drawn: random.Random, _: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": drawn.choice(("integer", "number"))}
    low = drawn.choice((-1000, -7, 0, 0.5, 3, 98))
    if drawn.random() < 0.6:
        made[drawn.choice(("minimum", "exclusiveMinimum"))] = low
    if drawn.random() < 0.6:
        made[drawn.choice(("maximum", "exclusiveMaximum"))] = low + drawn.choice((2, 9, 1234))
    return made


def _draw_enum(drawn: random.Random, _: int) -> dict[str, Any]:
    values = drawn.sample(["red", "dark blue", 'ü\n"', 1, 2.5, None, True, [1, {"a": "b"}]], 3)
    return {"enum": values} if drawn.random() < 0.8 else {"const": values[0]}


def _draw_plain(drawn: random.Random, _: int) -> dict[str, Any]:
    return {"type": drawn.choice(("boolean", "null"))}


_MAX_REPEATS = 4
_MAX_OPEN = 40


def draw_text(grammar: Grammar, drawn: random.Random) -> str:
    """Any text that fits a grammar."""

    def draw(node: Node, depth: int) -> str:
        if isinstance(node, Literal):
            return node.text
        if isinstance(node, Chars):
            return chr(drawn.randint(*drawn.choice(node.ranges)))
        if isinstance(node, Rule):
            return draw(grammar.rules[node.name], depth + 1)
        items = children(node)
        if isinstance(node, Choice):
            # Deep down the shortest way out: a part without rules.
            plain = [item for item in items if not _holds_rule(item)]
            items = (drawn.choice(plain if plain and depth > _MAX_OPEN else items),)
        if isinstance(node, Repeat):
            most = node.least + _MAX_REPEATS if node.most is None else node.most
            items *= node.least if depth > _MAX_OPEN else drawn.randint(node.least, most)
        return "".join(draw(item, depth) for item in items)

    return draw(Rule("root"), 0)


def _holds_rule(node: Node) -> bool:
    return isinstance(node, Rule) or any(map(_holds_rule, children(node)))
