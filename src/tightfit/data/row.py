"""Row: one example of a dataset, and where it stands on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError


class Row(NamedTuple):
    """One object of a data file. `number` counts from 1, in what `unit` names."""

    values: Mapping[str, Any]
    path: Path
    number: int
    unit: str
    """`line` where the format has lines a user can go to, else `row`."""

    @property
    def place(self) -> str:
        return place(self.path, self.number, self.unit)


def place(path: Path, number: int, unit: str = "line") -> str:
    """`train.jsonl line 12`: what an editor and a person both find."""
    return f"{path} {unit} {number}"


def excerpt(value: object, *, most: int = 60) -> str:
    """A value short enough for a message, control characters escaped."""
    text = repr(value) if not isinstance(value, str) else value
    text = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def not_an_object(where: str, value: object) -> InvalidInputError:
    """A row must be a mapping from names to values; anything else has no prompt or answer."""
    return InvalidInputError(
        f"{where} is {kind_of(value)}, not an object with keys: {excerpt(value)}",
        remedy='write each row as an object, like {"prompt": "...", "completion": "..."}',
    )


def kind_of(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    names = {bool: "a true/false value", str: "text", int: "a number", float: "a number"}
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), f"a {type(value).__name__}")
