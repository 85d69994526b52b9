"""Step records boiled down to the few numbers people compare runs by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from tightfit.ledger.metrics import StepRecord

NUM_WARMUP_STEPS = 2
"""Left out of speeds where enough follow: caches fill, kernels are chosen or compiled."""
LEAST_SETTLED_STEPS = 3
LONG_STEP_FACTOR = 3.0
"""A step this much longer than the median holds an evaluation, a save or a restart."""
MOST_SMOOTHED_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast the settled steps were. None: nothing to tell it from."""

    seconds_per_step: float | None
    tokens_per_second: float | None
    mfu_fraction: float | None
    data_wait_fraction: float | None


def measure_speed(steps: Sequence[StepRecord]) -> Speed:
    """Medians and totals over the steps that are neither warm-up nor interrupted."""
    settled = list_settled(steps)
    seconds = sum(record.seconds for record in settled)
    waited = sum(max(0.0, record.data_wait_seconds) for record in settled)
    tokens = sum(record.num_tokens for record in settled)
    mfus = [r.mfu_fraction for r in settled if r.mfu_fraction is not None]
    return Speed(
        seconds_per_step=median_of(record.seconds for record in settled),
        tokens_per_second=keep_finite(tokens / seconds) if seconds > 0 else None,
        mfu_fraction=median_of(mfus),
        data_wait_fraction=keep_finite(min(1.0, waited / seconds)) if seconds > 0 else None,
    )


def list_settled(steps: Sequence[StepRecord]) -> list[StepRecord]:
    timed = [record for record in steps if isfinite(record.seconds) and record.seconds > 0]
    if len(timed) >= NUM_WARMUP_STEPS + LEAST_SETTLED_STEPS:
        timed = timed[NUM_WARMUP_STEPS:]
    if not timed:
        return []
    limit = LONG_STEP_FACTOR * median(record.seconds for record in timed)
    return [record for record in timed if record.seconds <= limit]


def measure_losses(steps: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Mean of the first and of the last few finite losses."""
    finite = [record.loss for record in steps if isfinite(record.loss)]
    if not finite:
        return None, None
    window = min(MOST_SMOOTHED_STEPS, max(1, len(finite) // 20))
    return keep_finite(mean(finite[:window])), keep_finite(mean(finite[-window:]))


def median_of(values: Iterable[float]) -> float | None:
    finite = [value for value in values if isfinite(value)]
    return keep_finite(median(finite)) if finite else None


def mean(values: Sequence[float]) -> float:
    """The library's own raises where a sum overflows; here it is infinite."""
    return sum(values) / len(values)


def keep_finite(value: float | None) -> float | None:
    """JSON has no NaN: None in its place."""
    return value if value is not None and isfinite(value) else None
