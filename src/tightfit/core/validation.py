"""Validation errors of a file in plain words: where, what was expected, what was found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tightfit.core.text import did_you_mean, printable

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a file to a value."""
_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def describe_validation_errors(
    error: ValidationError,
    model: type[BaseModel],
    *,
    lines: Mapping[KeyPath, int],
    homes: Mapping[str, str] | None = None,
) -> list[str]:
    """One line per error. `homes` has, for a misplaced key's dotted path, where it belongs."""
    found: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        place = tuple(item["loc"])
        text = _describe(dict(item), place, model, homes or {})
        found.setdefault(place, _at(place, lines) + text)
    return sorted(found.values(), key=_line_number)


def dotted(place: KeyPath) -> str:
    """`data[0].weight`: a place as people write it."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return printable(text)


def describe_value(value: Any) -> str:
    """What a value is and what it says: "text `abc`", "a list", "nothing"."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"text `{printable(value, most=40)}`"
    if isinstance(value, int | float):
        return printable(_digits(value), most=40)
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _digits(value: int | float) -> str:
    # Python refuses to print integers of thousands of digits.
    is_long = isinstance(value, int) and value.bit_length() > 200
    return "a number of more than 60 digits" if is_long else str(value)


def _describe(
    item: dict[str, Any], place: KeyPath, model: type[BaseModel], homes: Mapping[str, str]
) -> str:
    name, kind = dotted(place), item["type"]
    if kind == "extra_forbidden":
        if home := homes.get(name):
            return f"`{name}` belongs under `{home}`."
        known = keys_at(model, place[:-1])
        inside = f" of `{dotted(place[:-1])}`" if len(place) > 1 else ""
        return f"`{name}` is not a known key{inside}.{did_you_mean(str(place[-1]), known)}"
    if kind == "missing":
        return f"`{name}` is missing."
    if kind == "value_error":
        return f"{item['ctx']['error']}."
    return f"`{name}`: expected {_expected(item)}, found {describe_value(item['input'])}."


def _expected(item: dict[str, Any]) -> str:
    kind, context = item["type"], item.get("ctx") or {}
    if kind in _LIMITS:
        word, key = _LIMITS[kind]
        return f"{word} {context[key]:,}"
    if kind in ("enum", "literal_error"):
        return str(context["expected"]).replace("'", "")
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "string_too_long":
        return f"text of at most {context['max_length']} characters"
    return _KINDS.get(kind) or str(item["msg"]).removeprefix("Input should be ")


def keys_at(model: type[BaseModel], place: KeyPath) -> list[str]:
    """The keys that the model knows at a place; lists are passed through."""
    current: Any = model
    for part in place:
        if isinstance(part, str):
            info = current.model_fields.get(part)
            if info is None:
                return []
            inner = _model_in(info.annotation)
            if inner is None:
                return []
            current = inner
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for arg in get_args(annotation) if (m := _model_in(arg))), None)


def _at(place: KeyPath, lines: Mapping[KeyPath, int]) -> str:
    """The line of the value, or of the nearest thing around it that was written."""
    while place and place not in lines:
        place = place[:-1]
    return f"line {lines[place]}: " if place in lines and place else ""


def _line_number(text: str) -> int:
    match = re.match(r"line (\d+): ", text)
    return int(match.group(1)) if match else 0
