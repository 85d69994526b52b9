"""`tightfit quantize`: make a model smaller and measure the loss of quality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import RenderableType
from rich.text import Text

from tightfit.api.quantize import quantize as quantize_model
from tightfit.cli.flags.export import QuantizeFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json, write_err
from tightfit.cli.terminal.screen import (
    Cell,
    Column,
    heading,
    make_table,
    plain,
    render_notes,
    show,
)
from tightfit.core.units import render_bytes, render_seconds
from tightfit.export.formats import ExportFormat, read_formats
from tightfit.export.quantize.summary import QuantizedModel, QuantizeStatus, QuantizeSummary
from tightfit.export.verify.verdict import Level

if TYPE_CHECKING:
    from tightfit.export.formats import ExportFormat
    from tightfit.export.quantize.summary import QuantizeForecast


# Quantized models as a table: size, quality against the original, verdict.

_STYLES = {
    QuantizeStatus.GOOD: "green",
    QuantizeStatus.REPORTED: "yellow",
    QuantizeStatus.MADE: "",
    QuantizeStatus.REJECTED: "bold red",
    QuantizeStatus.FAILED: "bold red",
}


def show_summary(summary: QuantizeSummary) -> None:
    show(_render(summary))


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
    yield _table(summary)
    yield ""
    yield plain(
        "bits: per weight, all files of weights counted. share: of the original's size. ppl: "
        "perplexity; change: against the original's. KL: nats per token."
    )
    places = [row.path for row in summary.rows if row.standing is not QuantizeStatus.FAILED]
    yield from render_notes("Predicted", list(_memory(summary)))
    yield from render_notes("Written", places)
    yield from render_notes("Beware", list(dict.fromkeys(_notes(summary))))


def _table(summary: QuantizeSummary) -> RenderableType:
    is_checked = any(row.check is not None for row in summary.rows)
    columns = [
        Column(title="", style="bold"),
        Column(title="bits", right=True),
        Column(title="size", right=True),
        Column(title="share", right=True),
    ]
    if is_checked:
        columns += [
            Column(title="ppl", right=True),
            Column(title="change", right=True),
            Column(title="KL", right=True),
            Column(title="top-1", right=True),
        ]
    columns += [Column(title="time", right=True), Column(title="verdict", keep=False)]
    return make_table(columns, [_row(row, is_checked=is_checked) for row in summary.rows])


def _row(row: QuantizedModel, *, is_checked: bool) -> list[Cell]:
    verdict = Text(_verdict(row), style=_STYLES[row.standing])
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


def _memory(summary: QuantizeSummary) -> Iterator[str]:
    """Predicted beside measured, for what was made."""
    for row in summary.rows:
        if row.predicted is not None and row.peak_host_bytes:
            memory, disk = row.predicted.host_bytes, row.predicted.disk_bytes
            yield (
                f"{row.target.name}: memory {render_bytes(memory)}, measured "
                f"{render_bytes(row.peak_host_bytes)}; disk {render_bytes(disk)}, measured "
                f"{render_bytes(row.size_bytes)}"
            )


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
    has_warning = row.check is not None and any(
        finding.level is Level.WARNING for finding in row.check.findings
    )
    return "good (!)" if has_warning and row.standing is QuantizeStatus.GOOD else row.standing.value


def _notes(summary: QuantizeSummary) -> Iterator[str]:
    for row in summary.rows:
        yield from row.notes
        if row.check is not None:
            for finding in row.check.findings:
                if finding.level is not Level.NOTE:
                    yield f"{row.target.name}: {finding.text}"
    yield from summary.notes


def quantize(flags: QuantizeFlags) -> None:
    """Make, check, show."""
    with progress_bar() as report:
        summary = quantize_model(
            replace(
                flags,
                progress=report,
                on_forecast=None if flags.as_json else _announce_forecasts,
            )
        )
    if flags.as_json:
        show_json(summary.model_dump(mode="json"))
    else:
        show_summary(summary)
    if summary.plot is not None:
        announce(Path(summary.plot))
    error = summary.find_error(read_formats(flags.to or ()))
    if error is not None and flags.as_json:
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
