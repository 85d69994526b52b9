"""Text on the terminal: the one console, tables, bars. Plain and colourless when piped."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from tightfit.cli.terminal.output import speaks_unicode, write_out
from tightfit.cli.terminal.table import Cell, Column, as_text, lay_out

__all__ = ["Column", "make_console", "make_table", "render_bar", "render_gauge", "show"]
PIPED_COLUMNS = 100
"""Width when nobody says: neither a terminal nor COLUMNS."""
LEAST_COLUMNS = 10


class _LikeStdout(io.StringIO):
    """What rich may write to: it writes even while capturing, and stdout may be full."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding or "ascii"

    def isatty(self) -> bool:
        return sys.stdout.isatty()


def make_console() -> Console:
    """A console for stdout as it is now (tests and pipes replace it)."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if is_sized else PIPED_COLUMNS
    console = Console(file=_LikeStdout(), highlight=False, emoji=False, width=width)
    console.width = max(console.width, LEAST_COLUMNS)
    return console


def show(parts: Iterable[RenderableType]) -> None:
    """Render everything, then write it at once, so that a closed pipe is met in one place."""
    console = make_console()
    with console.capture() as captured:
        for part in parts:
            console.print(as_text(part) if isinstance(part, str | Text) else part)
    lines = captured.get().split("\n")
    write_out("\n".join(lines if console.is_terminal else [s.rstrip() for s in lines]))


def make_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, is_spaced: bool = False
) -> RenderableType:
    """Ruled under its header on a terminal, bare aligned columns in a pipe, a list if narrow."""
    return lay_out(columns, rows, width=make_console().width, is_spaced=is_spaced)


def render_bar(fraction: float, *, width: int) -> str:
    """A bar `width` cells long at 1.0, in eighths of a cell; in `#` without Unicode."""
    share = max(0.0, min(fraction, 1.0))
    if not speaks_unicode():
        return "#" * round(share * width)
    whole, rest = divmod(round(share * width * 8), 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def render_gauge(fraction: float, *, width: int) -> str:
    """A bar that also shows the room left."""
    filled = round(max(0.0, min(fraction, 1.0)) * width)
    full, free = ("█", "░") if speaks_unicode() else ("#", ".")
    return full * filled + free * (width - filled)
