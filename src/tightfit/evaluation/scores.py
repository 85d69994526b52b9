"""Scores: the result of an evaluation as it is saved, with 95% intervals, and the answers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.errors import SetupError
from tightfit.core.files import describe_write_error, write_atomic
from tightfit.core.findings import Interval, estimate_share, estimate_share_difference
from tightfit.core.frozen import Frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Intervals of 95%.

NUM_RESAMPLES = 2000
_SEED = 20_240_501
_TAILS = (2.5, 97.5)


def estimate_interval(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> Interval:
    """The mean of rows: Wilson's interval where each is 0 or 1, else by resampling rows.

    `values` are sums over a row where `weights` are its counts.
    """
    import numpy as np

    if weights is None and _is_yes_or_no(values):
        return estimate_share(int(values.sum()), len(values))
    return _resample(values, np.ones_like(values) if weights is None else weights)


def estimate_difference(
    tuned: NDArray[np.float64],
    base: NDArray[np.float64],
    weights: NDArray[np.float64] | None = None,
) -> Interval:
    """Tuned minus base on the same rows, by pairs."""
    import numpy as np

    if weights is None and _is_yes_or_no(tuned) and _is_yes_or_no(base):
        num_both = int((tuned * base).sum())
        num_tuned, num_base = int(tuned.sum()), int(base.sum())
        return estimate_share_difference(
            both=num_both,
            first_only=num_tuned - num_both,
            second_only=num_base - num_both,
            neither=len(tuned) - num_tuned - num_base + num_both,
        )
    return _resample(tuned - base, np.ones_like(tuned) if weights is None else weights)


def _is_yes_or_no(values: NDArray[np.float64]) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _resample(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Interval:
    """The weighted mean with its percentile bootstrap interval (Efron, 1979)."""
    import numpy as np

    rng = np.random.default_rng(_SEED)
    means = np.empty(NUM_RESAMPLES)
    for turn in range(NUM_RESAMPLES):
        rows = rng.integers(0, len(values), len(values))
        means[turn] = values[rows].sum() / max(weights[rows].sum(), 1e-12)
    low, high = np.percentile(means, _TAILS)
    return Interval(value=float(values.sum() / weights.sum()), low=float(low), high=float(high))


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
    """Tuned minus base, by pairs of rows."""


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
            f"Cannot write scores into {str(folder)!r}: {describe_write_error(error, folder)}.",
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
