"""Scores: the result of an evaluation, as it goes to disk, and the answers behind it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.files import write_atomic
from tightfit.evaluate.intervals import Interval

SCHEMA_VERSION = 1
BASE, TUNED, MODEL = "base", "tuned", "model"
"""Names of the columns: before and after, or a model alone."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MetricScore(_Frozen):
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


class Scores(_Frozen):
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


class ModelAnswer(_Frozen):
    """What one model said to one question."""

    text: str
    scores: dict[str, float]
    query: str | None = None
    """The SQL in it, where that was scored."""
    problem: str | None = None


class AnswerRow(_Frozen):
    """One line of the answers file."""

    place: str
    prompt: str
    gold: str
    answers: dict[str, ModelAnswer]
    """By column."""


def ready_folder(folder: Path) -> None:
    """Make the folder now, so that a place that cannot be written costs no evaluation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot write scores into {str(folder)!r}: {fault.strerror or fault}.",
            remedy="--save FOLDER that is writable and has free space",
        ) from fault


def write_scores(scores: Scores, answers: list[AnswerRow], folder: Path, name: str) -> Scores:
    """`NAME.json` and, where something was generated, `NAME-answers.jsonl`."""
    if answers:
        path = folder / f"{name}-answers.jsonl"
        write_atomic(path, "".join(row.model_dump_json() + "\n" for row in answers))
        scores = scores.model_copy(update={"answers_path": str(path)})
    write_atomic(folder / f"{name}.json", scores.model_dump_json(indent=2) + "\n")
    return scores
