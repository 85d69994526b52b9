"""Headings and lists of remarks, the same under every verb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


def heading(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="bold")


def plain(text: str) -> Text:
    """Text as it is: brackets in it are not markup."""
    from rich.text import Text

    return Text(text)


def render_notes(title: str, notes: Sequence[str]) -> Iterator[RenderableType]:
    """A heading and a list with hanging lines, or nothing."""
    if not notes:
        return
    from rich.table import Table

    listed = Table.grid(padding=(0, 1))
    for note in notes:
        listed.add_row(" -", plain(note))
    yield ""
    yield heading(title)
    yield listed
