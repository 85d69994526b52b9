"""An nf4 base is unpacked once where QLoRA was asked for, there is room, and it gains time."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import make_cluster, make_request

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.job import estimate_job
from tightfit.estimation.result import Verdict
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model
from tightfit.planning.describe import name_method
from tightfit.planning.fallback import list_fallbacks
from tightfit.planning.plan import Plan
from tightfit.planning.ranking import measure_seconds
from tightfit.planning.rules import Case, find_violations
from tightfit.planning.search import search


def _plans(gpu: str, count: int = 1, model: str = "Llama-2-7b", **fields: Any) -> tuple[Plan, ...]:
    wanted = {"method": "qlora"} | fields
    return search(make_request(model, **wanted), make_cluster((count, gpu))).plans


def test_a_large_card_unpacks_and_says_what_it_brings() -> None:
    best, *others = _plans("H200")
    assert best.strategy.dequantized_base
    assert best.strategy.weights is Dtype.NF4
    assert name_method(best.strategy) == "qlora"
    [why] = [line for line in best.why if line.startswith("dequantized base:")]
    assert "x faster, +" in why
    assert why.endswith("still fits")
    packed = next(plan for plan in others if not plan.strategy.dequantized_base)
    assert packed.strategy.sharding is Sharding.SINGLE
    assert measure_seconds(packed.estimate) > measure_seconds(best.estimate)
    assert packed.estimate.gpu.peak_reserved_bytes < best.estimate.gpu.peak_reserved_bytes


@pytest.mark.parametrize("gpu", ["T4", "V100-16GB"])
@pytest.mark.parametrize("model", ["Llama-2-7b", "Llama-2-13b"])
def test_small_cards_keep_it_packed(gpu: str, model: str) -> None:
    """7B in 16 bit is 12.6 GiB: on 16 GiB it would leave room for one row at a time."""
    plans = _plans(gpu, model=model)
    assert not plans[0].strategy.dequantized_base
    assert plans[0].estimate.verdict is Verdict.FITS
    assert plans[0] == _plans(gpu, model=model, fixed={"dequantized_base": False})[0]


def test_room_for_activations_may_be_worth_more() -> None:
    """24 GB hold the base unpacked, but then every layer has to be computed twice."""
    first, *others = _plans("RTX 4090")
    assert (first.strategy.dequantized_base, first.strategy.checkpointing) == (False, False)
    unpacked = [plan.strategy for plan in others if plan.strategy.dequantized_base]
    assert [strategy.checkpointing for strategy in unpacked] == [True]


@pytest.mark.parametrize("gpu", ["H200", "RTX 4090"])
def test_an_open_method_never_unpacks(gpu: str) -> None:
    """16-bit LoRA is the same size and loses nothing."""
    plans = _plans(gpu, method="auto")
    assert {name_method(plan.strategy) for plan in plans} >= {"lora", "qlora"}
    assert not any(plan.strategy.dequantized_base for plan in plans)
    assert name_method(plans[0].strategy) == "lora" or gpu != "H200"


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_fixed_stays(wanted: bool) -> None:
    plans = _plans("H200", fixed={"dequantized_base": wanted})
    assert plans
    assert {plan.strategy.dequantized_base for plan in plans} == {wanted}


def test_several_gpus_each_hold_it_whole() -> None:
    plans = _plans("A100-80GB", 4)
    assert plans[0].strategy.dequantized_base
    for plan in plans:
        is_whole = plan.strategy.sharding in (Sharding.SINGLE, Sharding.DDP)
        assert is_whole or not plan.strategy.dequantized_base


@pytest.mark.parametrize(("gpu", "count"), [("H200", 1), ("A100-80GB", 4)])
def test_after_out_of_memory_it_is_quantized_again_first(gpu: str, count: int) -> None:
    plan = _plans(gpu, count, fixed={"loss_chunk_factor": 1})[0]
    first, *others = list_fallbacks(plan)
    assert first.strategy == plan.strategy.model_copy(update={"dequantized_base": False})
    assert first.why[0].startswith("after out of memory, quantized base: -")
    assert others
    assert not any(other.strategy.dequantized_base for other in others)


def test_a_step_is_that_of_lora_and_disk_that_of_qlora() -> None:
    node = Node(gpu=find_gpu("H200"), num_gpus=1)
    spec = resolve_model("Llama-2-7b")
    asked: dict[str, Any] = {"micro_batch": 4, "checkpointing": False}
    lora, packed, unpacked = (
        estimate_job(spec=spec, strategy=Strategy.model_validate(asked | fields), node=node)
        for fields in ({}, {"weights": "nf4"}, {"weights": "nf4", "dequantized_base": True})
    )
    assert unpacked.time == lora.time
    assert unpacked.gpu == lora.gpu
    assert unpacked.disk == packed.disk
    phases, of_lora, of_packed = (
        {phase.name: phase for phase in estimate.phases} for estimate in (unpacked, lora, packed)
    )
    assert phases["inference"] == of_packed["inference"]
    assert phases["eval"] == of_lora["eval"]
    # Loaded packed, then unpacked: one matrix's codes and scales beside all that stays.
    beside = phases["load"].peak_allocated_bytes - of_lora["load"].peak_allocated_bytes
    assert beside == 4096 * 11008 // 2 + 5 * (4096 * 11008 // 64)


def test_falcon_has_nothing_to_pack() -> None:
    request = make_request("falcon-7b", method="qlora")
    found = search(request, make_cluster((1, "H200")))
    assert not found.plans
    assert "packs none of falcon's layers" in (found.failure or "")


# With fp8


def test_fp8_over_nf4_is_unpacked_without_being_asked_to() -> None:
    plans = _plans("H200", fixed={"fp8": True})
    assert plans
    for plan in plans:
        assert plan.strategy.fp8
        assert plan.strategy.dequantized_base
        assert plan.strategy.fused_lora
        assert name_method(plan.strategy) == "qlora"
    assert any(line.startswith("fp8 products:") for line in plans[0].why)


def test_fp8_over_a_base_that_stays_packed_is_refused_by_name() -> None:
    request = make_request(method="qlora", fixed={"fp8": True, "dequantized_base": False})
    result = search(request, make_cluster((1, "H200")))
    assert not result.plans
    reasons = {exclusion.rule: exclusion.reason for exclusion in result.excluded}
    assert "--set dequantized_base=true" in reasons["fp8-packed"]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [({"compute": Dtype.FP16}, "fp8-dtype"), ({"sharding": Sharding.FSDP}, "unpacked-sharding")],
    ids=str,
)
def test_fp8_over_nf4_needs_bf16_and_whole_weights(fields: dict[str, Any], rule: str) -> None:
    plan = _plans("H200", 2, fixed={"fp8": True})[0]
    case = Case(
        spec=plan.model,
        strategy=plan.strategy.model_copy(update=fields),
        node=plan.hardware.node,
        num_nodes=1,
    )
    assert rule in {violation.rule for violation in find_violations(case)}


def test_after_out_of_memory_fp8_goes_with_the_unpacked_base() -> None:
    plan = _plans("H200", fixed={"fp8": True, "loss_chunk_factor": 1})[0]
    first, *others = list_fallbacks(plan)
    packed = {"dequantized_base": False, "fp8": False}
    assert first.strategy == plan.strategy.model_copy(update=packed)
    assert others


def test_fp8_steps_are_those_of_lora_in_fp8() -> None:
    node = Node(gpu=find_gpu("H200"), num_gpus=1)
    spec = resolve_model("Llama-2-7b")
    asked: dict[str, Any] = {"fp8": True, "fused_lora": True, "checkpointing": False}
    nf4: dict[str, Any] = {"weights": "nf4", "dequantized_base": True}
    lora, unpacked, wide = (
        estimate_job(spec=spec, strategy=Strategy.model_validate(asked | fields), node=node)
        for fields in ({}, nf4, nf4 | {"fp8": False})
    )
    assert unpacked.time == lora.time
    assert unpacked.gpu == lora.gpu
    assert wide.gpu.components["weights"] - unpacked.gpu.components["weights"] == spec.linear_params
    phases, of_lora, of_wide = (
        {phase.name: phase for phase in estimate.phases} for estimate in (unpacked, lora, wide)
    )
    # Codes become fp8 matrix by matrix: bf16 is there of one alone, and once more scaled.
    beside = phases["load"].components["dequantized"]
    assert beside == 4 * 4096 * 11008
    others = spec.linear_params - 4096 * 11008
    assert of_lora["load"].components["dequantized"] == beside + others
    assert phases["inference"] == of_wide["inference"], "both answer packed"
