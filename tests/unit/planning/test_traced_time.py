"""Traced seconds in plans: their place, their order, what they cost, and where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from planning_cases import SHORT_ROWS, make_cluster, make_request

from tightfit.core.strategy import Strategy
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult, search
from tightfit.planning.traced import (
    TraceRequest,
    find_document_len,
    time_plan,
    trace_plans,
)
from tightfit.trace.result import FORWARD, MEMORY_BOUND, Operation, OperationLog, RepeatedOperations
from tightfit.trace.tracer import TraceResponse
from trace_cases import record_full_tuning, trace

TRACED = trace(record_full_tuning(num_layers=2, tokens=64))


def make_log(num_bytes: float) -> OperationLog:
    """A step that moves so much, and does nothing else."""
    move = Operation(
        name="aten::add", kind=MEMORY_BOUND, stage=FORWARD, num_bytes=num_bytes, num_kernels=1
    )
    return OperationLog(operations=(move,), stretches=(RepeatedOperations(operations=(0,)),))


LOG = make_log(1e13)


def settle(result: SearchResult, find: Callable[[TraceRequest], OperationLog | None]) -> list[Plan]:
    def answer(wishes: Sequence[TraceRequest]) -> list[TraceResponse]:
        return [TraceResponse(traced=TRACED, operations=find(wish)) for wish in wishes]

    return list(trace_plans(result, answer, num_traced=len(result.plans)).result.plans)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search(make_request(effective_batch=16), make_cluster((1, "A100-40GB")))


@pytest.fixture(scope="module")
def sharded() -> Plan:
    fixed = {"sharding": "fsdp", "gpus_per_node": 4}
    request = make_request(method="full", effective_batch=16, fixed=fixed)
    return search(request, make_cluster((4, "A100-80GB"))).plans[0]


def test_a_step_takes_what_its_operations_take(result: SearchResult) -> None:
    gpu = result.plans[0].hardware.node.gpu
    least = 1e13 / gpu.memory_bytes_per_second
    for plan in settle(result, lambda _: LOG):
        time = plan.estimate.time
        assert time.tier == "traced"
        assert least < time.seconds_per_step < 3 * least
        assert sum(time.components.values()) == pytest.approx(time.seconds_per_step)


def test_without_operations_the_formulas_stay(result: SearchResult) -> None:
    formula = {plan.strategy: plan.estimate.time for plan in result.plans}
    after = settle(result, lambda _: None)
    assert {plan.strategy: plan.estimate.time for plan in after} == formula
    assert {plan.estimate.tier for plan in after} == {"traced"}
    assert {plan.estimate.time.tier for plan in after} == {"closed-form"}


def test_what_travels_between_ranks_is_added(sharded: Plan) -> None:
    moved = sharded.estimate.time.components["communication"]
    assert moved > 0
    time = time_plan(sharded, LOG)
    assert time.components["communication"] == moved
    assert time.seconds_per_step > moved + time.components["memory_bound"]


def test_tokens_are_those_of_all_ranks_and_micro_batches(sharded: Plan) -> None:
    time, strategy = time_plan(sharded, LOG), sharded.strategy
    tokens = time.tokens_per_second * time.seconds_per_step
    assert tokens == pytest.approx(strategy.tokens_per_step)
    assert strategy.tokens_per_step == 16 * strategy.seq_len


def test_a_plan_whose_trace_is_slow_comes_last(result: SearchResult) -> None:
    first = result.plans[0].strategy
    assert len(result.plans) > 1

    def find(wish: TraceRequest) -> OperationLog:
        return make_log(1e16) if wish.strategy == first else make_log(1e12)

    assert settle(result, find)[-1].strategy == first


def test_traced_seconds_are_not_compared_with_formulas(result: SearchResult) -> None:
    """A trace that is slower than its formula must not lose to a plan that has no trace."""
    first = result.plans[0].strategy
    before = [plan.strategy for plan in settle(result, lambda _: None)]
    after = settle(result, lambda wish: make_log(1e16) if wish.strategy == first else None)
    assert [plan.strategy for plan in after] == before


def test_sequences_beyond_the_wanted_batch_are_no_progress(result: SearchResult) -> None:
    """Of two plans alike but for the batch, the one that trains what was asked for is first."""
    plan = result.plans[0]
    s = plan.strategy
    larger = s.model_copy(update={"grad_accum": 4 * s.grad_accum})
    faster = plan.estimate.time.model_copy(
        update={"tokens_per_second": 2 * plan.estimate.time.tokens_per_second}
    )
    other = plan.model_copy(
        update={
            "strategy": larger,
            "effective_batch": 4 * plan.effective_batch,
            "estimate": plan.estimate.model_copy(update={"time": faster}),
        }
    )
    assert result.wanted_batch == plan.effective_batch
    two = replace(result, plans=(other, plan))
    assert settle(two, lambda _: None)[0].strategy == s


def test_rent_follows_the_traced_time() -> None:
    request = make_request(effective_batch=16, profile=SHORT_ROWS)
    found = search(request, make_cluster((1, "A100-40GB")))
    plan = settle(found, lambda _: LOG)[0]
    assert plan.cost is not None
    assert plan.cost.usd_per_run is not None
    assert plan.estimate.time.seconds_per_epoch is not None
    hours = plan.estimate.time.seconds_per_epoch * plan.num_epochs / 3600
    assert plan.cost.usd_per_run == pytest.approx(plan.cost.usd_per_hour * hours)


@pytest.mark.parametrize("packing", [False, True])
def test_known_rows_shorten_a_step_as_the_formulas_say(packing: bool) -> None:
    fixed = {"packing": packing, "micro_batch": 4, "checkpointing": True}
    request = make_request(effective_batch=16, profile=SHORT_ROWS, fixed=fixed)
    plan = search(request, make_cluster((1, "A100-40GB"))).plans[0]
    assert plan.strategy.packing is packing
    known = time_plan(plan, LOG)
    longest = time_plan(plan.model_copy(update={"data": None}), LOG)
    share = known.components["memory_bound"] / longest.components["memory_bound"]
    # Unpacked rows are padded to about 400 of 2048 tokens; packed ones are full either way.
    assert 0.9 < share < 1.1 if packing else 0.1 < share < 0.5


def test_only_packed_rows_are_cut_into_documents() -> None:
    packed, plain = Strategy(packing=True), Strategy(packing=False)
    assert find_document_len(SHORT_ROWS, packed) == 200
    assert find_document_len(SHORT_ROWS, plain) is None
    assert find_document_len(None, packed) is None
