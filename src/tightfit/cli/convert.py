"""`tightfit convert`: Turn a model into another format, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.convert import ConvertOptions
from tightfit.api.convert import convert as convert_model
from tightfit.api.options.common import Output
from tightfit.cli.terminal.output import announce, progress_bar, write_err
from tightfit.cli.terminal.screen import heading, make_table, plain, render_notes, show_output
from tightfit.core.text import sanitize
from tightfit.core.units import render_bytes, render_seconds
from tightfit.export.convert import KIND_NAMES, ConvertForecast, ConvertResult, ConvertSource

if TYPE_CHECKING:
    from rich.console import RenderableType

_FORMATS = {"gguf": "GGUF file", "hf": "Hugging Face folder", "gguf-lora": "GGUF adapter"}


def convert(options: ConvertOptions, output: Output) -> None:
    """Convert and show."""
    with progress_bar() as report:
        made = convert_model(replace(options, progress=report, on_forecast=_announce_forecast))
    show_output(made, _render(made), as_json=output.as_json)
    announce(Path(made.path))


def _render(made: ConvertResult) -> Iterator[RenderableType]:
    yield heading(f"{made.source} as {_FORMATS[made.format]}, {made.dtype}: {made.path}")
    yield ""
    yield make_table(
        ["*", ">predicted", ">measured"],
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


def _announce_forecast(source: ConvertSource, target: Path, forecast: ConvertForecast) -> None:
    write_err(
        f"{sanitize(source.name)} is {KIND_NAMES[source.kind]}; "
        f"{sanitize(target.name)} will take {render_bytes(forecast.disk_bytes)} of disk, and "
        f"making it {render_bytes(forecast.host_bytes)} of memory\n"
    )
