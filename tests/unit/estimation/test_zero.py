"""ZeRO figures that others published: the six-row table, and the paper's 64-GPU example."""

from __future__ import annotations

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.units import GB, GIB
from tightfit.estimation.memory import estimate_moments, peak_moment
from tightfit.estimation.state import (
    estimate_state_bytes,
    estimate_zero_table,
    largest_layer_params,
)
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec

# deepspeed.runtime.zero.stage3 prints these for t5-3b on 8 GPUs (its documentation).
LIVE_GPU = [0.12, 0.12, 0.79, 0.79, 6.10, 6.10]
LIVE_HOST = [71.71, 127.48, 63.74, 127.48, 1.47, 127.48]
COLD_GPU = [0.12, 0.12, 0.78, 0.78, 6.09, 6.09]
COLD_HOST = [71.69, 127.45, 63.72, 127.45, 1.43, 127.45]


def test_live_table_of_t5_3b_to_the_digit() -> None:
    spec = resolve_model("t5-3b")
    rows = estimate_zero_table(
        total_params=spec.num_params,
        largest_layer_params=largest_layer_params(spec),
        gpus_per_node=8,
        num_nodes=1,
    )

    assert [round(row.gpu_bytes / GIB, 2) for row in rows] == LIVE_GPU
    assert [round(row.host_bytes / GIB, 2) for row in rows] == LIVE_HOST


def test_cold_table_to_the_digit() -> None:
    rows = estimate_zero_table(
        total_params=2_851_000_000,
        largest_layer_params=32_000_000,
        gpus_per_node=8,
        num_nodes=1,
    )

    assert [round(row.gpu_bytes / GIB, 2) for row in rows] == COLD_GPU
    assert [round(row.host_bytes / GIB, 2) for row in rows] == COLD_HOST


def test_two_nodes_share_what_is_offloaded() -> None:
    one, two = (
        estimate_zero_table(
            total_params=10**9, largest_layer_params=10**7, gpus_per_node=4, num_nodes=nodes
        )
        for nodes in (1, 2)
    )

    assert two[0].host_bytes * 2 == one[0].host_bytes
    assert two[4].gpu_bytes < one[4].gpu_bytes


def _of_size(num_params: int) -> ModelSpec:
    """A model whose count is exactly `num_params`; states depend on nothing else."""
    spec = resolve_model("Llama-2-7b")
    return spec.model_copy(
        update={"outer_params": spec.outer_params + num_params - spec.num_params}
    )


@pytest.mark.parametrize(
    ("sharding", "published_gb"),
    [(Sharding.ZERO1, 31.4), (Sharding.ZERO2, 16.6), (Sharding.ZERO3, 1.9)],
)
def test_model_states_of_the_zero_papers_64_gpu_example(
    sharding: Sharding, published_gb: float
) -> None:
    """ZeRO, arXiv:1910.02054 figure 1: 7.5B parameters on 64 GPUs, mixed precision with Adam."""
    strategy = Strategy(
        method=Method.FULL,
        weights=Dtype.FP16,
        compute=Dtype.FP16,
        sharding=sharding,
        gpus_per_node=64,
    )
    state = estimate_state_bytes(_of_size(7_500_000_000), strategy)

    states_gb = (state.weights + state.gradients + state.optimizer) / GB
    assert round(states_gb, 1) == published_gb


def test_the_fields_rule_of_thumb_for_a_billion_parameters() -> None:
    """About 22 GB to train 1e9 parameters in fp32 with Adam: weights, gradients, two moments
    and the activations of one sequence at the same time, as in every accumulated micro-batch."""
    spec = resolve_model("1e9-params")
    strategy = Strategy(
        method=Method.FULL,
        weights=Dtype.FP32,
        compute=Dtype.FP32,
        checkpointing=False,
        grad_accum=2,
    )
    peak = peak_moment(estimate_moments(spec, strategy))

    assert spec.num_params == 1_000_000_000
    assert spec.warnings
    assert peak.allocated_bytes / GB == pytest.approx(22, rel=0.15)
