"""`tightfit convert`: write a model in another format; predicted and measured cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from tightfit.api.convert import convert as convert_model
from tightfit.cli.flags.export import ConvertFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json, write_err
from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.core.text import sanitize
from tightfit.core.units import render_bytes, render_seconds
from tightfit.export.convert import ConvertResult

if TYPE_CHECKING:
    from tightfit.export.convert import ConvertForecast, ConvertSource


_FORMATS = {"gguf": "GGUF file", "hf": "Hugging Face folder"}


def show_conversion(made: ConvertResult) -> None:
    show(_render(made))


def _render(made: ConvertResult) -> Iterator[RenderableType]:
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


def convert(flags: ConvertFlags) -> None:
    """Convert and show."""
    with progress_bar() as report:
        made = convert_model(replace(flags, progress=report, on_forecast=_announce_forecast))
    if flags.as_json:
        show_json(made.model_dump(mode="json"))
    else:
        show_conversion(made)
    announce(Path(made.path))


def _announce_forecast(source: ConvertSource, target: Path, forecast: ConvertForecast) -> None:
    from tightfit.export.convert import KIND_NAMES

    write_err(
        f"{sanitize(source.name)} is {KIND_NAMES[source.kind]}; "
        f"{sanitize(target.name)} will take {render_bytes(forecast.disk_bytes)} of disk, and "
        f"making it {render_bytes(forecast.host_bytes)} of memory\n"
    )
