"""Headings and lists of remarks, the same under every verb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tightfit.cli.terminal.harmless import harmless


def heading(text: str) -> Text:
    return Text(harmless(text), style="bold")


def plain(text: str) -> Text:
    """Text as it is: brackets in it are not markup."""
    return Text(harmless(text))


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
