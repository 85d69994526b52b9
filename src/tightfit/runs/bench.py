"""Bench results: a few measured steps of each of several plans, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from statistics import median

from tightfit.core.frozen import FiniteFrozen
from tightfit.core.packages import __version__
from tightfit.core.strategy import Strategy
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import Speed, StepRecord, keep_finite, median_of
from tightfit.runs.report import Comparison, Unit, compare, compare_one

SCHEMA_VERSION = 1
SPREAD_FRACTION = 0.1
"""The spread leaves out as much at either end: one step in ten is disturbed by others."""


class TrialStatus(str, Enum):
    MEASURED = "measured"
    OUT_OF_MEMORY = "out-of-memory"
    FAILED = "failed"


class Spread(FiniteFrozen):
    """Of many steps: the middle one, and between which most of them lay."""

    median: float
    low: float
    high: float


class Measured(FiniteFrozen):
    """The steps after the warm-up; peaks over all steps."""

    num_steps: int
    seconds_per_step: Spread
    tokens_per_second: float
    """Padding left out."""
    trained_tokens_per_second: float
    mfu_fraction: float | None


class Trial(FiniteFrozen):
    """One plan, and what came of it."""

    rank: int
    """The planner's place for it, from 1."""
    description: str
    strategy: Strategy
    words: tuple[str, ...]
    """What to add to the command so that the planner comes to this plan alone."""
    status: TrialStatus
    problem: str | None = None
    remedy: str | None = None
    exit_code: int | None = None
    """Of the worker, where it failed."""
    log: tuple[str, ...] = ()
    """The end of its log, where it failed."""
    predicted_seconds_per_step: float
    predicted_tokens_per_second: float
    tier: str
    """Of the predicted time: `closed-form` or `traced`."""
    measured: Measured | None = None
    compared: tuple[Comparison, ...] = ()


class Bench(FiniteFrozen):
    """Trials of one job on one machine, fastest first; what `tightfit bench --json` prints."""

    schema_version: int = SCHEMA_VERSION
    tightfit_version: str = __version__
    date: str
    model: str
    hardware: str
    data: str
    num_warmup_steps: int
    num_steps: int
    has_random_weights: bool
    is_calibrated: bool
    num_plans: int
    """That were to be tried; more than trials where it was cut short."""
    trials: tuple[Trial, ...]
    first_over_fastest: float | None
    """Speed of the plan ranked first over that of the fastest; 1: the planner was right."""
    notes: tuple[str, ...] = ()


def measure_steps(steps: Sequence[StepRecord], *, num_warmup: int) -> Measured | None:
    """The steps after the warm-up in a few numbers; None where there was none."""
    settled = [record for record in steps if record.step > num_warmup and record.seconds > 0]
    if not settled:
        return None
    seconds = sorted(record.seconds for record in settled)
    total = sum(seconds)
    cut = int(len(seconds) * SPREAD_FRACTION)
    return Measured(
        num_steps=len(settled),
        seconds_per_step=Spread(
            median=median(seconds), low=seconds[cut], high=seconds[len(seconds) - 1 - cut]
        ),
        tokens_per_second=sum(record.num_tokens for record in settled) / total,
        trained_tokens_per_second=sum(r.num_trained_tokens for r in settled) / total,
        mfu_fraction=median_of(r.mfu_fraction for r in settled if r.mfu_fraction is not None),
    )


def compare_trial(
    plan: Plan, steps: Sequence[StepRecord], measured: Measured, *, trained_fraction: float
) -> tuple[Comparison, ...]:
    """All that was both predicted and measured. `trained_fraction`: of the data's tokens."""
    speed = Speed(
        seconds_per_step=measured.seconds_per_step.median,
        tokens_per_second=measured.tokens_per_second,
        mfu_fraction=measured.mfu_fraction,
        data_wait_fraction=None,
    )
    time = plan.estimate.time
    predicted, reached = (
        time.tokens_per_second * trained_fraction,
        measured.trained_tokens_per_second,
    )
    return (
        *compare(plan, tuple(steps), speed),
        compare_one("trained tokens per second", Unit.TOKENS_PER_SECOND, predicted, reached),
        compare_one("MFU", Unit.FRACTION, time.mfu_fraction or None, measured.mfu_fraction),
    )


def sort_trials(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Fastest first; what was not measured last, by its rank."""
    return tuple(sorted(trials, key=lambda trial: (-speed_of(trial), trial.rank)))


def speed_of(trial: Trial) -> float:
    return trial.measured.tokens_per_second if trial.measured is not None else 0.0


def rate_first(trials: Sequence[Trial]) -> float | None:
    """How near the planner's first came to the fastest; None where that was not measured."""
    first = next((trial for trial in trials if trial.rank == 1), None)
    if first is None or first.measured is None:
        return None
    return keep_finite(speed_of(first) / max(map(speed_of, trials)))
