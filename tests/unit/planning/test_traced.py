"""Traces in plans: verdicts, order, fewer recomputed layers, smaller micro-batches, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from planning_cases import make_cluster, make_request

from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB
from tightfit.estimation.result import Verdict
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult, search
from tightfit.planning.traced import (
    TraceRequest,
    apply_trace,
    make_trace_request,
    trace_plans,
)
from tightfit.trace.result import TracedMemory
from tightfit.trace.tracer import TraceResponse
from trace_cases import record_full_tuning, trace

TRACED = trace(record_full_tuning())


def traced(*, reserved: float, least: float) -> TracedMemory:
    """A trace that would hold and needs so many GiB."""
    return TRACED.model_copy(
        update={
            "peak_reserved_bytes": int(reserved * GIB),
            "smallest_capacity_bytes": int(least * GIB),
        }
    )


BIG, SMALL = traced(reserved=90, least=80), traced(reserved=9, least=9)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search(make_request(effective_batch=16), make_cluster((1, "A100-40GB")))


@pytest.fixture
def best(result: SearchResult) -> Plan:
    return result.plans[0]


def answer(
    make: Callable[[TraceRequest], TraceResponse],
) -> Callable[[Sequence[TraceRequest]], list[TraceResponse]]:
    return lambda wishes: [make(wish) for wish in wishes]


@pytest.mark.parametrize(
    ("reserved", "least", "verdict"),
    [(20, 18, Verdict.FITS), (60, 20, Verdict.TIGHT), (60, 41, Verdict.DOES_NOT_FIT)],
)
def test_the_verdict_is_the_trace_s(
    best: Plan, reserved: float, least: float, verdict: Verdict
) -> None:
    found = apply_trace(best.estimate, traced(reserved=reserved, least=least), best.hardware.node)
    assert found.verdict is verdict
    assert found.tier == "traced"
    assert found.gpu.peak_allocated_bytes == TRACED.peak_allocated_bytes
    assert sum(found.gpu.components.values()) == found.gpu.peak_reserved_bytes
    assert found.peak == TRACED.peak


def test_the_reserve_is_what_its_name_says(best: Plan) -> None:
    """All of the card where memory is given back; without a limit where there is no surviving."""
    gpu = best.estimate.gpu

    def reserve(reserved: float, least: float) -> float:
        found = apply_trace(
            best.estimate, traced(reserved=reserved, least=least), best.hardware.node
        )
        return found.gpu.peak_reserved_bytes - gpu.context_bytes

    assert reserve(20, 18) == 20 * GIB
    assert reserve(60, 20) == gpu.capacity_bytes - gpu.context_bytes
    assert reserve(60, 41) == 60 * GIB


@pytest.mark.parametrize(("reserved", "least"), [(20, 18), (60, 20), (60, 41)])
def test_a_reason_has_no_colon_of_its_own(best: Plan, reserved: float, least: float) -> None:
    """It stands behind the verdict and one already."""
    found = apply_trace(best.estimate, traced(reserved=reserved, least=least), best.hardware.node)
    assert ":" not in found.reason
    assert "traced" in found.reason


def test_what_lacks_host_memory_does_not_fit_whatever_the_card_says() -> None:
    request = make_request(method="full", fixed={"sharding": "fsdp", "offload": "all"})
    cluster = make_cluster((1, "A100-40GB"), host_memory_bytes=16 * GIB)
    found = search(request, cluster)
    assert not found.plans
    roomy = search(request, make_cluster((1, "A100-40GB"), host_memory_bytes=512 * GIB)).plans[0]
    short = roomy.estimate.model_copy(
        update={
            "verdict": Verdict.DOES_NOT_FIT,
            "reason": "in any words",
            "host": roomy.estimate.host.model_copy(update={"capacity_bytes": 16 * GIB}),
        }
    )
    after = apply_trace(short, SMALL, roomy.hardware.node)
    assert after.verdict is Verdict.DOES_NOT_FIT
    assert after.reason == "in any words"


def test_what_lacks_memory_on_the_card_alone_is_judged_by_the_trace(best: Plan) -> None:
    named = best.estimate.model_copy(
        update={"verdict": Verdict.DOES_NOT_FIT, "reason": "not for want of host memory"}
    )
    assert apply_trace(named, SMALL, best.hardware.node).verdict is Verdict.FITS


def test_the_room_is_the_card_less_the_context(best: Plan) -> None:
    gpu = best.estimate.gpu
    assert make_trace_request(best).room_bytes == gpu.capacity_bytes - gpu.context_bytes


def test_a_plan_that_cannot_be_traced_keeps_its_formulas(result: SearchResult) -> None:
    after = trace_plans(
        result, answer(lambda _: TraceResponse(traced=None, problem="no torch")), num_traced=2
    )
    assert [plan.strategy for plan in after.result.plans] == [p.strategy for p in result.plans]
    assert after.result.plans[0].estimate == result.plans[0].estimate
    assert after.notes == ("not traced: no torch",)


def test_what_never_fits_is_lost_and_the_next_moves_up(result: SearchResult) -> None:
    first = result.plans[0].strategy

    def find(wish: TraceRequest) -> TraceResponse:
        is_first = wish.strategy.weights is first.weights and wish.strategy.method is first.method
        return TraceResponse(traced=BIG if is_first else SMALL)

    after = trace_plans(result, answer(find), num_traced=len(result.plans))
    assert after.lost
    assert all(plan.estimate.verdict is not Verdict.DOES_NOT_FIT for plan in after.result.plans)
    assert len(after.result.plans) + len(after.lost) == len(result.plans)
    assert len(after.traces) == len(after.result.plans)


def test_where_the_one_traced_plan_is_lost_the_next_is_traced(result: SearchResult) -> None:
    first = result.plans[0].strategy

    def find(wish: TraceRequest) -> TraceResponse:
        is_first = wish.strategy.weights is first.weights and wish.strategy.method is first.method
        return TraceResponse(traced=BIG if is_first else SMALL)

    after = trace_plans(result, answer(find), num_traced=1)
    assert after.lost[0].strategy.method is first.method
    assert len(after.traces) == 1
    assert after.result.plans[0].estimate.tier == "traced"
    assert after.result.plans[0].estimate.verdict is Verdict.FITS


def test_half_the_micro_batch_is_tried_before_a_plan_is_lost(result: SearchResult) -> None:
    largest = max(plan.strategy.micro_batch for plan in result.plans)
    assert largest > 1, "the case must have something to halve"

    def find(wish: TraceRequest) -> TraceResponse:
        is_large = wish.strategy.micro_batch >= largest
        return TraceResponse(traced=BIG if is_large else SMALL)

    after = trace_plans(result, answer(find), num_traced=len(result.plans))
    assert not after.lost
    for plan in after.result.plans:
        s = plan.strategy
        assert s.micro_batch < largest
        assert plan.effective_batch == s.micro_batch * s.grad_accum * s.world_size


def test_no_more_layers_are_recomputed_than_must_be(result: SearchResult) -> None:
    plan = next(plan for plan in result.plans if plan.strategy.checkpointing)
    asked: list[TraceRequest] = []

    def find(wish: TraceRequest) -> TraceResponse:
        asked.append(wish)
        fewest = 5 if wish.wants_fewest_recomputed else None
        return TraceResponse(traced=SMALL, fewest_recomputed=fewest)

    one = SearchResult(plans=(plan,), excluded=(), num_considered=1, shortfall=None)
    after = trace_plans(one, answer(find), num_traced=1).result.plans[0]
    assert asked[0].wants_fewest_recomputed
    assert after.strategy.recomputed_layers == 5
    seconds = after.estimate.time.seconds_per_step
    assert seconds < plan.estimate.time.seconds_per_step or plan.strategy.recomputed_layers
    assert any("recomputes 5 of 32 layers" in why for why in after.why)


@pytest.mark.parametrize("name", ["checkpointing", "recomputed_layers"])
def test_recomputing_that_was_asked_for_stays(result: SearchResult, name: str) -> None:
    plan = next(plan for plan in result.plans if plan.strategy.checkpointing)
    assert make_trace_request(plan).wants_fewest_recomputed
    assert not make_trace_request(plan, {name}).wants_fewest_recomputed


@pytest.mark.parametrize("name", ["micro_batch", "grad_accum"])
def test_a_micro_batch_that_was_asked_for_is_not_halved(result: SearchResult, name: str) -> None:
    asked = replace(result, fixed=frozenset({name}))
    seen: list[int] = []

    def find(wish: TraceRequest) -> TraceResponse:
        seen.append(wish.strategy.micro_batch)
        return TraceResponse(traced=BIG)

    after = trace_plans(asked, answer(find), num_traced=len(result.plans))
    assert set(seen) == {plan.strategy.micro_batch for plan in result.plans}
    assert len(after.lost) == len(result.plans)


def test_nothing_is_said_to_need_fewer_layers_than_none(result: SearchResult) -> None:
    plan = next(plan for plan in result.plans if plan.strategy.checkpointing)
    found = TraceResponse(traced=SMALL, fewest_recomputed=0)
    one = SearchResult(plans=(plan,), excluded=(), num_considered=1, shortfall=None)
    after = trace_plans(one, answer(lambda _: found), num_traced=1).result.plans[0]
    assert not after.strategy.checkpointing
    assert "recomputes none of 32 layers" in after.why[-1]
    assert "fewer" not in after.why[-1]


def test_reasons_are_those_of_the_plan_that_is_left(result: SearchResult) -> None:
    """Levers that the trace turned back are not praised, nor batches that it halved."""
    plan = result.plans[0]
    on = plan.strategy.model_copy(update={"checkpointing": True, "recomputed_layers": None})
    why = ("recomputing activations: 1.40x slower, -9.0 GiB per GPU", "fused kernels: 1.12x faster")
    asked = replace(result, plans=(plan.model_copy(update={"strategy": on, "why": why}),))
    free = TraceResponse(traced=SMALL, fewest_recomputed=0)

    reported = trace_plans(asked, answer(lambda _: free), num_traced=1).result.plans[0].why

    assert reported[0] == "fused kernels: 1.12x faster"
    assert "recomputes none of" in reported[1]
    assert len(reported) == 2


def test_a_halved_batch_says_so(result: SearchResult) -> None:
    plan = result.plans[0]
    size = {"micro_batch": 4, "grad_accum": 4, "loss_chunk_factor": 1}
    twice = plan.strategy.model_copy(update=size)
    why = ("12 sequences per step, not 16: 1 GPU x micro-batch 4 x 3",)
    asked = replace(result, plans=(plan.model_copy(update={"strategy": twice, "why": why}),))

    def find(wish: TraceRequest) -> TraceResponse:
        return TraceResponse(traced=BIG if wish.strategy.micro_batch == 4 else SMALL)

    reported = trace_plans(asked, answer(find), num_traced=1).result.plans[0]
    assert reported.strategy.micro_batch == 2
    assert reported.why == ("micro-batch 2, not 4: traced, and that does not fit",)


def test_slices_are_narrowed_before_the_batch_is_halved(result: SearchResult) -> None:
    fields = {"micro_batch": 4, "grad_accum": 4, "loss": "fused", "loss_chunk_factor": 4}
    wide = Strategy.model_validate(result.plans[0].strategy.model_dump() | fields)
    why = ("fused kernels: 1.12x faster", "large loss chunks: 1.02x faster")
    asked = replace(
        result, plans=(result.plans[0].model_copy(update={"strategy": wide, "why": why}),)
    )
    tried = []

    def find(wish: TraceRequest) -> TraceResponse:
        tried.append((wish.strategy.loss_chunk_factor, wish.strategy.micro_batch))
        return TraceResponse(traced=BIG if tried[-1] != good else SMALL)

    good = (1, 4)
    reported = trace_plans(asked, answer(find), num_traced=1).result.plans[0]
    assert tried == [(4, 4), (1, 4)]
    assert reported.strategy == wide.model_copy(update={"loss_chunk_factor": 1})
    assert reported.why == (why[0], "small loss chunks: traced, and large ones do not fit")

    tried.clear()
    good = (1, 1)
    reported = trace_plans(asked, answer(find), num_traced=1).result.plans[0]
    assert tried == [(4, 4), (1, 4), (1, 2), (1, 1)]
    assert reported.strategy.micro_batch == 1
