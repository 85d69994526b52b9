"""The line that says why a faster plan is not the first."""

from __future__ import annotations

import pytest
from cli_examples import OFFLOADED, STRATEGY, make_estimate, make_plan

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.result import TRACED, Estimate, Verdict
from tightfit.planning.plan import Plan
from tightfit.planning.ranking import explain_order


def at_speed(factor: float, *, verdict: Verdict = Verdict.FITS) -> Estimate:
    estimate = make_estimate(verdict=verdict)
    faster = estimate.time.tokens_per_second * factor
    time = estimate.time.model_copy(update={"tokens_per_second": faster})
    return estimate.model_copy(update={"time": time})


def order(strategy: Strategy, factor: float, **kwargs: Verdict) -> str | None:
    first = make_plan(STRATEGY, at_speed(1.0))
    slow = make_plan(OFFLOADED, at_speed(0.5))
    plans: list[Plan] = [first, slow, make_plan(strategy, at_speed(factor, **kwargs))]
    return explain_order(plans)


def change(**fields: object) -> Strategy:
    return STRATEGY.model_copy(update=fields)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (change(weights=Dtype.NF4), "QLoRA costs quality: --method qlora plans it first."),
        (change(method=Method.FULL), "--method full plans it first."),
        (change(weights=Dtype.INT8), "--set weights=int8 plans it first."),
        (OFFLOADED.model_copy(update={"weights": Dtype.FP16}), "--set offload=all"),
        (change(sharding=Sharding.ZERO1), "--set sharding=zero1"),
        (change(compile=True), "--set compile=true"),
    ],
)
def test_a_faster_plan_behind_is_explained(strategy: Strategy, said: str) -> None:
    line = order(strategy, 1.17)
    assert line is not None
    assert line.startswith("3 is 1.17x faster, but ")
    assert said in line


def test_tight_is_a_reason_of_its_own() -> None:
    line = order(STRATEGY, 1.5, verdict=Verdict.TIGHT)
    assert line is not None
    assert "tight" in line


def test_where_the_first_is_the_fastest_nothing_is_said() -> None:
    assert order(change(weights=Dtype.NF4), 0.99) is None
    assert order(change(weights=Dtype.NF4), 1.001) is None


def test_traced_and_untraced_speeds_are_not_compared() -> None:
    estimate = at_speed(1.0)
    traced = estimate.time.model_copy(update={"tier": TRACED})
    plans = [
        make_plan(STRATEGY, estimate.model_copy(update={"time": traced})),
        make_plan(change(weights=Dtype.NF4), at_speed(1.5)),
    ]
    line = explain_order(plans)
    assert line is not None
    assert "row 1 traced" in line
    assert "faster" not in line
