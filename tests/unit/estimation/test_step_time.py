"""Step time: order, sums, and speeds that were measured."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from machine_pace import allow
from tightfit.core.profiles import DataProfile
from tightfit.core.strategy import Strategy
from tightfit.estimation.result import StepTime
from tightfit.estimation.step_time import estimate_step_time, padding_waste
from tightfit.estimation.weights import num_trainable
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model

LLAMA_7B = resolve_model("Llama-2-7b")
LLAMA_1B = resolve_model("Llama-3.2-1B")
H200 = Node(gpu=find_gpu("H200-SXM"), num_gpus=8)
A100 = Node(gpu=find_gpu("A100-SXM4-80GB"), num_gpus=8)


def estimate(
    *, node: Node = A100, spec: Any = LLAMA_7B, profile: DataProfile | None = None, **options: Any
) -> StepTime:
    strategy = Strategy(**{"micro_batch": 4, "seq_len": 2048, **options})
    return estimate_step_time(
        spec=spec,
        strategy=strategy,
        node=node,
        profile=profile,
        num_trainable=num_trainable(spec, strategy),
    )


def make_profile(**changes: Any) -> DataProfile:
    facts: dict[str, Any] = {
        "source": "made up",
        "format": "chat",
        "num_rows": 1000,
        "num_tokens": 300_000,
        "num_trained_tokens": 100_000,
        "mean_tokens": 300.0,
        "max_tokens": 2000,
        "percentiles": {"p50": 250},
        "histogram": ((256, 600), (512, 400)),
        "num_truncated": 0,
        "seq_len": 2048,
        "tokenizer": "none",
        "is_exact": False,
        "padding_waste_fraction": {"1": 0.0, "4": 0.4, "16": 0.6},
        "packing_waste_fraction": 0.02,
        "num_packed_rows": 150,
    }
    return DataProfile(**{**facts, **changes})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "full", "sharding": "fsdp", "gpus_per_node": 8},
        {"weights": "nf4", "adapter_dtype": "fp32"},
        {"method": "full", "sharding": "zero3", "offload": "all", "gpus_per_node": 4},
        {"method": "load"},
        {"method": "full", "weights": "fp32", "attention": "eager", "num_nodes": 2},
    ],
)
def test_parts_sum_to_the_step_and_lie_in_the_range(options: dict[str, Any]) -> None:
    step = estimate(**options)

    assert sum(step.components.values()) == pytest.approx(step.seconds_per_step)
    assert min(step.components.values()) >= 0
    assert step.seconds_per_step_low < step.seconds_per_step < step.seconds_per_step_high
    assert 0 < step.mfu_fraction < 1


SLOWER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("recomputation", {"checkpointing": False}, {"checkpointing": True}),
    ("separate kernels", {"fused_kernels": True}, {"fused_kernels": False}),
    ("adapters in passes", {"fused_lora": True}, {"fused_lora": False}),
    ("narrow slices", {"loss": "fused", "loss_chunk_factor": 4}, {"loss": "fused"}),
    ("no compiler", {"compile": True}, {"compile": False}),
    ("fp32 adapters", {"adapter_dtype": "bf16"}, {"adapter_dtype": "fp32"}),
    ("4-bit weights", {"weights": "bf16"}, {"weights": "nf4"}),
    (
        "4-bit weights in every pass",
        {"weights": "nf4", "dequantized_base": True},
        {"weights": "nf4"},
    ),
    ("8-bit weights", {"weights": "bf16"}, {"weights": "int8"}),
    ("scores in memory", {"attention": "sdpa"}, {"attention": "eager"}),
    ("full tuning", {"method": "lora"}, {"method": "full"}),
    (
        "fp32 arithmetic",
        {"method": "full"},
        {"method": "full", "weights": "fp32", "compute": "fp32"},
    ),
    ("autocast", {"method": "full"}, {"method": "full", "weights": "fp32"}),
    ("unfused optimizer", {"method": "full"}, {"method": "full", "optimizer": "adamw-foreach"}),
    ("longer sequences", {"seq_len": 1024}, {"seq_len": 4096}),
    ("more targets", {"lora_targets": ("q_proj",)}, {"lora_targets": ("all-linear",)}),
    ("host updates", {"method": "full"}, {"method": "full", "offload": "optimizer"}),
    ("host weights", {"method": "full"}, {"method": "full", "offload": "all"}),
]


@pytest.mark.parametrize(
    ("faster", "slower"), [case[1:] for case in SLOWER], ids=[case[0] for case in SLOWER]
)
def test_what_costs_time_costs_time(faster: dict[str, Any], slower: dict[str, Any]) -> None:
    quick, late = (estimate(**options) for options in (faster, slower))
    tokens = slower.get("seq_len", 2048) / faster.get("seq_len", 2048)

    assert late.seconds_per_step > tokens * quick.seconds_per_step * 0.999


@pytest.mark.parametrize("method", ["full", "lora"])
def test_larger_batches_take_longer_but_never_more_per_token(method: str) -> None:
    steps = [
        estimate(spec=LLAMA_1B, method=method, micro_batch=batch) for batch in (1, 2, 4, 8, 64)
    ]

    for small, large in itertools.pairwise(steps):
        assert large.seconds_per_step >= small.seconds_per_step
        assert large.tokens_per_second >= small.tokens_per_second * 0.999


def test_ranks_that_do_not_talk_add_up() -> None:
    one = estimate(sharding="single")
    eight = estimate(sharding="ddp", gpus_per_node=8)

    assert 7 * one.tokens_per_second < eight.tokens_per_second <= 8 * one.tokens_per_second


def test_links_order_sharded_training() -> None:
    options: dict[str, Any] = {
        "method": "full",
        "sharding": "fsdp",
        "gpus_per_node": 8,
        "micro_batch": 1,
    }
    nvlink = estimate(**options)
    pcie = estimate(node=A100.model_copy(update={"has_nvlink": False}), **options)
    ethernet = estimate(num_nodes=2, **options)

    assert nvlink.seconds_per_step < pcie.seconds_per_step < ethernet.seconds_per_step


def test_hybrid_sharding_wins_over_a_slow_network() -> None:
    options: dict[str, Any] = {"sharding": "fsdp", "num_nodes": 2, "gpus_per_node": 8}
    flat, hybrid = estimate(**options), estimate(**{**options, "sharding": "fsdp-hybrid"})

    assert hybrid.seconds_per_step < flat.seconds_per_step


def test_accumulation_spreads_the_update() -> None:
    options: dict[str, Any] = {
        "method": "full",
        "sharding": "ddp",
        "gpus_per_node": 8,
        "micro_batch": 1,
    }
    once, eightfold = estimate(**options), estimate(**options, grad_accum=8)

    assert eightfold.tokens_per_second > once.tokens_per_second
    assert eightfold.components["matmul"] == pytest.approx(8 * once.components["matmul"])


def test_tiny_batches_wait_for_the_host() -> None:
    tiny = estimate(spec=LLAMA_1B, node=H200, micro_batch=1, seq_len=64)

    assert tiny.components["launch"] > 0.3 * tiny.seconds_per_step


@pytest.mark.parametrize(("name", "reached"), [("T4", 24e12), ("V100-SXM2-32GB", 95e12)])
def test_old_cards_stay_below_their_measured_matmul_rate(name: str, reached: float) -> None:
    """24e12 on T4 (power limit), 95e12 on V100: sources in hardware/rates.py."""
    node = Node(gpu=find_gpu(name), num_gpus=1)
    step = estimate(
        node=node,
        method="full",
        weights="fp16",
        compute="fp16",
        checkpointing=False,
        micro_batch=16,
    )

    assert 0.5 * reached < step.flops_per_step / step.seconds_per_step < reached


H200_SPEEDS: list[tuple[str, dict[str, Any], float]] = [
    ("Llama-2-7b", {"adapter_dtype": "fp32"}, 7218),
    ("Llama-2-7b", {}, 9283),
    ("Llama-2-7b", {"fused_kernels": True, "loss": "fused"}, 11833),
    ("Llama-2-7b", {"fused_kernels": True, "loss": "fused", "checkpointing": False}, 17130),
    ("Llama-2-7b", {"compile": True, "loss": "fused", "checkpointing": False}, 16557),
    ("Llama-2-7b", {"method": "full", "compile": True, "loss": "fused"}, 10042),
    ("Llama-3.1-8B", {"compile": True, "loss": "fused", "checkpointing": False}, 15476),
    ("Llama-3.2-1B", {"method": "full", "checkpointing": False}, 60084),
]


@pytest.mark.parametrize(("model", "options", "measured"), H200_SPEEDS)
def test_measured_speeds_on_h200(model: str, options: dict[str, Any], measured: float) -> None:
    """4 x 2048 tokens, rank 16 on all linears, torch 2.11."""
    step = estimate(node=H200, spec=resolve_model(model), **options)

    assert step.tokens_per_second == pytest.approx(measured, rel=0.2)


def test_padded_batches_count_real_tokens_only() -> None:
    profile = make_profile()
    step = estimate(profile=profile, micro_batch=4)
    unprofiled = estimate(micro_batch=4, seq_len=500)  # 300 real tokens are 60% of 500

    assert step.seconds_per_step == pytest.approx(unprofiled.seconds_per_step)
    assert step.tokens_per_second == pytest.approx(0.6 * unprofiled.tokens_per_second)
    assert step.steps_per_epoch == 250
    assert step.seconds_per_epoch == pytest.approx(250 * step.seconds_per_step)


def test_packing_fills_rows_and_shortens_the_epoch() -> None:
    profile = make_profile()
    padded = estimate(profile=profile, spec=LLAMA_1B)
    packed = estimate(profile=profile, spec=LLAMA_1B, packing=True, attention="flash")

    assert packed.steps_per_epoch == 38
    assert packed.tokens_per_second > padded.tokens_per_second
    assert (packed.seconds_per_epoch or 0) < (padded.seconds_per_epoch or 0)


def test_packed_documents_attend_among_themselves() -> None:
    profile = make_profile()
    packed = estimate(profile=profile, packing=True, attention="flash")
    crossing = estimate(profile=profile, packing=True, attention="sdpa")

    assert packed.components["attention"] < crossing.components["attention"]


def test_a_small_dataset_is_one_step() -> None:
    step = estimate(profile=make_profile(num_rows=10), micro_batch=64)

    assert step.steps_per_epoch == 1
    assert step.tokens_per_second == pytest.approx(300_000 / step.seconds_per_step)


def test_padding_waste_between_sampled_sizes() -> None:
    profile = make_profile()

    assert padding_waste(profile, 1) == 0.0
    assert padding_waste(profile, 2) == pytest.approx(0.2)
    assert 0.4 < padding_waste(profile, 8) < 0.6
    assert padding_waste(profile, 64) == pytest.approx(0.6)
    assert padding_waste(make_profile(padding_waste_fraction={}), 4) == 0.0


def test_fast_enough_to_search_thousands() -> None:
    strategy = Strategy(sharding="fsdp", gpus_per_node=8, weights="nf4")
    trainable = num_trainable(LLAMA_7B, strategy)
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        estimate_step_time(spec=LLAMA_7B, strategy=strategy, node=A100, num_trainable=trainable)
        best = min(best, time.perf_counter() - start)

    assert best < allow(500e-6)
