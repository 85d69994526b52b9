"""Lets a verb declare its options as the fields of one frozen dataclass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from tightfit.cli.faults import PipeClosedError

Flags = TypeVar("Flags")


def takes(flags_type: type[Flags]) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Turn `verb(flags)` into a function with one parameter per field, which typer can read.

    A verb with thirty options then stays a function of one typed argument.
    """

    def wrap(verb: Callable[[Flags], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            try:
                verb(flags_type(**given))
            except BrokenPipeError:
                raise PipeClosedError from None

        hints = get_type_hints(flags_type, include_extras=True)
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [_parameter(field, hints[field.name]) for field in dataclasses.fields(flags_type)]  # type: ignore[arg-type]
        )
        command.__annotations__ = hints
        command.__name__ = verb.__name__
        command.__doc__ = verb.__doc__
        return command

    return wrap


def _parameter(field: dataclasses.Field[Any], annotation: Any) -> inspect.Parameter:
    is_required = field.default is dataclasses.MISSING
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_required else field.default,
        annotation=annotation,
    )
