"""`tightfit merge`: Add a run's adapter to its base model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.merge import MergeOptions
from tightfit.api.merge import merge as merge_model
from tightfit.api.options.common import Output
from tightfit.cli.terminal.output import announce, progress_bar, show_json, write_err
from tightfit.cli.terminal.screen import heading, plain, render_notes, show
from tightfit.cli.verify import render_verdict
from tightfit.core.text import count_of
from tightfit.core.units import render_bytes, render_seconds
from tightfit.export.merge import MergeForecast, MergeResult

if TYPE_CHECKING:
    from rich.console import RenderableType


def merge(options: MergeOptions, output: Output) -> None:
    """Merge and show; a rejected result ends with an error."""
    with progress_bar() as report:
        merged = merge_model(replace(options, progress=report, on_forecast=_announce_forecast))
    if output.as_json and merged.is_accepted:
        show_json(merged)
    elif not output.as_json:
        show(_render(merged))
    announce(Path(merged.path))
    merged.raise_if_rejected()


def _announce_forecast(forecast: MergeForecast) -> None:
    write_err(
        f"merging takes {render_bytes(forecast.host_bytes)} of memory and "
        f"{render_bytes(forecast.disk_bytes)} of disk\n"
    )


def _render(merged: MergeResult) -> Iterator[RenderableType]:
    yield heading(f"{merged.adapter} merged into {merged.base}")
    stored = " and ".join(merged.dtypes)
    yield plain(
        f"{merged.num_changed} of {count_of(merged.num_tensors, 'tensor')} changed, stored in "
        f"{stored}: {render_bytes(merged.size_bytes)} in {render_seconds(merged.seconds)}"
    )
    yield plain(
        f"memory: {render_bytes(merged.predicted.host_bytes)} predicted, "
        f"{render_bytes(merged.peak_host_bytes)} measured"
    )
    yield from render_notes("Note", merged.notes)
    if merged.verdict is not None:
        yield ""
        yield from render_verdict(merged.verdict)
