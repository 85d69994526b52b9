"""Rich text on the terminal: the console, tables, gauges, headings and notes.

rich loads when something is rendered: `--json` does without it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tightfit.cli.terminal.output import show_json, supports_unicode, write_out
from tightfit.core.text import sanitize, sanitize_lines

VERDICT_STYLES = {
    "fits": "bold green",
    "tight": "bold yellow",
    "does_not_fit": "bold red",
    "illegal": "bold red",
}

# Tables: aligned columns where they fit, a stacked list where they do not. No cell is cut.

LEAST_WRAPPED = 18
"""Narrower than that, wrapped text is a column of syllables."""
LEAST_BESIDE = 16
"""Room a value needs beside its title in the stacked list."""

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

Cell: TypeAlias = "str | Text"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. `keep`: never wrapped, so that numbers and names stay whole."""

    title: str
    right: bool = False
    keep: bool = True
    style: str = ""


PIPED_COLUMNS = 100
"""Width when nobody says: neither a terminal nor COLUMNS."""


def make_table(
    titles: Sequence[str | Column],
    rows: Iterable[Sequence[Cell]],
    *,
    is_spaced: bool = False,
    piped_columns: int = PIPED_COLUMNS,
) -> RenderableType:
    """Ruled under its header on a terminal, bare aligned columns in a pipe, a list if narrow.

    A column is its title, behind marks: `>` aligns it right, as in a format string, `~` lets its
    text wrap, `*` makes it bold. `piped_columns`: as wide as `show` is told, for a table that is
    not to become a list in a pipe.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table

    columns = [_read_column(title) if isinstance(title, str) else title for title in titles]
    texts = [[as_text(cell) for cell in row] for row in rows]
    width = make_console(piped_columns).width
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


def show_output(value: Any, parts: Iterable[RenderableType], *, as_json: bool) -> None:
    """The value as JSON for a program, or its parts for a person."""
    if as_json:
        show_json(value)
    else:
        show(parts)


def _read_column(title: str) -> Column:
    name = title.lstrip(">~*")
    marks = title[: len(title) - len(name)]
    style = "bold" if "*" in marks else ""
    return Column(name, right=">" in marks, keep="~" not in marks, style=style)


def fits(columns: Sequence[Column], rows: Sequence[Sequence[Text]], *, width: int) -> bool:
    """Whether every kept column can stand whole, with room for text in the others."""
    from rich.cells import cell_len

    needed = 0
    for place, column in enumerate(columns):
        widest = max([cell_len(column.title), *(_width(row[place]) for row in rows)])
        needed += widest if column.keep else min(widest, LEAST_WRAPPED)
    gap = 3 if sys.stdout.isatty() else 2
    return needed + gap * (len(columns) - 1) <= width


def as_text(cell: Cell) -> Text:
    """Text that is no markup and holds nothing a terminal would obey."""
    from rich.text import Text

    if isinstance(cell, Text):
        plain = sanitize_lines(cell.plain)
        if plain != cell.plain:
            cell = cell.copy()
            cell.plain = plain  # one sign for one sign, so styles stay where they were
        return cell
    return Text(sanitize_lines(cell))


def _width(text: Text) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, text.plain.split("\n")))


def _stack(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], *, width: int
) -> Iterator[RenderableType]:
    """Each row as `title  value` lines; what has no title heads them."""
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.table import Table

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
                yield heading(column.title)
                yield Padding(cell, (0, 0, 0, 2))


def render_grid(
    marks: Sequence[str], rows: Iterable[Sequence[Cell]], *, gap: int = 2
) -> RenderableType:
    """Aligned columns without a header; their marks are those of `make_table`."""
    from rich.table import Table

    grid = Table.grid(padding=(0, gap, 0, 0))
    for column in map(_read_column, marks):
        grid.add_column(
            justify="right" if column.right else "left",
            no_wrap=column.keep,
            overflow="fold",
            style=column.style,
        )
    for row in rows:
        grid.add_row(*map(as_text, row))
    return grid


def render_pairs(rows: Iterable[tuple[str, Cell]]) -> RenderableType:
    """A word and what it is."""
    return render_grid(("*", "~"), rows)


LEAST_COLUMNS = 10


class _LikeStdout(io.StringIO):
    """What rich may write to: it writes even while capturing, and stdout may be full."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding or "ascii"

    def isatty(self) -> bool:
        return sys.stdout.isatty()


def make_console(piped_columns: int = PIPED_COLUMNS) -> Console:
    """A console for stdout as it is now (tests and pipes replace it)."""
    from rich.console import Console

    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if is_sized else piped_columns
    console = Console(file=_LikeStdout(), highlight=False, emoji=False, width=width)
    console.width = max(console.width, LEAST_COLUMNS)
    return console


def show(parts: Iterable[RenderableType], *, piped_columns: int = PIPED_COLUMNS) -> None:
    """Render everything, then write it at once, so that a closed pipe is met in one place."""
    from rich.text import Text

    console = make_console(piped_columns)
    with console.capture() as captured:
        for part in parts:
            console.print(as_text(part) if isinstance(part, str | Text) else part)
    lines = captured.get().split("\n")
    write_out("\n".join(lines if console.is_terminal else [s.rstrip() for s in lines]))


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


def styled(text: str, style: str = "") -> Text:
    """Text as it is: brackets in it are not markup."""
    from rich.text import Text

    return Text(sanitize(text), style=style)


def heading(text: str) -> Text:
    return styled(text, "bold")


def plain(text: str) -> Text:
    return styled(text)


def render_notes(
    title: str, notes: Sequence[str], *, is_numbered: bool = False
) -> Iterator[RenderableType]:
    """A heading and a list with hanging lines, or nothing."""
    if not notes:
        return
    yield ""
    yield heading(title)
    rows = [
        (f" {number}" if is_numbered else " -", plain(note))
        for number, note in enumerate(notes, start=1)
    ]
    yield render_grid((">", "~"), rows, gap=1)
