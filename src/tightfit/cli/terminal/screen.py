"""Rich text on the terminal: the console, tables, gauges, headings and notes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tightfit.cli.terminal.output import supports_unicode, write_out
from tightfit.core.text import sanitize, sanitize_lines

# Tables: aligned columns where they fit, a stacked list where they do not. No cell is cut.

LEAST_WRAPPED = 18
"""Narrower than that, wrapped text is a column of syllables."""
LEAST_BESIDE = 16
"""Room a value needs beside its title in the stacked list."""

Cell = str | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table. `keep`: never wrapped, so that numbers and names stay whole."""

    title: str
    right: bool = False
    keep: bool = True
    style: str = ""


def lay_out(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    width: int,
    is_spaced: bool = False,
) -> RenderableType:
    """The rows as a table no wider than `width`, or one under another."""
    texts = [[as_text(cell) for cell in row] for row in rows]
    if not fits(columns, texts, width=width):
        return Group(*_stack(columns, texts, width=width))
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
    for number, row in enumerate(texts):
        if is_spaced and number:
            table.add_row()
        table.add_row(*row)
    return table


def fits(columns: Sequence[Column], rows: Sequence[Sequence[Text]], *, width: int) -> bool:
    """Whether every kept column can stand whole, with room for text in the others."""
    needed = 0
    for place, column in enumerate(columns):
        widest = max([cell_len(column.title), *(_width(row[place]) for row in rows)])
        needed += widest if column.keep else min(widest, LEAST_WRAPPED)
    gap = 3 if sys.stdout.isatty() else 2
    return needed + gap * (len(columns) - 1) <= width


def as_text(cell: Cell) -> Text:
    """Text that is no markup and holds nothing a terminal would obey."""
    if isinstance(cell, Text):
        plain = sanitize_lines(cell.plain)
        if plain != cell.plain:
            cell = cell.copy()
            cell.plain = plain  # one sign for one sign, so styles stay where they were
        return cell
    return Text(sanitize_lines(cell))


def _width(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


def _stack(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], *, width: int
) -> Iterator[RenderableType]:
    """Each row as `title  value` lines; what has no title heads them."""
    room = max(cell_len(column.title) for column in columns)
    for number, row in enumerate(rows):
        if number:
            yield ""
        for column, cell in zip(columns, row, strict=True):
            if not cell.plain:
                continue
            if not column.title:
                yield cell
            elif width - room - 2 >= LEAST_BESIDE:
                beside = Table.grid(padding=(0, 2, 0, 0))
                beside.add_column(width=room, style="bold")
                beside.add_column(overflow="fold")
                beside.add_row(column.title, cell)
                yield beside
            else:
                yield Text(column.title, style="bold")
                yield Padding(cell, (0, 0, 0, 2))


def render_pairs(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """A word and what it is, without a header."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(as_text(label), as_text(value))
    return grid


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
    if not supports_unicode():
        return "#" * round(share * width)
    whole, rest = divmod(round(share * width * 8), 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def render_gauge(fraction: float, *, width: int) -> str:
    """A bar that also shows the room left."""
    filled = round(max(0.0, min(fraction, 1.0)) * width)
    full, free = ("█", "░") if supports_unicode() else ("#", ".")
    return full * filled + free * (width - filled)


# Headings and lists of remarks, the same under every verb.


def heading(text: str) -> Text:
    return Text(sanitize(text), style="bold")


def plain(text: str) -> Text:
    """Text as it is: brackets in it are not markup."""
    return Text(sanitize(text))


def render_notes(
    title: str, notes: Sequence[str], *, is_numbered: bool = False
) -> Iterator[RenderableType]:
    """A heading and a list with hanging lines, or nothing."""
    if not notes:
        return
    listed = Table.grid(padding=(0, 1))
    listed.add_column(justify="right")
    listed.add_column(overflow="fold")
    for number, note in enumerate(notes, start=1):
        listed.add_row(f" {number}" if is_numbered else " -", plain(note))
    yield ""
    yield heading(title)
    yield listed
