"""Scores: the result of an evaluation as it is saved, with 95% intervals, and the answers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.errors import SetupError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Bootstrap intervals.

NUM_RESAMPLES = 2000
_SEED = 20_240_501
_TAILS = (2.5, 97.5)


class Interval(Frozen):
    """A value and where 95% of the resampled values lie."""

    value: float
    low: float
    high: float


def estimate_interval(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> Interval:
    """The weighted mean of rows with its percentile bootstrap interval (Efron, 1979).

    `values` are sums over a row where `weights` are its counts. The draws depend on the
    number of rows alone, so the difference of two models resampled so is a paired one.
    """
    import numpy as np

    counts = np.ones_like(values) if weights is None else weights
    rng = np.random.default_rng(_SEED)
    means = np.empty(NUM_RESAMPLES)
    for turn in range(NUM_RESAMPLES):
        rows = rng.integers(0, len(values), len(values))
        means[turn] = values[rows].sum() / max(counts[rows].sum(), 1e-12)
    low, high = np.percentile(means, _TAILS)
    if weights is None and len(set(values.tolist())) == 1 and values[0] in (0.0, 1.0):
        # Nothing to resample: 3 / n bounds an event never seen in n trials (doi:10.1001/jama.1983.
        # 03330370053031).
        low, high = max(values[0] - 3 / len(values), 0.0), min(values[0] + 3 / len(values), 1.0)
    return Interval(value=float(values.sum() / counts.sum()), low=float(low), high=float(high))


SCHEMA_VERSION = 1
BASE, TUNED, MODEL = "base", "tuned", "model"
"""Names of the columns: before and after, or a model alone."""


class MetricScore(Frozen):
    """One number for each model, and what tuning changed."""

    name: str
    title: str
    is_percent: bool
    """Values are fractions, to be shown as percentages."""
    is_lower_better: bool
    num_rows: PositiveInt
    scores: dict[str, Interval]
    """By column."""
    difference: Interval | None = None
    """Tuned minus base, resampled in pairs."""


class Scores(Frozen):
    """What `tightfit eval` found."""

    schema_version: int = SCHEMA_VERSION
    tightfit_version: str
    model: str
    base_model: str
    data: str
    format: str
    num_rows: PositiveInt
    columns: tuple[str, ...]
    metrics: tuple[MetricScore, ...]
    template: str
    device: str
    dtype: str
    batch: PositiveInt
    max_new_tokens: NonNegativeInt
    """0 where nothing was generated."""
    seconds: NonNegativeFloat
    notes: tuple[str, ...] = ()
    answers_path: str | None = None

    def metric(self, name: str) -> MetricScore | None:
        return next((item for item in self.metrics if item.name == name), None)


class ModelAnswer(Frozen):
    """One model's answer to one question."""

    text: str
    scores: dict[str, float]
    query: str | None = None
    """The SQL in it, where that was scored."""
    problem: str | None = None


class AnswerRow(Frozen):
    """One line of the answers file."""

    place: str
    prompt: str
    gold: str
    answers: dict[str, ModelAnswer]
    """By column."""


def ensure_writable(folder: Path) -> None:
    """Make the folder before the evaluation, so that a read-only one costs no time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SetupError(
            f"Cannot write scores into {str(folder)!r}: {error.strerror or error}.",
            remedy="--save FOLDER that is writable and has free space",
        ) from error


def write_scores(scores: Scores, answers: list[AnswerRow], folder: Path, name: str) -> Scores:
    """`NAME.json` and, where something was generated, `NAME-answers.jsonl`."""
    if answers:
        path = folder / f"{name}-answers.jsonl"
        write_atomic(path, "".join(row.model_dump_json() + "\n" for row in answers))
        scores = scores.model_copy(update={"answers_path": str(path)})
    write_atomic(folder / f"{name}.json", scores.model_dump_json(indent=2) + "\n")
    return scores
