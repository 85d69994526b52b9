"""QuantizeSummary: what was made of a model, how large and how good; saved as quantize.json and a
plot.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveInt,
    ValidationError,
)

from tightfit.core.errors import CheckFailedError, InvalidInputError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.units import MIB
from tightfit.export.formats import ExportFormat, find_format
from tightfit.export.verify.verdict import Comparison, Level

SUMMARY_FILE = "quantize.json"
PLOT_FILE = "quantize.png"


def _read_format(name: object) -> ExportFormat:
    try:
        return name if isinstance(name, ExportFormat) else find_format(str(name))
    except UsageError as error:
        raise ValueError(error.problem) from error


class QuantizeStatus(str, Enum):
    """What became of one format."""

    MADE = "made"
    """Written whole, not checked."""
    GOOD = "good"
    REPORTED = "reported"
    """Too few bits for a limit: the figures are what there is to say."""
    REJECTED = "rejected"
    """It failed the check and was renamed."""
    FAILED = "failed"
    """Could not be made; `problem` says why."""

    @property
    def is_done(self) -> bool:
        return self in (QuantizeStatus.MADE, QuantizeStatus.GOOD, QuantizeStatus.REPORTED)


SavedFormat = Annotated[
    ExportFormat,
    PlainValidator(_read_format),
    PlainSerializer(lambda saved: saved.name, return_type=str),
]
"""Saved by its name."""


class QuantizeForecast(Frozen):
    """What one format will take. Leaves out the check after it."""

    host_bytes: NonNegativeInt
    """Peak memory of the process that writes it."""
    disk_bytes: NonNegativeInt
    """Of the result."""
    seconds: NonNegativeFloat
    """Rough: it depends on the machine and on what else runs there."""


class QuantizedModel(Frozen):
    """One format."""

    target: SavedFormat
    key: str
    """Of the calibration and the settings: only with the same ones is it taken as done."""
    path: str
    standing: QuantizeStatus
    size_bytes: NonNegativeInt = 0
    """Of the weights' files."""
    bits_per_weight: NonNegativeFloat = 0.0
    of_original_fraction: NonNegativeFloat = 0.0
    seconds: NonNegativeFloat = 0.0
    peak_host_bytes: NonNegativeInt = 0
    """Of the process that did it."""
    predicted: QuantizeForecast | None = None
    importance: bool = False
    notes: tuple[str, ...] = ()
    problem: str | None = None
    remedy: str | None = None
    check: Comparison | None = None


class QuantizeSummary(Frozen):
    """The whole job."""

    schema_version: int = 1
    model: str
    key: str
    """Of the model's files: results of other weights do not stand beside these."""
    size_bytes: PositiveInt
    """Of the original's weights."""
    num_params: PositiveInt
    calibration: str | None = None
    num_calibration_tokens: NonNegativeInt = 0
    text: str | None = None
    """What quality was measured on."""
    reference_perplexity: float | None = None
    rows: tuple[QuantizedModel, ...] = ()
    notes: tuple[str, ...] = ()
    plot: str | None = None
    updated_at: str
    """UTC, ISO 8601."""
    tightfit: str

    @property
    def is_good(self) -> bool:
        return bool(self.rows) and all(row.standing.is_done for row in self.rows)

    def find(self, target: ExportFormat) -> QuantizedModel | None:
        return next((row for row in self.rows if row.target is target), None)

    def find_error(self, formats: Sequence[ExportFormat]) -> UserError | None:
        """What is wrong with these formats: a rejected result before one that was not made."""
        rows = [row for row in self.rows if row.target in formats]
        for row in rows:
            if row.standing is QuantizeStatus.REJECTED and row.check is not None:
                first = next(f for f in row.check.findings if f.level is Level.FAIL)
                return CheckFailedError(
                    f"{row.target.name} is not good enough to be used: {first.text} It is kept as "
                    f"{row.path}.",
                    remedy=first.remedy
                    or "choose a width with more bits, or calibrate on more data",
                )
        for row in rows:
            if row.standing is QuantizeStatus.FAILED:
                return UserError(
                    f"{row.target.name} could not be made: {row.problem}",
                    remedy=row.remedy or "run the same command again; what is done stays done",
                )
        return None

    def with_row(self, row: QuantizedModel) -> QuantizeSummary:
        """The same with this format's row new, at the place it had."""
        rows = [old if old.target is not row.target else row for old in self.rows]
        if self.find(row.target) is None:
            rows.append(row)
        return self.model_copy(update={"rows": tuple(rows)})


def write_summary(path: Path, summary: QuantizeSummary) -> None:
    write_atomic(path, summary.model_dump_json(indent=2) + "\n")


def read_summary(path: Path) -> QuantizeSummary | None:
    """None where there is none yet."""
    try:
        return QuantizeSummary.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as a summary of quantized models.",
            remedy="--force to make everything anew, or --out another folder",
        ) from error


# Size against perplexity as a picture, one point for each quantized model.

_REJECTED_COLOUR = "#b3261e"
_LOG_AXIS_RATIO = 10.0
"""Perplexities this many times apart need a logarithmic axis."""


def write_plot(summary: QuantizeSummary, path: Path) -> bool:
    """A PNG; False where matplotlib is not installed."""
    try:
        # The object interface, not pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    rows = [row for row in summary.rows if row.check and row.check.perplexity is not None]
    for row in rows:
        _plot_point(axis, row)
    _plot_original(axis, summary)
    _style_axes(axis, summary, rows)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": "tightfit"})
    write_atomic(path, image.getvalue())
    return True


def _plot_point(axis: Any, row: QuantizedModel) -> None:
    assert row.check is not None
    is_rejected = row.standing is QuantizeStatus.REJECTED
    colour = _REJECTED_COLOUR if is_rejected else row.target.colour
    place = (row.size_bytes / MIB, row.check.perplexity)
    axis.plot(*place, "X" if is_rejected else "o", color=colour, markersize=7)
    axis.annotate(
        row.target.name, place, xytext=(6, 4), textcoords="offset points", fontsize=8, color=colour
    )


def _plot_original(axis: Any, summary: QuantizeSummary) -> None:
    if summary.reference_perplexity is None:
        return
    axis.axhline(summary.reference_perplexity, color="#777777", linewidth=1, linestyle="--")
    axis.annotate(
        f"original, {summary.size_bytes / MIB:,.0f} MiB",
        (0.99, summary.reference_perplexity),
        xycoords=("axes fraction", "data"),
        xytext=(0, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#555555",
    )


def _style_axes(axis: Any, summary: QuantizeSummary, rows: list[QuantizedModel]) -> None:
    found = [row.check.perplexity for row in rows if row.check and row.check.perplexity]
    if found and max(found) > _LOG_AXIS_RATIO * min(found):
        axis.set_yscale("log")
    axis.set_xlabel("size of the weights in MiB")
    axis.set_ylabel("perplexity (lower is better)")
    axis.set_title(f"{Path(summary.model).name}, quantized", loc="left", fontweight="bold")
    axis.margins(x=0.12, y=0.12)
    axis.grid(color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
