"""Tools and tool calls in one form, whichever of the usual spellings a row or request has."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`, as in templates."""

MAX_DEPTH = 32
"""Of objects in objects. Published schemas have about 10; recursive templates end beyond 100."""
_MAX_LITERAL_CHARS = 100_000
_WITH_NULL = ("default", "const", "example")
"""Keys of a schema whose value may be null; elsewhere Arrow wrote it for a key another row has."""


class ToolError(Exception):
    """Tools, or a call, that cannot be understood; says why without a full stop."""


class ToolCall(NamedTuple):
    """One call. Arguments are an object, as transformers hands them to templates."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def as_json(self) -> str:
        """Name and arguments, as most models write a call."""
        facts = {"name": self.name, "arguments": self.arguments}
        return json.dumps(facts, ensure_ascii=False, default=str)


def enclosed(text: str, start: str, end: str) -> Iterator[tuple[int, str, int]]:
    """Each text between two marks, with where the first mark begins and the second one ends.

    In linear time, which a regular expression would not take of marks that are never closed.
    """
    at = text.find(start)
    while at >= 0 and (stop := text.find(end, at + len(start))) >= 0:
        yield at, text[at + len(start) : stop], stop + len(end)
        at = text.find(start, stop + len(end))


def make_decoder() -> json.JSONDecoder:
    """A decoder of JSON without NaN and infinity, which Python writes and others do not read."""
    return json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_float)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


_DECODER = make_decoder()


def load_json(text: str) -> Any:
    """A JSON value; raises `ToolError` for anything else, NaN and deep nesting included."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ToolError(f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ToolError(f"cannot be read as JSON ({error})") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises `ToolError` where lists and objects are nested too deep for a template."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
        if not below:
            return
        level = below
    raise ToolError(f"is nested more than {MAX_DEPTH} deep")


# Declarations.


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Tools from a list of schemas, bare or wrapped in `function`, or the JSON text of one."""
    if isinstance(value, str):
        value = _load("`tools`", value) if value.strip() else None
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ToolError("`tools` is not a list")
    tools = [_read_tool(item, f"tool {number}") for number, item in enumerate(value, start=1)]
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ToolError(f"the tool `{twice}` is listed twice")
    return tuple(tools)


def tool_names(tools: Sequence[Tool]) -> list[str]:
    """Names, in order."""
    return [str(tool["function"]["name"]) for tool in tools]


def _read_tool(item: Any, place: str) -> Tool:
    if isinstance(item, str):
        item = _load(place, item)
    if not isinstance(item, Mapping):
        raise ToolError(f"{place} is not an object")
    try:
        check_depth(item)
    except ToolError as error:
        raise ToolError(f"{place} {error}") from None
    kind = item.get("type", "function")
    if "function" not in item and isinstance(item.get("name"), str):
        function = {key: part for key, part in item.items() if key != "type" or part != "function"}
        item = {"type": "function", "function": function}
    elif kind != "function":
        raise ToolError(f"{place} is of type `{str(kind)[:40]}`; only `function` is known")
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise ToolError(f"{place} has no `function` with a `name`")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ToolError(f"{place} has no name")
    function = _without_nulls(function)
    if not isinstance(function.get("description", ""), str):
        raise ToolError(f"the description of `{name}` is not text")
    _check_schema(function.get("parameters"), name)
    return {
        **_without_nulls({k: v for k, v in item.items() if k != "function"}),
        "function": function,
    }


def _check_schema(schema: Any, name: str) -> None:
    if schema is None:
        return
    where = f"the parameters of `{name}`"
    if not isinstance(schema, Mapping):
        raise ToolError(f"{where} are not a JSON schema: not an object")
    if schema.get("type", "object") != "object":
        raise ToolError(f"{where} are not a JSON schema of an object")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(
        isinstance(part, Mapping | bool) for part in properties.values()
    ):
        raise ToolError(f"{where} are not a JSON schema: `properties` holds what is no schema")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(key, str) for key in required):
        raise ToolError(f"{where} are not a JSON schema: `required` is not a list of names")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: part if part is None else _without_nulls(part)
            for key, part in value.items()
            if part is not None or key in _WITH_NULL
        }
    if isinstance(value, list | tuple):
        return [_without_nulls(part) for part in value]
    return value


def _load(what: str, text: str) -> Any:
    try:
        return load_json(text)
    except ToolError as error:
        raise ToolError(f"{what} {error}") from None


# Calls.


def read_calls(value: Any) -> tuple[ToolCall, ...]:
    """Calls from a list, one object, or the JSON text of either."""
    if isinstance(value, str):
        value = _load("the tool call", value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ToolError("the tool calls are not a list")
    return tuple(_read_call(item) for item in value)


def _read_call(item: Any) -> ToolCall:
    if not isinstance(item, Mapping):
        raise ToolError("a tool call is not an object")
    given = item.get("id")
    inner = item.get("function")
    if isinstance(inner, Mapping):
        item = inner
    name = item.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ToolError("a tool call has no function name")
    return ToolCall(name, read_arguments(name, item), given if isinstance(given, str) else "")


def read_arguments(name: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, as an object; Llama calls them `parameters`."""
    arguments = item.get("arguments", item.get("parameters"))
    what = f"the arguments of `{name}`"
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        arguments = _load(what, arguments)
    if not isinstance(arguments, Mapping):
        raise ToolError(f"{what} are not an object")
    try:
        check_depth(arguments)
    except ToolError as error:
        raise ToolError(f"{what}: it {error}") from None
    return arguments


def comparable(call: ToolCall) -> str:
    """Equal for calls whose names and arguments are the same JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        is_whole = isinstance(value, float) and value.is_integer()
        return int(value) if is_whole else value  # 2.0 is 2 in JSON

    return json.dumps([call.name, plain(call.arguments)], sort_keys=True, default=str)


def read_literal(text: str) -> Any:
    """JSON, or the Python literal that some sets hold in its place."""
    try:
        return load_json(text)
    except ToolError as error:
        if len(text) > _MAX_LITERAL_CHARS:
            raise
        try:
            # Through JSON, which has no sets, bytes, complex numbers and keys that are no texts.
            return load_json(json.dumps(ast.literal_eval(text.strip())))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            raise error from None


def drop_filled_nulls(call: ToolCall, tools: Sequence[Tool]) -> ToolCall:
    """Without the nulls that Arrow writes for arguments of other rows' tools."""
    if None not in call.arguments.values():
        return call
    known: set[str] = set()
    for tool in tools:
        if tool["function"]["name"] == call.name:
            known.update((tool["function"].get("parameters") or {}).get("properties") or {})
    kept = {
        key: value for key, value in call.arguments.items() if value is not None or key in known
    }
    return call._replace(arguments=kept)
