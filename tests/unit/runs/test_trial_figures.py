"""Trials boiled down: warm-up left out, spread, order, the planner's first against the fastest."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.runs.bench import (
    Measured,
    Spread,
    Trial,
    TrialStatus,
    measure_steps,
    rate_first,
    sort_trials,
)
from tightfit.runs.metrics import StepRecord


def make_step(step: int, seconds: float, **changed: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step, "epoch": 0.1, "loss": 1.0, "learning_rate": 1e-9, "grad_norm": 1.0,
        "num_tokens": 1000, "num_trained_tokens": 250, "seconds": seconds,
        "data_wait_seconds": 0.0, "tokens_per_second": 1000 / seconds, "mfu_fraction": 0.4,
        "gpu_allocated_bytes": 1, "gpu_reserved_bytes": 2, "host_bytes": 3,
    }  # fmt: skip
    return StepRecord(**{**values, **changed})


def make_trial(rank: int, speed: float | None) -> Trial:
    measured = None
    if speed is not None:
        measured = Measured(
            num_steps=1,
            seconds_per_step=Spread(median=1.0, low=1.0, high=1.0),
            tokens_per_second=speed,
            trained_tokens_per_second=speed,
            mfu_fraction=None,
        )
    return Trial(
        rank=rank,
        description="",
        strategy=Strategy(),
        words=(),
        status=TrialStatus.OUT_OF_MEMORY if measured is None else TrialStatus.MEASURED,
        predicted_seconds_per_step=1.0,
        predicted_tokens_per_second=1.0,
        tier="closed-form",
        measured=measured,
    )


def test_warm_up_is_left_out_and_one_disturbed_step_in_ten_is_no_spread() -> None:
    steps = [make_step(1, 60.0), make_step(2, 9.0)]
    steps += [make_step(3 + number, 1.0 + number / 100) for number in range(19)]
    steps.append(make_step(22, 30.0))
    found = measure_steps(steps, num_warmup=2)

    assert found is not None
    assert found.num_steps == 20
    spread = found.seconds_per_step
    assert spread.median == pytest.approx(1.095)
    assert (spread.low, spread.high) == pytest.approx((1.02, 1.17))
    total = sum(1.0 + number / 100 for number in range(19)) + 30.0
    assert found.tokens_per_second == pytest.approx(20_000 / total)
    assert found.trained_tokens_per_second == pytest.approx(5_000 / total)
    assert found.mfu_fraction == pytest.approx(0.4)


def test_nothing_after_the_warm_up_is_nothing_measured() -> None:
    assert measure_steps([make_step(1, 1.0), make_step(2, 1.0)], num_warmup=2) is None


def test_the_fastest_comes_first_and_what_was_not_measured_last() -> None:
    trials = [make_trial(1, 80.0), make_trial(2, None), make_trial(3, 100.0), make_trial(4, None)]
    assert [trial.rank for trial in sort_trials(trials)] == [3, 1, 2, 4]
    assert rate_first(trials) == pytest.approx(0.8)
    assert rate_first(trials[1:]) is None
    assert rate_first([make_trial(1, None), make_trial(2, 5.0)]) is None
