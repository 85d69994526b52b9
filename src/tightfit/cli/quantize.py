"""`tightfit quantize`: Shrink a model to fewer bits, and measure what was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tightfit.api.options.common import Output
from tightfit.api.quantize import QuantizeOptions
from tightfit.api.quantize import quantize as quantize_model
from tightfit.cli.terminal.output import announce, progress_bar, write_err
from tightfit.cli.terminal.screen import (
    Cell,
    heading,
    make_table,
    plain,
    render_notes,
    show_output,
    styled,
)
from tightfit.core.findings import Status
from tightfit.core.units import render_bytes, render_seconds
from tightfit.export.formats import ExportFormat, read_formats
from tightfit.export.quantize.job import (
    QuantizedModel,
    QuantizeForecast,
    QuantizeStatus,
    QuantizeSummary,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {
    QuantizeStatus.GOOD: "green",
    QuantizeStatus.REPORTED: "yellow",
    QuantizeStatus.MADE: "",
    QuantizeStatus.REJECTED: "bold red",
    QuantizeStatus.FAILED: "bold red",
}


def quantize(options: QuantizeOptions, output: Output) -> None:
    """Make, check, show."""
    on_forecast = None if output.as_json else _announce_forecasts
    with progress_bar() as report:
        summary = quantize_model(replace(options, progress=report, on_forecast=on_forecast))
    show_output(summary, _render(summary), as_json=output.as_json)
    if summary.plot is not None:
        announce(Path(summary.plot))
    error = summary.find_error(read_formats(options.to or ()))
    if error is not None and output.as_json:
        # The document on stdout reports it already: no second one, only the exit code.
        raise typer.Exit(error.exit_code)
    if error is not None:
        raise error


def _announce_forecasts(forecasts: Mapping[ExportFormat, QuantizeForecast]) -> None:
    """What is to come, on stderr: stdout is for the table."""
    for target, forecast in forecasts.items():
        write_err(
            f"{target.name}: about {render_bytes(forecast.disk_bytes)} on disk, "
            f"{render_bytes(forecast.host_bytes)} of memory, "
            f"{render_seconds(forecast.seconds)} (rough)\n"
        )


def _render(summary: QuantizeSummary) -> Iterator[RenderableType]:
    size = render_bytes(summary.size_bytes)
    yield heading(f"{Path(summary.model).name}: {summary.num_params:,} parameters, {size}")
    if summary.reference_perplexity is not None:
        yield plain(
            f"The original's perplexity on {summary.text}: {summary.reference_perplexity:.3f}"
        )
    if summary.calibration is not None:
        yield plain(
            f"Calibrated on {summary.num_calibration_tokens:,} tokens of {summary.calibration}"
        )
    yield ""
    is_checked = any(row.check is not None for row in summary.rows)
    quality = (">ppl", ">change", ">KL", ">top-1") if is_checked else ()
    columns = ("*", ">bits", ">size", ">share", *quality)
    rows = [_row(row, is_checked=is_checked) for row in summary.rows]
    yield make_table((*columns, ">time", "~verdict"), rows)
    yield ""
    yield plain(
        "bits: per weight, all files of weights counted. share: of the original's size. ppl: "
        "perplexity; change: against the original's. KL: nats per token."
    )
    predicted = [
        f"{row.target.name}: memory {render_bytes(row.predicted.host_bytes)}, measured "
        f"{render_bytes(row.peak_host_bytes)}; disk {render_bytes(row.predicted.disk_bytes)}, "
        f"measured {render_bytes(row.size_bytes)}"
        for row in summary.rows
        if row.predicted is not None and row.peak_host_bytes
    ]
    yield from render_notes("Predicted", predicted)
    written = [row.path for row in summary.rows if row.standing is not QuantizeStatus.FAILED]
    yield from render_notes("Written", written)
    yield from render_notes("Beware", list(dict.fromkeys(_notes(summary))))


def _row(row: QuantizedModel, *, is_checked: bool) -> list[Cell]:
    verdict = styled(_verdict(row), _STYLES[row.standing])
    if row.standing is QuantizeStatus.FAILED:
        return [row.target.name, *[""] * (8 if is_checked else 4), verdict]
    cells: list[Cell] = [
        row.target.name,
        f"{row.bits_per_weight:.2f}",
        render_bytes(row.size_bytes),
        f"{100 * row.of_original_fraction:.0f}%",
    ]
    if is_checked:
        cells += _quality(row)
    return [*cells, render_seconds(row.seconds), verdict]


def _quality(row: QuantizedModel) -> list[Cell]:
    check = row.check
    if check is None:
        return [""] * 4
    change = check.perplexity_change_fraction
    return [
        _number(check.perplexity, ".3f"),
        "" if change is None else f"{100 * change:+.1f}%",
        _number(check.mean_kl, ".4f"),
        "" if check.top1_fraction is None else f"{100 * check.top1_fraction:.1f}%",
    ]


def _number(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value:{form}}" if value < 10_000 else f"{value:.2g}"


def _verdict(row: QuantizedModel) -> str:
    if row.standing is QuantizeStatus.MADE:
        return "not checked"
    if row.standing is QuantizeStatus.FAILED:
        return f"not made: {row.problem}"
    findings = row.check.findings if row.check is not None else ()
    has_warning = any(finding.status is Status.WARNING for finding in findings)
    return "good (!)" if has_warning and row.standing is QuantizeStatus.GOOD else row.standing.value


def _notes(summary: QuantizeSummary) -> Iterator[str]:
    for row in summary.rows:
        yield from row.notes
        for finding in row.check.findings if row.check is not None else ():
            if finding.status is not Status.INFO:
                yield f"{row.target.name}: {finding.detail}"
    yield from summary.notes
