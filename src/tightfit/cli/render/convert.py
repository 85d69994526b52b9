"""A conversion as text: what was made, what it took beside what was predicted, what to do next."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.core.units import render_bytes, render_seconds
from tightfit.export.convert.convert import Conversion

_FORMATS = {"gguf": "GGUF file", "hf": "Hugging Face folder"}


def show_conversion(made: Conversion) -> None:
    show(_render(made))


def _render(made: Conversion) -> Iterator[RenderableType]:
    yield heading(f"{made.source} as {_FORMATS[made.format]}, {made.dtype}: {made.path}")
    yield ""
    columns = [Column(title="", style="bold"), Column(title="predicted", right=True)]
    yield make_table(
        [*columns, Column(title="measured", right=True)],
        [
            ["size", render_bytes(made.forecast.disk_bytes), render_bytes(made.size_bytes)],
            [
                "host memory, peak",
                render_bytes(made.forecast.host_bytes),
                render_bytes(made.peak_host_bytes),
            ],
            ["time", "", render_seconds(made.seconds)],
        ],
    )
    yield from render_notes("Beware", made.notes)
    yield ""
    yield plain(f"next: {made.next_command}")
