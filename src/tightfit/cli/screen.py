"""Text on the terminal: the one console, tables, bars. Plain and colourless when piped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    import os

    from rich.console import Console

    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(
        highlight=False, emoji=False, soft_wrap=False, width=None if is_sized else PIPED_COLUMNS
    )


def show(*parts: RenderableType) -> None:
    """Render everything, then write it at once, so that a closed pipe is met in one place."""
    console = make_console()
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().split("\n")
    text = "\n".join(lines if console.is_terminal else [line.rstrip() for line in lines])
    sys.stdout.write(text)


def show_json(value: Any) -> None:
    """One JSON document on stdout and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def make_table(columns: Sequence[Column], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Ruled under its header on a terminal; bare aligned columns in a pipe."""
    from rich import box
    from rich.table import Table

    is_terminal = sys.stdout.isatty()
    table = Table(
        box=box.SIMPLE_HEAD if is_terminal else None,
        pad_edge=is_terminal,
        padding=(0, 2 if not is_terminal else 1, 0, 0 if not is_terminal else 1),
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
    for row in rows:
        table.add_row(*row)
    return table


def render_bar(fraction: float, *, width: int = 24) -> str:
    """A bar `width` cells long at 1.0, in eighths of a cell; in `#` where the terminal knows no more."""
    if not _speaks_unicode():
        return "#" * round(min(fraction, 1.0) * width)
    eighths = round(max(0.0, min(fraction, 1.0)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def _speaks_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")
