"""QuantizeSummary: what was made of a model, how large and how good; kept as quantize.json."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from tightfit.core.errors import InvalidInputError
from tightfit.core.files import write_atomic
from tightfit.export.quantize.forecast import Forecast
from tightfit.export.quantize.targets import Target
from tightfit.export.verify.verdict import Comparison

SUMMARY_FILE = "quantize.json"
PLOT_FILE = "quantize.png"


class Standing(str, Enum):
    """What became of one target."""

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
        return self in (Standing.MADE, Standing.GOOD, Standing.REPORTED)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class QuantizedModel(_Frozen):
    """One target."""

    target: Target
    key: str
    """Of the calibration and the settings: only with the same ones is it taken as done."""
    path: str
    standing: Standing
    size_bytes: NonNegativeInt = 0
    """Of the weights' files."""
    bits_per_weight: NonNegativeFloat = 0.0
    of_original_fraction: NonNegativeFloat = 0.0
    seconds: NonNegativeFloat = 0.0
    peak_host_bytes: NonNegativeInt = 0
    """Of the process that did it."""
    predicted: Forecast | None = None
    importance: bool = False
    notes: tuple[str, ...] = ()
    problem: str | None = None
    remedy: str | None = None
    check: Comparison | None = None


class QuantizeSummary(_Frozen):
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

    def find(self, target: Target) -> QuantizedModel | None:
        return next((row for row in self.rows if row.target is target), None)

    def with_row(self, row: QuantizedModel) -> QuantizeSummary:
        """The same with this target's row new, at the place it had."""
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
    except (OSError, ValidationError) as fault:
        raise InvalidInputError(
            f"{path} cannot be read as a summary of quantized models.",
            remedy="--force to make everything anew, or --out another folder",
        ) from fault
