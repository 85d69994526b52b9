"""Which steps stop a run, and what is said then."""

from __future__ import annotations

import math

import pytest

from tightfit.core.errors import UserError
from tightfit.training.loop import DivergenceCheck
from tightfit.training.step import ReducedMetrics

ROWS = [f"train.jsonl line {number}" for number in range(1, 8)]


def step_of(loss: float, *, is_skipped: bool = False) -> ReducedMetrics:
    return ReducedMetrics(
        loss=loss, grad_norm=1.0, is_skipped=is_skipped, must_stop=False, must_save=False
    )


def test_a_loss_that_is_no_number_names_the_rows() -> None:
    divergence = DivergenceCheck(32000, is_scaled=False)
    divergence.check(1, step_of(2.5), ROWS)

    with pytest.raises(UserError, match=r"step 2.*nan.*2\.500.*line 1;.*and 3 more"):
        divergence.check(2, step_of(math.nan), ROWS)


def test_fp16_may_overflow_for_a_while() -> None:
    divergence = DivergenceCheck(32000, is_scaled=True)
    for step in range(20):
        divergence.check(step, step_of(2.0, is_skipped=True), ROWS)
    divergence.check(20, step_of(2.0), ROWS)

    for step in range(21, 45):
        divergence.check(step, step_of(2.0, is_skipped=True), ROWS)
    with pytest.raises(UserError, match="in a row"):
        divergence.check(45, step_of(2.0, is_skipped=True), ROWS)


def test_without_a_scaler_an_infinite_gradient_stops_at_once() -> None:
    with pytest.raises(UserError, match="gradient"):
        DivergenceCheck(32000, is_scaled=False).check(1, step_of(2.0, is_skipped=True), ROWS)


def test_noise_is_no_explosion_but_nonsense_is() -> None:
    divergence = DivergenceCheck(32000, is_scaled=False)
    for step in range(30):
        divergence.check(step, step_of(1.0 + (step % 3)), ROWS)

    with pytest.raises(UserError, match=r"from 2\.00 to 25\.00"):
        divergence.check(31, step_of(25.0), ROWS)
