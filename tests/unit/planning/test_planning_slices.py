"""The fused loss walks in wide slices where nothing is recomputed and memory is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planning_cases import make_cluster, make_request

from tightfit.core.settings import Loss
from tightfit.core.strategy import Strategy
from tightfit.estimation.memory import MODEL_ERROR_FRACTION
from tightfit.estimation.result import Verdict
from tightfit.planning.describe import describe_strategy
from tightfit.planning.fallback import list_fallbacks
from tightfit.planning.filter import KnownOutcome
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import LARGE_CHUNK_FACTOR, search

FIXED: dict[str, Any] = {
    **{"checkpointing": False, "micro_batch": 16, "optimizer": "adamw"},
    **{"weights": "bf16", "sharding": "single"},
}


def _request(model: str = "Llama-3.2-1B", **fixed: Any) -> JobRequest:
    return make_request(model, method="full", seq_len=2048, fixed=FIXED | fixed)


def _plan(request: JobRequest, gpu: str = "H200", **node: Any) -> Plan:
    return search(request, make_cluster((1, gpu), **node)).plans[0]


def test_a_roomy_card_gets_wide_slices_and_is_told_what_they_bring() -> None:
    plan = _plan(make_request("Llama-3.2-1B", method="full", seq_len=2048))
    assert plan.strategy.loss is Loss.FUSED
    assert not plan.strategy.checkpointing
    assert plan.strategy.loss_chunk_factor == LARGE_CHUNK_FACTOR
    [why] = [line for line in plan.why if line.startswith("large loss chunks:")]
    assert "x faster" in why
    assert any(line.startswith("loss in chunks of tokens:") for line in plan.why)
    assert "large loss chunks" in describe_strategy(plan.strategy)

    narrow = _plan(_request(loss_chunk_factor=1))
    assert narrow.estimate.time.seconds_per_step > plan.estimate.time.seconds_per_step
    assert narrow.estimate.gpu.peak_reserved_bytes < plan.estimate.gpu.peak_reserved_bytes


def test_slices_stay_narrow_where_wide_ones_would_not_fit() -> None:
    needs = [
        _plan(_request(loss_chunk_factor=factor)).estimate.gpu.peak_reserved_bytes
        for factor in (1, LARGE_CHUNK_FACTOR)
    ]
    for need, factor in ((sum(needs) // 2, 1), (needs[1] + 2**20, LARGE_CHUNK_FACTOR)):
        room = int(need * (1 + MODEL_ERROR_FRACTION))
        plan = _plan(_request(), free_gpu_memory_bytes=room)
        assert plan.estimate.verdict is Verdict.FITS
        assert plan.strategy.loss_chunk_factor == factor


def test_a_tight_fit_is_not_made_tighter() -> None:
    need = _plan(_request(loss_chunk_factor=1)).estimate.gpu.peak_reserved_bytes
    plan = _plan(_request(), free_gpu_memory_bytes=need)
    assert plan.estimate.verdict is Verdict.TIGHT
    assert plan.strategy.loss_chunk_factor == 1


def test_what_recomputes_has_no_memory_to_give_away() -> None:
    plan = _plan(_request(checkpointing=True))
    assert plan.strategy.loss is Loss.FUSED
    assert plan.strategy.loss_chunk_factor == 1


@pytest.mark.parametrize("factor", [1, 2, 8])
def test_what_is_fixed_stays(factor: int) -> None:
    assert _plan(_request(loss_chunk_factor=factor)).strategy.loss_chunk_factor == factor


@pytest.mark.parametrize("loss", [Loss.PLAIN, Loss.CHUNKED])
def test_other_losses_have_no_slices_to_widen(loss: Loss) -> None:
    assert _plan(_request(loss=loss)).strategy.loss_chunk_factor == 1


def test_families_that_make_all_logits_have_none_either() -> None:
    plan = _plan(make_request("PowerLM-3b", method="lora", fixed={"loss": "fused"}))
    assert plan.strategy.loss_chunk_factor == 1


def test_what_ran_out_of_memory_is_narrowed() -> None:
    wide = _plan(_request())
    outcome = KnownOutcome(
        model_name=wide.model.name,
        gpu_name=wide.hardware.node.gpu.name,
        strategy=wide.strategy,
        status="out-of-memory",
        peak_bytes=None,
        date="2026-03-04T10:00:00",
    )
    plan = search(_request(), make_cluster((1, "H200")), known=[outcome]).plans[0]
    assert plan.strategy == wide.strategy.model_copy(update={"loss_chunk_factor": 1})


def test_after_out_of_memory_slices_are_narrowed_first() -> None:
    plan = _plan(_request())
    first, *others = list_fallbacks(plan)
    assert first.strategy == plan.strategy.model_copy(update={"loss_chunk_factor": 1})
    assert first.why[0].startswith("after out of memory, small loss chunks: -")
    assert {other.strategy.loss_chunk_factor for other in others} == {1}


def test_plans_from_before_have_the_slices_they_ran_with() -> None:
    reported = json.loads(_plan(_request()).model_dump_json())
    del reported["strategy"]["loss_chunk_factor"]
    assert Plan.model_validate(reported).strategy.loss_chunk_factor == 1
    assert Strategy(loss=Loss.FUSED).loss_chunk_factor == 1
