"""JSON schemas and patterns as grammars: every text that fits the grammar is valid.

Not every valid text fits: an object has the properties that its schema names, in that order, and
numbers have up to 15 digits. A keyword that cannot be promised is refused by name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tightfit.data.grammar import (
    EMPTY,
    MAX_NODES,
    MAX_READINGS,
    MAX_REPEATS,
    Chars,
    Choice,
    Grammar,
    GrammarError,
    Lexeme,
    Literal,
    Node,
    Repeat,
    Rule,
    Series,
    chars,
    check_grammar,
    children,
    choice,
    count_parts,
    optional,
    repeat,
    sequence,
    without,
)

MAX_SCHEMA_DEPTH = 64
MAX_REFERRED_DEPTH = 100
"""With what its references name. Each level is several calls of Python's thousand."""
MAX_SCHEMA_VALUES = 10_000
"""Of all kinds, enumerated ones included."""
MAX_PATTERN_CHARS = 1000
MAX_PATTERN_PARTS = 1000
"""With every repetition written out."""
_MAX_DIGITS = 15
_LARGEST = 10**_MAX_DIGITS - 1
_ANNOTATIONS = frozenset(
    {
        *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"),
        *("description", "example", "examples", "readOnly", "title", "writeOnly"),
    }
)
_KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
    ),
}
_KEYWORDS["integer"] = _KEYWORDS["number"]
_COMBINING = ("anyOf", "oneOf", "allOf")
_REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("patternProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
        *("uniqueItems", "contains", "minContains", "maxContains", "multipleOf"),
        *("$dynamicRef", "$recursiveRef", "additionalItems"),
    }
)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

# Parts of JSON.

_MAY_SPACE = Rule("space")
_MAY_BLANK = optional(Literal(" "))
_PLAIN = without(chars((0x20, 0x10FFFF)), '"\\')
_HEX = chars("0123456789abcdefABCDEF")
_NO_SURROGATE = choice(
    sequence(chars("0123456789abcefABCEF"), Repeat(_HEX, 3, 3)),
    sequence(chars("dD"), chars("01234567"), Repeat(_HEX, 2, 2)),
    is_distinct=True,
)
_ESCAPE = sequence("\\", choice(chars('"\\/bfnrt'), sequence("u", _NO_SURROGATE), is_distinct=True))
_STRING_CHAR = choice(_PLAIN, _ESCAPE, is_distinct=True)
_DIGIT = chars("0123456789")
_NATURAL = choice(
    "0", sequence(chars("123456789"), Repeat(_DIGIT, 0, _MAX_DIGITS - 1)), is_distinct=True
)
_FRACTION = optional(sequence(".", Repeat(_DIGIT, 1, _MAX_DIGITS)))
_EXPONENT = optional(sequence(chars("eE"), optional(chars("+-")), Repeat(_DIGIT, 1, 2)))
_STRING = Rule("string")
_COMMON: Mapping[str, Node] = {
    "space": optional(Lexeme(choice(" ", sequence("\n", Repeat(Literal(" "), 0, 20))))),
    "string": Lexeme(sequence('"', Repeat(_STRING_CHAR, 0, None), '"')),
    "number": Lexeme(sequence(optional(Literal("-")), _NATURAL, _FRACTION, _EXPONENT)),
    "integer": Lexeme(sequence(optional(Literal("-")), _NATURAL)),
}
"""Rules of every schema's grammar."""
_FORMATS = {
    "date": r"[12]\d{3}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-](0\d|1[0-4]):[0-5]\d)",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "email": r"[a-z0-9]([a-z0-9_+-]|\.[a-z0-9]){0,40}@([a-z0-9]{1,30}\.){1,3}[a-z]{2,12}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


def compile_schema(schema: Any) -> Grammar:
    """The grammar of a schema's values. Raises `GrammarError` where none can be promised."""
    compiler = SchemaCompiler()
    root = compiler.add(schema)
    return compiler.finish(root)


class SchemaCompiler:
    """Rules of one or several schemas, as parts of one grammar."""

    def __init__(self) -> None:
        self._rules: dict[str, Node] = {}
        self._num_parts = 0
        self._depth = 0
        self._documents: list[Any] = []
        self._refs: dict[tuple[int, str], str] = {}

    def add(self, schema: Any) -> Node:
        """The part that stands for a schema's values."""
        check_size(schema)
        self._documents.append(schema)
        return _Document(self, len(self._documents) - 1, schema).value(schema, "#")

    def finish(self, root: Node) -> Grammar:
        """The grammar of an answer, checked."""
        grammar = Grammar({"root": root, **_COMMON, **self._rules})
        check_grammar(grammar)
        return grammar

    def rule(self, make: Callable[[], Node], *, name: str | None = None) -> Rule:
        """A rule of its own."""
        name = name or self.reserve()
        self._define(name, make())
        return Rule(name)

    def _define(self, name: str, node: Node) -> None:
        self._rules[name] = node
        self._num_parts += count_parts(node)
        if self._num_parts > MAX_NODES:  # now: one request may bring many large schemas
            raise GrammarError(f"it has more than {MAX_NODES:,} parts")

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Inside of one more schema."""
        if self._depth >= MAX_REFERRED_DEPTH:
            raise GrammarError(
                f"with its references it is nested more than {MAX_REFERRED_DEPTH} deep"
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def reserve(self) -> str:
        """A name for a rule that is still to be made."""
        name = f"r{len(self._rules)}"
        self._rules[name] = EMPTY
        return name

    def share(self, key: tuple[int, str], make: Callable[[], Node]) -> Rule:
        """The rule of a part that is named, made once; it may name itself."""
        if key not in self._refs:
            self._refs[key] = name = self.reserve()
            self._define(name, make())
        return Rule(self._refs[key])

    def any_value(self) -> Rule:
        """Any JSON value."""

        def make() -> Node:
            value = Rule(self._refs[-1, "any"])
            return choice(
                _object([], value),
                _array((), value, 0, None),
                _STRING,
                Rule("number"),
                "true",
                "false",
                "null",
                is_distinct=True,
            )

        return self.share((-1, "any"), make)


def check_size(schema: Any) -> None:
    """Raise `GrammarError` for a schema that is too deep, too large or no JSON."""
    total, level = 0, [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, float) and not math.isfinite(item):
                raise GrammarError("it holds a number that is infinite or none")
        total += len(level)
        if total + len(below) > MAX_SCHEMA_VALUES:
            raise GrammarError(f"it has more than {MAX_SCHEMA_VALUES:,} values")
        if not below:
            return
        level = below
    raise GrammarError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")


class _Document:
    """One schema with what its references name."""

    def __init__(self, compiler: SchemaCompiler, number: int, schema: Any) -> None:
        self._compiler = compiler
        self._number = number
        self._schema = schema

    def value(self, schema: Any, place: str) -> Node:
        """The values of one subschema."""
        with self._compiler.nested():
            return self._value(schema, place)

    def _value(self, schema: Any, place: str) -> Node:
        if schema is True or schema == {}:
            return self._compiler.any_value()
        if not isinstance(schema, Mapping):
            what = "allows nothing" if schema is False else "is no schema"
            raise GrammarError(f"`{place}` {what}")
        given = {key for key in schema if key not in _ANNOTATIONS}
        for key in sorted(given & _REFUSED):
            if not _is_idle(key, schema[key]):
                raise GrammarError(f"`{key}` at `{place}` is not supported")
        given -= _REFUSED
        for key in ("$ref", "const", "enum", *_COMBINING):
            if key not in schema:
                continue
            others = (given - {key, "type"}) & _ASSERTING
            if others:
                raise GrammarError(f"`{min(others)}` beside `{key}` at `{place}` is not supported")
            if key == "$ref":
                return self._reference(schema, place)
            if key in ("const", "enum"):
                values = [schema[key]] if key == "const" else schema[key]
                return _enumerated(values, _read_types(schema, place), place)
            if "type" in given:
                raise GrammarError(f"`type` beside `{key}` at `{place}` is not supported")
            return self._combined(key, schema[key], place)
        types = _read_types(schema, place)
        if types is None:
            types = [kind for kind in _KEYWORDS if given & _KEYWORDS[kind]]
            types = [kind for kind in types if kind != "integer"]
        if not types:
            return self._compiler.any_value()
        made = [self._typed(kind, schema, place) for kind in types]
        return choice(*made, is_distinct=True)

    def _reference(self, schema: Mapping[str, Any], place: str) -> Node:
        ref, types = schema["$ref"], _read_types(schema, place)
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise GrammarError(f"`$ref` at `{place}` names something outside of the schema")
        if types is not None and not _kinds(self._resolve(schema)) <= set(types):
            raise GrammarError(f"`type` beside `$ref` at `{place}` is not supported")
        return self._compiler.share(
            (self._number, ref), lambda: self.value(self._find(ref, place), ref[:200])
        )

    def _find(self, ref: str, place: str) -> Any:
        found = self._schema
        for step in ref.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif (
                isinstance(found, list)
                and key.isascii()
                and key.isdigit()
                and len(key) <= len(str(MAX_SCHEMA_VALUES))
                and int(key) < len(found)
            ):
                found = found[int(key)]
            else:
                raise GrammarError(f"`{ref[:100]}`, named at `{place}`, is not in the schema")
        if isinstance(found, Mapping) and found.get("$ref") == ref:
            raise GrammarError(f"`{ref[:100]}` names itself")
        return found

    def _combined(self, key: str, given: Any, place: str) -> Node:
        if not isinstance(given, list) or not given:
            raise GrammarError(f"`{key}` at `{place}` is not a list of schemas")
        if key == "allOf" and len(given) > 1:
            raise GrammarError(f"`allOf` of several schemas at `{place}` is not supported")
        resolved = [self._resolve(one) for one in given]
        is_distinct = _are_distinct(resolved)
        if key == "oneOf" and not (is_distinct and _exclude_each_other(resolved)):
            raise GrammarError(
                f"the alternatives of `oneOf` at `{place}` may overlap: use `anyOf`, or tell them "
                "apart by their types or by a constant in their first property"
            )
        made = [self.value(one, f"{place}/{key}/{at}") for at, one in enumerate(given)]
        return choice(*made, is_distinct=is_distinct)

    def _resolve(self, schema: Any) -> Any:
        """A schema behind its references, as far as they lead."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._find(schema["$ref"], "#")
        return schema

    def _typed(self, kind: str, schema: Mapping[str, Any], place: str) -> Node:
        if kind == "null":
            return Literal("null")
        if kind == "boolean":
            return choice("true", "false", is_distinct=True)
        if kind in ("integer", "number"):
            return _bounded_number(schema, place, is_whole=kind == "integer")
        if kind == "string":
            return _restricted_string(schema, place)
        if kind == "array":
            return self._array(schema, place)
        return self._object(schema, place)

    def _array(self, schema: Mapping[str, Any], place: str) -> Node:
        least = _read_count(schema, "minItems", place) or 0
        most = _read_count(schema, "maxItems", place)
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if not isinstance(first, list):
            raise GrammarError(f"`prefixItems` at `{place}` is not a list")
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            raise GrammarError(f"no array at `{place}` has {least} to {most} items")
        leading = [
            self.value(one, f"{place}/prefixItems/{at}") for at, one in enumerate(first[:most])
        ]
        if most is not None and len(leading) >= most:
            return _array(leading, None, 0, 0)
        more = self._compiler.rule(lambda: self.value(rest, f"{place}/items"))
        left = None if most is None else min(most - len(leading), MAX_REPEATS)
        return _array(leading, more, max(0, least - len(leading)), left)

    def _object(self, schema: Mapping[str, Any], place: str) -> Node:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping):
            raise GrammarError(f"`properties` at `{place}` is no object")
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise GrammarError(f"`required` at `{place}` is not a list of names")
        named = {**properties, **{key: others for key in required if key not in properties}}
        least = _read_count(schema, "minProperties", place) or 0
        most = _read_count(schema, "maxProperties", place)
        if not named:
            if others is False:
                return _object([], None)
            if least > 1:
                raise GrammarError(f"`minProperties` above 1 at `{place}` is not supported")
            value = self._compiler.rule(lambda: self.value(others, f"{place}/additionalProperties"))
            return _object([], value, least=least, most=most)
        if least > len(set(required)) or (most is not None and most < len(named)):
            raise GrammarError(f"a number of properties at `{place}` cannot be promised")
        members = [
            (
                self._compiler.rule(
                    lambda key=key, one=one: sequence(  # type: ignore[misc]
                        Literal(_dump(key, place) + ":"),
                        _MAY_BLANK,
                        self.value(one, f"{place}/properties/{key[:40]}"),
                    )
                ),
                key in required,
            )
            for key, one in named.items()
        ]
        return self._members(members)

    def _members(self, members: Sequence[tuple[Node, bool]]) -> Node:
        """`{...}` with every required member and any of the others, in order."""
        # From the last one to the first: what may follow once there is one, and at the beginning.
        following: Node = EMPTY
        beginning: Node = EMPTY
        for member, is_required in reversed(members):
            joined = sequence(",", _MAY_SPACE, member, following)
            first = sequence(member, following)
            if not is_required:
                joined = choice(joined, following, is_distinct=True)
                first = choice(first, beginning, is_distinct=True)
            following, beginning = self._named(joined), self._named(first)
        return sequence("{", _MAY_SPACE, beginning, _MAY_SPACE, "}")

    def _named(self, node: Node) -> Rule:
        return self._compiler.rule(lambda: node)


_ASSERTING = frozenset().union(*_KEYWORDS.values(), _COMBINING, ("$ref", "const", "enum"))


def _is_idle(key: str, value: Any) -> bool:
    """Whether a keyword that is not supported says nothing."""
    return value == {} if key in _MAPPINGS else key == "uniqueItems" and value is False


_MAPPINGS = ("patternProperties", "dependentRequired", "dependentSchemas", "dependencies")


def _read_types(schema: Mapping[str, Any], place: str) -> list[str] | None:
    if "type" not in schema:
        return None
    given = schema["type"]
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or not all(one in _TYPES for one in types):
        raise GrammarError(f"`type` at `{place}` names no type of JSON")
    if "number" in types:
        types = [one for one in types if one != "integer"]
    return list(dict.fromkeys(types))


def _read_count(schema: Mapping[str, Any], key: str, place: str) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GrammarError(f"`{key}` at `{place}` is no count")
    if value > MAX_REPEATS and key.startswith("min"):
        raise GrammarError(f"`{key}` at `{place}` is above {MAX_REPEATS:,}")
    return value


def _dump(value: Any, place: str) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"`{place}` holds half of a surrogate pair") from None
    return text


def _enumerated(values: Any, types: Sequence[str] | None, place: str) -> Node:
    if not isinstance(values, list) or not values:
        raise GrammarError(f"`enum` at `{place}` is not a list of values")
    kept = [one for one in values if types is None or any(_is_of(one, kind) for kind in types)]
    if not kept:
        raise GrammarError(f"no value of `enum` at `{place}` is of its type")
    texts = dict.fromkeys(_dump(one, place) for one in kept)
    if len(texts) > MAX_READINGS:
        raise GrammarError(f"`enum` at `{place}` has more than {MAX_READINGS:,} values")
    return choice(*texts)


def _is_of(value: Any, kind: str) -> bool:
    if kind == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    python: dict[str, Any] = {
        "object": Mapping,
        "array": list,
        "string": str,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    return isinstance(value, python[kind]) and (kind != "number" or not isinstance(value, bool))


# Which alternatives can be told apart.


def _are_distinct(schemas: Sequence[Any]) -> bool:
    """Whether no text begins two of these so that both could go on side by side."""
    kinds = [_kinds(schema) for schema in schemas]
    uses = Counter(kind for one in kinds for kind in one)
    if any(count > 1 and kind != "object" for kind, count in uses.items()):
        return False
    objects = [one for one, found in zip(schemas, kinds, strict=True) if "object" in found]
    return len(objects) < 2 or _differ_first(objects)


def _exclude_each_other(schemas: Sequence[Any]) -> bool:
    """Whether no object of one of these alternatives is valid by another."""
    firsts = [_first_member(one) if isinstance(one, Mapping) else None for one in schemas]
    objects = [
        (first[0], frozenset(one["required"]), {*one["properties"], *one["required"]})
        for one, first in zip(schemas, firsts, strict=True)
        if first is not None
    ]
    # Those of the same first property are told apart by a constant.
    return not any(
        needed <= known
        for first, _, known in objects
        for second, needed, _ in objects
        if first != second
    )


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set(_TYPES)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        names = ("object", "array", "string", "boolean", "null", "number")
        return {next(kind for kind in names if _is_of(one, kind)) for one in values}
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not all(isinstance(one, str) for one in types):
        return set(_TYPES)
    return {"number" if one == "integer" else one for one in types}


def _differ_first(schemas: Sequence[Any]) -> bool:
    """Whether objects differ in the name of their first property, or in its constants."""
    constants: dict[str, list[set[str]]] = {}
    for one in schemas:
        first = _first_member(one) if isinstance(one, Mapping) else None
        if first is None:
            return False
        constants.setdefault(first[0], []).append(first[1])
    return all(
        len(sets) == 1 or (all(sets) and len(set().union(*sets)) == sum(map(len, sets)))
        for sets in constants.values()
    )


def _first_member(schema: Mapping[str, Any]) -> tuple[str, set[str]] | None:
    """The name of the first property, and its constants; None where it may be left out."""
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not properties:
        return None
    if not all(isinstance(one, str) for one in required):
        return None
    name, value = next(iter(properties.items()))
    if name not in required:
        return None
    constants: set[str] = set()
    if isinstance(value, Mapping):
        given = [value["const"]] if "const" in value else value.get("enum")
        if isinstance(given, list):
            constants = {json.dumps(one) for one in given}
    return str(name), constants


# Arrays, objects, strings.


def _array(first: Sequence[Node], more: Node | None, least: int, most: int | None) -> Node:
    """`least` and `most` count the items after the first ones."""
    separated = [item for one in first for item in (Literal(","), _MAY_SPACE, one)][2:]
    head = sequence("[", _MAY_SPACE, *separated) if first else sequence("[", _MAY_SPACE)
    if more is None or most == 0:
        return sequence(head, _MAY_SPACE, "]") if first else sequence(head, "]")
    follower = sequence(",", _MAY_SPACE, more)
    if first:
        return sequence(head, Repeat(follower, least, most), _MAY_SPACE, "]")
    rest = repeat(follower, max(0, least - 1), None if most is None else most - 1)
    items = sequence(more, rest, _MAY_SPACE)
    return sequence(head, items if least else optional(items), "]")


def _object(
    members: Sequence[Node], value: Node | None, *, least: int = 0, most: int | None = None
) -> Node:
    """An object of any names."""
    assert not members
    if value is None or most == 0:
        return sequence("{", _MAY_SPACE, "}")
    pair = sequence(_STRING, ":", _MAY_BLANK, value)
    count = None if most is None else min(most, MAX_REPEATS) - 1
    items = sequence(pair, repeat(sequence(",", _MAY_SPACE, pair), 0, count), _MAY_SPACE)
    return sequence("{", _MAY_SPACE, items if least else optional(items), "}")


def _string(least: int, most: int | None) -> Node:
    if not least and most is None:
        return _STRING
    return Lexeme(sequence('"', repeat(_STRING_CHAR, least, most), '"'))


def _restricted_string(schema: Mapping[str, Any], place: str) -> Node:
    least = _read_count(schema, "minLength", place) or 0
    most = _read_count(schema, "maxLength", place)
    if most is not None and most < least:
        raise GrammarError(f"no text at `{place}` has {least} to {most} characters")
    pattern, form = schema.get("pattern"), schema.get("format")
    if pattern is not None and form is not None:
        raise GrammarError(f"`pattern` beside `format` at `{place}` is not supported")
    if form is not None:
        if not isinstance(form, str) or form not in _FORMATS:
            known = ", ".join(_FORMATS)
            raise GrammarError(
                f"the format `{str(form)[:40]}` at `{place}` is not supported; there is: {known}"
            )
        pattern = _FORMATS[form]
    if pattern is None:
        return _string(least, None if most is None else min(most, MAX_REPEATS))
    if not isinstance(pattern, str):
        raise GrammarError(f"`pattern` at `{place}` is no text")
    try:
        node = read_pattern(pattern)
    except GrammarError as error:
        raise GrammarError(f"`pattern` at `{place}`: {error}") from None
    shortest, longest = _lengths(node)
    if shortest < least or (most is not None and (longest is None or longest > most)):
        raise GrammarError(
            f"`minLength` or `maxLength` beside `pattern` at `{place}`: say it in the pattern"
        )
    return Lexeme(sequence('"', _quoted(node), '"'))


def _lengths(node: Node) -> tuple[int, int | None]:
    """The least and the most characters of a pattern's matches."""
    if isinstance(node, Literal):
        return len(node.text), len(node.text)
    if isinstance(node, Chars):
        return 1, 1
    found = [_lengths(item) for item in children(node)]
    if isinstance(node, Choice):
        ends = [most for _, most in found]
        return min(least for least, _ in found), None if None in ends else max(e or 0 for e in ends)
    if isinstance(node, Repeat):
        least, most = found[0]
        return least * node.least, None if most is None or node.most is None else most * node.most
    total = [most for _, most in found]
    return sum(least for least, _ in found), None if None in total else sum(t or 0 for t in total)


def _quoted(node: Node) -> Node:
    """A pattern's matches as they stand in a JSON string."""
    if isinstance(node, Literal):
        return Literal(json.dumps(node.text, ensure_ascii=False)[1:-1])
    if isinstance(node, Chars):
        plain = without(node, (0, 0x1F), '"\\')
        escaped = [
            Literal(json.dumps(chr(code))[1:-1])
            for code in (*range(0x20), ord('"'), ord("\\"))
            if any(low <= code <= high for low, high in node.ranges)
        ]
        # A class of all but a few characters need not hold those that are hard to write.
        if plain.ranges:
            return plain
        if not escaped:
            raise GrammarError("a class of it has no character")
        return choice(*escaped)
    if isinstance(node, Series):
        return Series(tuple(map(_quoted, node.items)))
    if isinstance(node, Choice):
        return Choice(tuple(map(_quoted, node.items)), node.is_distinct)
    assert isinstance(node, Repeat)
    return Repeat(_quoted(node.item), node.least, node.most)


# Numbers.


def _bounded_number(schema: Mapping[str, Any], place: str, *, is_whole: bool) -> Node:
    low, high = _read_bounds(schema, place)
    if low is None and high is None:
        return Rule("integer" if is_whole else "number")
    step = 0 if is_whole else 1
    start = None if low is None else math.ceil(low)
    end = None if high is None else math.floor(high)
    parts: list[Node] = []
    # From zero on, and below it, where the same digits stand behind a minus.
    for sign, first, last in (("", start, end), ("-", _minus(end), _minus(start))):
        least = max(0 if not sign else 1, -_LARGEST if first is None else first)
        most = max(_LARGEST, 10 * least) if last is None else last
        if least > most:
            continue
        digits: list[Node] = [_digits(least, most)]
        if step and least <= most - 1:
            fraction = sequence(".", Repeat(_DIGIT, 1, _MAX_DIGITS))
            digits.append(sequence(_digits(least, most - 1), fraction))
        parts.append(sequence(sign, choice(*digits)))
    if not parts:
        raise GrammarError(f"the bounds at `{place}` leave no whole number")
    return Lexeme(choice(*parts))


def _minus(value: int | None) -> int | None:
    return None if value is None else -value


def _read_bounds(schema: Mapping[str, Any], place: str) -> tuple[float | None, float | None]:
    """Inclusive bounds; a whole number that is left out moves its bound by one."""
    found: dict[str, float | None] = {}
    for name, exclusive, step in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        values: list[float] = []
        for key in (name, exclusive):
            value = schema.get(key)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or abs(value) > _LARGEST:
                raise GrammarError(
                    f"`{key}` at `{place}` is no number of up to {_MAX_DIGITS} digits"
                )
            is_moved = key == exclusive and float(value).is_integer()
            values.append(int(value) + step if is_moved else value)
        found[name] = None if not values else (max(values) if step > 0 else min(values))
    return found["minimum"], found["maximum"]


def _digits(low: int, high: int) -> Node:
    """The whole numbers from `low` to `high`, neither below zero."""
    parts: list[Node] = []
    for length in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 0 if length == 1 else 10 ** (length - 1))
        most = min(high, 10**length - 1)
        parts.append(_same_length(str(least), str(most)))
    return choice(*parts)


def _same_length(low: str, high: str) -> Node:
    if not low:
        return EMPTY
    if low[0] == high[0]:
        return sequence(low[0], _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return sequence(
            chars((ord(low[0]), ord(high[0]))), Repeat(_DIGIT, rest, rest) if rest else ""
        )
    parts = [sequence(low[0], _same_length(low[1:], "9" * rest))]
    if ord(high[0]) - ord(low[0]) > 1:
        between = chars((ord(low[0]) + 1, ord(high[0]) - 1))
        parts.append(sequence(between, Repeat(_DIGIT, rest, rest) if rest else ""))
    parts.append(sequence(high[0], _same_length("0" * rest, high[1:])))
    return choice(*parts, is_distinct=True)


# Patterns: regular expressions without what needs a memory.

# Dialects differ in what is a digit, a word or a space beyond ASCII: what is in doubt stands for
# neither a class nor its opposite.
_CLASSES = {
    "d": chars("0123456789"),
    "w": chars((ord("a"), ord("z")), (ord("A"), ord("Z")), "0123456789_"),
    "s": chars(" \t\n\r\f\v"),
}
_IN_DOUBT = {"d": chars((0x80, 0x10FFFF)), "w": chars((0x80, 0x10FFFF))}
_IN_DOUBT["s"] = chars((0x1C, 0x1F), "\x85\xa0\u1680\u180e", (0x2000, 0x200F), (0x2028, 0x202F))
_IN_DOUBT["s"] = chars(*_IN_DOUBT["s"].ranges, "\u205f\u3000\ufeff")
_WIDE = {name: chars(*one.ranges, *_IN_DOUBT[name].ranges) for name, one in _CLASSES.items()}
_EVERY = chars((1, 0x10FFFF))
_CLASSES |= {name.upper(): without(_EVERY, *one.ranges) for name, one in _WIDE.items()}
_WIDE |= {name.upper(): without(_EVERY, *_CLASSES[name].ranges) for name in "dws"}
_DOT = without(_EVERY, "\n\r\u2028\u2029")
_NAMED_CHARS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_MAX_GROUPS = 50


def read_pattern(pattern: str) -> Node:
    """A pattern's whole matches; raises `GrammarError` for what cannot be promised."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"it has more than {MAX_PATTERN_CHARS:,} characters")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in pattern):
        raise GrammarError("it holds half of a surrogate pair")
    node = _PatternReader(pattern).read()
    if _written_out(node) > MAX_PATTERN_PARTS:
        raise GrammarError(f"written out it has more than {MAX_PATTERN_PARTS:,} parts")
    return node


def _written_out(node: Node) -> int:
    if isinstance(node, Repeat):
        return _written_out(node.item) * max(1, node.least, node.most or 0)
    return max(1, sum(_written_out(item) for item in children(node)))


class _PatternReader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        node = self._alternatives(is_top=True)
        if self._at < len(self._text):
            raise GrammarError("a `)` has no `(`")
        return node

    def _alternatives(self, *, is_top: bool = False) -> Node:
        found = [self._series(is_top=is_top)]
        while self._takes("|"):
            found.append(self._series(is_top=is_top))
        return choice(*found)

    def _series(self, *, is_top: bool) -> Node:
        items: list[Node] = []
        if is_top:
            self._takes("^")
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if is_top and self._text[self._at] == "$" and self._peek(1) in ("", "|"):
                self._at += 1
                break
            items.append(self._repeated(self._atom()))
        return items[0] if len(items) == 1 else Series(tuple(items))

    def _repeated(self, node: Node) -> Node:
        if self._takes("*"):
            bounds: tuple[int, int | None] = (0, None)
        elif self._takes("+"):
            bounds = (1, None)
        elif self._takes("?"):
            bounds = (0, 1)
        elif (found := self._braces()) is not None:
            bounds = found
        else:
            return node
        self._takes("?")  # lazy: it matches the same texts
        if self._peek() in ("*", "+", "{"):
            raise GrammarError("it repeats a repetition")
        least, most = bounds
        if max(least, most or 0) > MAX_REPEATS:
            raise GrammarError(f"it repeats a part more than {MAX_REPEATS:,} times")
        if most is not None and most < least:
            raise GrammarError("a repetition ends before it begins")
        return repeat(node, least, most)

    def _braces(self) -> tuple[int, int | None] | None:
        if self._peek() != "{":
            return None
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, self._at)].partition(",")
        is_count = all(one.isascii() and one.isdigit() for one in filter(None, (low, high)))
        if end < 0 or not low or not is_count or len(low) > 6 or len(high) > 6:
            return None
        self._at = end + 1
        return int(low), int(high) if high else (None if comma else int(low))

    def _atom(self) -> Node:
        char = self._text[self._at]
        self._at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return _DOT
        if char == "\\":
            return self._escape()
        if char in "^$":
            raise GrammarError(f"`{char}` stands in its midst")
        if char in "*+?":
            raise GrammarError(f"`{char}` repeats nothing")
        return Literal(char)

    def _group(self) -> Node:
        if self._takes("?") and not self._takes(":"):
            name, end = "", -1
            if self._takes("<") and self._peek() not in ("=", "!"):
                end = self._text.find(">", self._at)
                name = self._text[self._at : max(end, self._at)]
            if end < 0 or not name.isidentifier():
                raise GrammarError("lookarounds and flags are not supported")
            self._at = end + 1
        self._depth += 1
        if self._depth > _MAX_GROUPS:
            raise GrammarError(f"its groups are nested more than {_MAX_GROUPS} deep")
        node = self._alternatives()
        self._depth -= 1
        if not self._takes(")"):
            raise GrammarError("a `(` has no `)`")
        return node

    def _escape(self) -> Chars | Literal:
        if self._at >= len(self._text):
            raise GrammarError("it ends with a backslash")
        char = self._text[self._at]
        self._at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _NAMED_CHARS:
            return Literal(_NAMED_CHARS[char])
        if char in "xu":
            return Literal(chr(self._hexadecimal(char)))
        if char.isalnum():
            raise GrammarError(f"`\\{char}` is not supported")
        return Literal(char)

    def _hexadecimal(self, kind: str) -> int:
        if kind == "u" and self._peek() == "{":
            end = self._text.find("}", self._at)
            digits, after = self._text[self._at + 1 : max(end, self._at)], end + 1
        else:
            after = self._at + (2 if kind == "x" else 4)
            digits = self._text[self._at : after]
        is_whole = kind == "u" or len(digits) == 2
        if (
            not is_whole
            or not digits
            or len(digits) > 6
            or set(digits) - set("0123456789abcdefABCDEF")
        ):
            raise GrammarError(f"`\\{kind}` has no number")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise GrammarError(f"`\\{kind}{digits}` is no character")
        self._at = after
        return code

    def _class(self) -> Node:
        is_negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            name = self._text[self._at + 1 : self._at + 2]
            low = self._class_item()
            if isinstance(low, Chars) and is_negated:
                low = _WIDE[name]
            if isinstance(low, Chars):
                ranges += low.ranges
                continue
            high = low
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                self._at += 1
                end = self._class_item()
                if isinstance(end, Chars) or ord(end.text) < ord(low.text):
                    raise GrammarError("a range of characters ends before it begins")
                high = end
            ranges.append((ord(low.text), ord(high.text)))
        found = chars(*ranges, is_negated=is_negated)
        found = without(found)
        if not found.ranges:
            raise GrammarError("a class of it has no character")
        return found

    def _class_item(self) -> Chars | Literal:
        if self._at >= len(self._text):
            raise GrammarError("a `[` has no `]`")
        char = self._text[self._at]
        self._at += 1
        if char == "\\":
            if self._peek() == "b":
                self._at += 1
                return Literal("\b")
            return self._escape()
        return Literal(char)

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._text[at] if at < len(self._text) else ""

    def _takes(self, mark: str) -> bool:
        is_there = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_there
        return is_there
