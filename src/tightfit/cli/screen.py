"""Text on the terminal: the one console, tables, bars. Plain and colourless when piped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

PIPED_COLUMNS = 100
"""Width when nobody says: neither a terminal nor COLUMNS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table. `keep`: never wrapped, so that numbers stay whole."""

    title: str
    right: bool = False
    keep: bool = True
    style: str = ""


def make_console() -> Console:
    """A console for stdout as it is now (tests and pipes replace it)."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, emoji=False, width=None if is_sized else PIPED_COLUMNS)


def show(parts: Iterable[RenderableType]) -> None:
    """Render everything, then write it at once, so that a closed pipe is met in one place."""
    console = make_console()
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().split("\n")
    sys.stdout.write("\n".join(lines if console.is_terminal else [s.rstrip() for s in lines]))


def make_table(
    columns: Sequence[Column], rows: Iterable[Sequence[RenderableType]], *, is_spaced: bool = False
) -> Table:
    """Ruled under its header on a terminal; bare aligned columns in a pipe."""
    is_terminal = sys.stdout.isatty()
    table = Table(
        box=box.SIMPLE_HEAD if is_terminal else None,
        pad_edge=False,
        padding=(0, 1) if is_terminal else (0, 2, 0, 0),
        header_style="bold",
        show_edge=False,
    )
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=column.keep,
            overflow="fold",
            style=column.style or None,
        )
    for number, row in enumerate(rows):
        if is_spaced and number:
            table.add_row()
        table.add_row(*row)
    return table


def render_bar(fraction: float, *, width: int) -> str:
    """A bar `width` cells long at 1.0, in eighths of a cell; in `#` without Unicode."""
    share = max(0.0, min(fraction, 1.0))
    if not _speaks_unicode():
        return "#" * round(share * width)
    whole, rest = divmod(round(share * width * 8), 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def render_gauge(fraction: float, *, width: int) -> str:
    """A bar that also shows the room left."""
    filled = round(max(0.0, min(fraction, 1.0)) * width)
    full, free = ("█", "░") if _speaks_unicode() else ("#", ".")
    return full * filled + free * (width - filled)


def _speaks_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")
