"""What compiling takes before the first step: weighed against the steps that follow."""

from __future__ import annotations

from planning_cases import SHORT_ROWS, make_cluster, make_request

from tightfit.planning.plan import Plan
from tightfit.planning.search import search

H200 = make_cluster((1, "H200"))


def plan_bloom(*, compile: bool | None = None, **fields: object) -> Plan:
    """No kernels of Liger's, so compiled layers are what makes it fast."""
    fixed = {"packing": False} | ({} if compile is None else {"compile": compile})
    request = make_request("bloom-1b7", method="full", profile=SHORT_ROWS, fixed=fixed, **fields)
    return search(request, H200, num_plans=1).plans[0]


def test_a_long_run_is_compiled_and_a_short_one_is_not() -> None:
    long, short = plan_bloom(num_epochs=10), plan_bloom(max_steps=20)
    assert long.strategy.compile
    assert not short.strategy.compile
    asked = plan_bloom(max_steps=20, compile=True)
    seconds = [plan.estimate.time.run_seconds(plan.num_epochs) for plan in (short, asked)]
    assert None not in seconds
    assert seconds[0] < seconds[1]  # type: ignore[operator]


def test_it_is_in_the_run_and_its_price_but_in_no_step() -> None:
    plan = plan_bloom(num_epochs=2, compile=True)
    time = plan.estimate.time
    assert time.compile_seconds > 10
    assert time.seconds_per_step == sum(time.components.values())
    assert time.seconds_per_epoch is not None
    assert plan.cost is not None
    assert plan.cost.usd_per_run is not None
    whole = 2 * time.seconds_per_epoch + time.compile_seconds
    assert time.run_seconds(2) == whole
    assert abs(plan.cost.usd_per_run - plan.cost.usd_per_hour * whole / 3600) < 1e-6


def test_nothing_is_compiled_without_a_compiler() -> None:
    request = make_request("Llama-3.2-1B", method="lora")
    [plan] = search(request, H200, num_plans=1).plans
    assert not plan.strategy.compile
    assert plan.estimate.time.compile_seconds == 0
