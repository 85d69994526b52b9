"""How a verb's options are declared: once, for Python, the command line, completion and docs.

A field of an options dataclass is `Annotated` with an `Option` or an `Argument`. Nothing here needs
typer or pydantic: the command line derives its own options from these, and `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

Read = Callable[[Any], Any]
"""From what was given to the field's value. Raises UsageError."""
Complete = Callable[[str], list[str]]
"""The words that a shell offers behind what was typed so far."""
Options = TypeVar("Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A value by position."""

    metavar: str
    help: str
    read: Read | None = None
    complete: Complete | None = None
    show_default: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """A value by name: `--lr`, or `--verify/--no-verify` for a switch with two sides."""

    name: str
    help: str
    metavar: str | None = None
    read: Read | None = None
    complete: Complete | None = None
    show_default: bool = True


Declared = Argument | Option


def list_declared(options_type: type[Any]) -> dict[str, Declared]:
    """The declaration of each field that a user can give, by the field's name."""
    found: dict[str, Declared] = {}
    hints = get_type_hints(options_type, include_extras=True)
    for field in dataclasses.fields(options_type):
        hint = hints[field.name]
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        declared = next((extra for extra in extras if isinstance(extra, Argument | Option)), None)
        if declared is not None:
            found[field.name] = declared
    return found


def read_given(options: Options) -> Options:
    """The same options with every value read and checked as the command line does."""
    given: Any = options
    read = {
        name: declared.read(value if isinstance(value, list) else str(value))
        for name, declared in list_declared(type(options)).items()
        if declared.read is not None and (value := getattr(options, name)) is not None
    }
    changed: Options = dataclasses.replace(given, **read)
    return changed
