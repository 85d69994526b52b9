"""The ladder after an out-of-memory: the same training, less memory at every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import SHORT_ROWS, make_cluster, make_request

from tightfit.core.settings import Offload, Sharding
from tightfit.hardware.catalogue import find_gpu
from tightfit.planning.fallback import list_fallbacks
from tightfit.planning.plan import Plan
from tightfit.planning.rules import Case, find_violations
from tightfit.planning.search import search

KEPT = (
    *("method", "weights", "compute", "adapter_dtype", "lora_rank", "lora_targets", "dora"),
    *("train_embeddings", "optimizer", "seq_len", "packing", "num_nodes", "gpus_per_node"),
    "router_loss_weight",
)


def _plan(gpu: str, count: int, *, num_nodes: int = 1, **request: Any) -> Plan:
    cluster = make_cluster((count, gpu), num_nodes=num_nodes)
    result = search(make_request(**request), cluster, num_plans=1, is_coarse=True)
    assert result.plans, result.failure
    return result.plans[0]


def _check_ladder(plan: Plan) -> None:
    need = plan.estimate.gpu.peak_reserved_bytes
    for fallback in list_fallbacks(plan):
        s = fallback.strategy
        assert s.examples_per_step == plan.effective_batch
        assert fallback.effective_batch == plan.effective_batch
        for name in KEPT:
            assert getattr(s, name) == getattr(plan.strategy, name), name
        assert fallback.estimate.gpu.peak_reserved_bytes < need
        need = fallback.estimate.gpu.peak_reserved_bytes
        node = plan.hardware.node
        case = Case(spec=plan.model, strategy=s, node=node, num_nodes=plan.hardware.num_nodes)
        assert find_violations(case) == []
        assert fallback.training == plan.training
        assert len(fallback.why) == 1


@settings(max_examples=25, deadline=None)
@given(
    gpu=st.sampled_from(["T4", "V100-32GB", "RTX 4090", "A100-80GB", "H200"]),
    count=st.sampled_from([1, 2, 4]),
    method=st.sampled_from(["full", "lora", "qlora"]),
    batch=st.sampled_from([4, 12, 16, 30, 64]),
    model=st.sampled_from(["Llama-3.2-1B", "pythia-160m", "t5-large"]),
)
def test_every_step_is_the_same_job_in_less_memory(
    gpu: str, count: int, method: str, batch: int, model: str
) -> None:
    request = make_request(model, method=method, effective_batch=batch, seq_len=512)
    result = search(request, make_cluster((count, gpu)), num_plans=1, is_coarse=True)
    for plan in result.plans:
        _check_ladder(plan)


def test_the_order_is_chunks_then_batch_then_recomputing_then_offload() -> None:
    plan = _plan("A100-80GB", 1, method="lora", fixed={"checkpointing": False})
    _check_ladder(plan)
    changes = [fallback.why[0] for fallback in list_fallbacks(plan)]
    words = ["chunks", "micro-batch", "checkpointing", "host memory", "MLPs in tiles", "offload"]
    kinds = [next(word for word in words if word in change) for change in changes]
    assert kinds == sorted(kinds, key=words.index)
    assert set(kinds) == set(words)
    some = [plan.strategy.recomputed_layers for plan in list_fallbacks(plan)]
    assert 16 in some, "half of the 32 layers first"


def test_deepspeed_stays_deepspeed() -> None:
    fixed = {"sharding": "zero2", "gpus_per_node": 4}
    plan = _plan("H200", 4, method="full", fixed=fixed)
    shardings = {fallback.strategy.sharding for fallback in list_fallbacks(plan)}
    assert shardings == {Sharding.ZERO2}, "another stage cannot read this one's checkpoints"


def test_a_cpu_has_nowhere_to_offload_to() -> None:
    gpu = find_gpu("H200").model_copy(update={"is_cpu": True, "compute_capability": None})
    request = make_request("pythia-160m", method="lora", profile=SHORT_ROWS)
    plan = search(request, make_cluster((2, gpu)), num_plans=1).plans[0]
    fallbacks = list_fallbacks(plan)
    _check_ladder(plan)
    assert fallbacks
    assert all(fallback.strategy.offload is Offload.NONE for fallback in fallbacks)


def test_the_last_resort_has_no_further_step() -> None:
    fixed = {"micro_batch": 1, "checkpointing": True, "loss": "fused"}
    fixed |= {"mlp_tiles": 2, "offloaded_inputs": 31}
    plan = _plan("A100-80GB", 1, method="lora", fixed=fixed)
    [only] = list_fallbacks(plan)
    assert only.strategy.offload is Offload.ALL
    assert list_fallbacks(only) == []


@pytest.mark.parametrize("batch", [7, 13])
def test_odd_batches_are_divided_evenly(batch: int) -> None:
    plan = _plan("A100-80GB", 1, method="lora", effective_batch=batch, seq_len=256)
    _check_ladder(plan)
    assert list_fallbacks(plan)


def test_long_rows_are_shared_by_more_gpus_before_weights_go_to_the_host() -> None:
    plan = _plan(
        "A100-80GB",
        8,
        seq_len=65_536,
        effective_batch=8,
        fixed={"sharding": "ddp", "method": "lora", "gpus_per_node": 8},
    )
    _check_ladder(plan)
    sizes = [fallback.strategy.context_parallel for fallback in list_fallbacks(plan)]

    assert {2, 4, 8} <= set(sizes)
    assert sizes == sorted(sizes)
