"""Makes a typer command of a frozen dataclass of options and a verb that is loaded when called."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from tightfit.cli.faults import UnforeseenOSError
from tightfit.cli.terminal.output import PipeClosedError


def make_command(verb: str, flags_type: type[Any]) -> Callable[..., None]:
    """A function with one parameter per field, which calls `tightfit.cli.<verb>.<verb>(flags)`.

    A verb with thirty options so stays a function of one typed argument, and nothing it
    needs is loaded before it runs. The dataclass's docstring is the help text.
    """

    def command(**given: Any) -> None:
        run = getattr(importlib.import_module(f"tightfit.cli.{verb}"), verb)
        try:
            run(flags_type(**given))
        except BrokenPipeError:
            raise PipeClosedError from None
        except OSError as fault:
            raise UnforeseenOSError from fault

    hints = {
        name: _as_text(hint)
        for name, hint in get_type_hints(flags_type, include_extras=True).items()
    }
    fields = dataclasses.fields(flags_type)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(field, hints[field.name]) for field in fields]
    )
    command.__annotations__ = hints
    command.__name__ = verb
    command.__doc__ = flags_type.__doc__
    return command


def _parameter(field: dataclasses.Field[Any], annotation: Any) -> inspect.Parameter:
    is_required = field.default is dataclasses.MISSING
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_required else field.default,
        annotation=annotation,
    )


def _as_text(hint: Any) -> Any:
    """Numbers and paths reach their option's callback as they were typed.

    The callback reads them: the parser's own messages name neither value nor bound, and an
    empty path would be taken for this folder.
    """
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    is_read_by_us = {int, float, Path} & {kind, *get_args(kind)}
    subscribed: Any = Annotated
    parts = (str | None, *extras)
    return subscribed[parts] if is_read_by_us else hint
