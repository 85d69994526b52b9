"""Memory: against measured steps, published verdicts, and how it must move with each lever."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Loss, Method, Offload, Sharding
from tightfit.core.strategy import Quirks, Strategy
from tightfit.core.units import GIB
from tightfit.estimation.job import estimate_job, kv_cache_bytes
from tightfit.estimation.memory import (
    estimate_batch_independent_bytes,
    estimate_moments,
    estimate_step_peak_bytes,
    list_reserved_components,
    peak_moment,
)
from tightfit.estimation.weights import estimate_weight_bytes, num_trainable
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model


def allocated_gib(model: str, **fields: Any) -> float:
    strategy = Strategy(**fields)
    return peak_moment(estimate_moments(resolve_model(model), strategy)).allocated_bytes / GIB


# Rows of benchmarks/results/h200_steps.json: one H200, torch 2.11, transformers 5.17, peft 0.21,
# SDPA, fused AdamW; torch.cuda.max_memory_allocated in GiB.
BF16_ADAPTERS = {"micro_batch": 4, "seq_len": 1024}
RANDOM_WEIGHTS = Quirks(outlier_columns=True)
MEASURED: list[tuple[str, dict[str, Any], float]] = [
    ("Llama-2-7b", {"adapter_dtype": "fp32", "micro_batch": 4}, 18.12),
    ("Llama-2-7b", {"adapter_dtype": "fp32", "checkpointing": False}, 30.58),
    ("Llama-2-7b", {"checkpointing": False, "micro_batch": 4}, 57.36),
    ("Llama-3.1-8B", {"adapter_dtype": "fp32", "micro_batch": 2, "seq_len": 4096}, 29.36),
    (
        "Llama-3.1-8B",
        {"adapter_dtype": "fp32", "checkpointing": False, "micro_batch": 2, "seq_len": 1024},
        36.46,
    ),
    ("Llama-2-7b", BF16_ADAPTERS | {"weights": "nf4"}, 6.41),
    ("Llama-2-7b", BF16_ADAPTERS | {"weights": "nf4", "double_quant": False}, 6.70),
    ("Llama-2-7b", BF16_ADAPTERS | {"weights": "int8", "quirks": RANDOM_WEIGHTS}, 17.72),
    (
        "Llama-2-7b",
        {"method": "full", "weights": "fp32", "sharding": "fsdp", "gpus_per_node": 4},
        27.67,
    ),
    (
        "Llama-3.1-8B",
        {"method": "full", "weights": "fp32", "sharding": "fsdp", "gpus_per_node": 8},
        20.40,
    ),
]


@pytest.mark.parametrize(("model", "fields", "gib"), MEASURED)
def test_allocated_peak_is_within_three_percent_of_the_measured_one(
    model: str, fields: dict[str, Any], gib: float
) -> None:
    assert allocated_gib(model, **fields) == pytest.approx(gib, rel=0.03)


def test_int8_keeps_no_second_copy_of_inputs_without_outliers() -> None:
    """Measured: benchmarks/results/h200_trace_dev.json, `llama1b-int8`, 5,912,500,736 bytes."""
    predicted = allocated_gib("Llama-3.2-1B", weights="int8", micro_batch=2, seq_len=1024)

    assert predicted == pytest.approx(5_912_500_736 / GIB, rel=0.03)


def test_ddp_holds_buckets_beside_accumulated_gradients() -> None:
    """torch's Reducer: buckets as large as all gradients stand from the start, and `no_sync`
    leaves the gradients of earlier micro-batches outside of them."""
    fields: dict[str, Any] = {"method": "full", "micro_batch": 1, "seq_len": 512, "loss": "fused"}
    spec = resolve_model("Llama-2-7b")

    def gradients(**more: Any) -> dict[str, int]:
        moments = estimate_moments(spec, Strategy(**(fields | more)))
        return {moment.name: moment.components.get("gradients", 0) for moment in moments}

    alone = gradients()
    once = gradients(sharding="ddp", gpus_per_node=2)
    twice = gradients(sharding="ddp", gpus_per_node=2, grad_accum=2)

    assert alone["forward"] == 0
    assert once["forward"] == once["optimizer"] == alone["optimizer"]
    assert twice["forward"] == twice["backward_end"] == 2 * once["forward"]
    assert twice["optimizer"] == once["optimizer"]


def test_full_tuning_in_the_optimizer_step_is_ten_bytes_a_parameter() -> None:
    """Published: pure bf16 with foreach AdamW peaks at 67.46 GiB on Mistral-7B, one A100
    (foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv)."""
    predicted = allocated_gib(
        "Mistral-7B-v0.1",
        method="full",
        optimizer="adamw-foreach",
        micro_batch=4,
        seq_len=4096,
        attention="flash",
        fused_kernels=True,
        loss="fused",
    )

    assert predicted == pytest.approx(67.46, rel=0.001)


LORA = {"method": "lora", "micro_batch": 4, "seq_len": 2048}
SHORT = {"method": "lora", "seq_len": 128}
FULL = {"method": "full", "micro_batch": 2, "seq_len": 2048}


@pytest.mark.parametrize(
    ("base", "larger"),
    [
        (LORA, LORA | {"micro_batch": 8}),
        (LORA, LORA | {"seq_len": 4096}),
        (LORA, LORA | {"checkpointing": False}),
        (LORA | {"loss": "kernel"}, LORA),
        # recomputing a layer takes more than the kernel's logits
        (
            LORA | {"checkpointing": False, "loss": "fused"},
            LORA | {"checkpointing": False, "loss": "kernel"},
        ),
        (LORA | {"checkpointing": False}, LORA | {"checkpointing": False, "attention": "eager"}),
        (
            LORA | {"checkpointing": False, "fused_kernels": True},
            LORA | {"checkpointing": False},
        ),
        (LORA | {"weights": "nf4"}, LORA | {"weights": "int8"}),
        (SHORT | {"weights": "int8"}, SHORT),
        (LORA, LORA | {"weights": "fp32"}),
        (LORA | {"weights": "nf4"}, LORA | {"weights": "nf4", "double_quant": False}),
        (LORA | {"weights": "nf4"}, LORA | {"weights": "nf4", "upcast_unquantized": True}),
        (LORA, LORA | {"train_embeddings": True}),
        (LORA, LORA | {"lora_rank": 256}),
        (FULL, FULL | {"optimizer": "adamw-foreach"}),
        (FULL | {"optimizer": "adamw-8bit"}, FULL),
        (FULL | {"optimizer": "sgd-momentum"}, FULL),
        (FULL | {"quirks": {"optimizer_in_backward": True}}, FULL),
        (FULL | {"sharding": "fsdp", "gpus_per_node": 4}, FULL),
        (
            FULL | {"sharding": "fsdp", "gpus_per_node": 8},
            FULL | {"sharding": "fsdp", "gpus_per_node": 4},
        ),
        (
            FULL | {"sharding": "zero3", "gpus_per_node": 4},
            FULL | {"sharding": "zero2", "gpus_per_node": 4},
        ),
        (
            FULL | {"sharding": "zero2", "gpus_per_node": 4},
            FULL | {"sharding": "zero1", "gpus_per_node": 4},
        ),
        (
            FULL | {"sharding": "fsdp", "gpus_per_node": 4, "offload": "all"},
            FULL | {"sharding": "fsdp", "gpus_per_node": 4},
        ),
        (
            FULL | {"sharding": "fsdp", "gpus_per_node": 4},
            FULL | {"sharding": "fsdp-grad-op", "gpus_per_node": 4},
        ),
    ],
)
def test_each_lever_moves_the_peak_its_way(base: dict[str, Any], larger: dict[str, Any]) -> None:
    assert allocated_gib("Llama-2-7b", **base) < allocated_gib("Llama-2-7b", **larger)


@pytest.mark.parametrize("model", ["Llama-2-7b", "gpt2-xl", "t5-3b", "Mixtral-8x7B", "gemma-2-2b"])
@pytest.mark.parametrize("method", list(Method))
def test_components_sum_to_the_peak_and_every_phase_is_there(model: str, method: Method) -> None:
    estimate = estimate_job(
        spec=resolve_model(model),
        strategy=Strategy(method=method, seq_len=512),
        node=resolve_hardware("A100-80GB").groups[0].node,
    )

    assert sum(estimate.gpu.components.values()) == estimate.gpu.peak_reserved_bytes
    outside = estimate.gpu.components["allocator_slack"] + estimate.gpu.components["cuda_context"]
    assert estimate.gpu.peak_allocated_bytes == estimate.gpu.peak_reserved_bytes - outside
    assert all(size >= 0 for size in estimate.gpu.components.values())
    names = {phase.name for phase in estimate.phases}
    expected = {"load", "quantize", "inference"}
    if method is not Method.LOAD:
        expected |= {"forward", "loss", "backward", "backward_end", "optimizer", "eval", "save"}
    assert expected <= names
    assert sum(estimate.host.components.values()) == estimate.host.peak_bytes
    assert sum(estimate.disk.components.values()) == estimate.disk.bytes


def test_nf4_weights_of_llama_2_7b_match_the_published_footprint() -> None:
    """bitsandbytes loads it in about 3.9e9 bytes with double quantization."""
    weights = estimate_weight_bytes(
        resolve_model("Llama-2-7b"), Strategy(weights=Dtype.NF4, double_quant=True)
    )

    # 6,476,005,376 packed values at 0.516 bytes; 262,410,240 others at 2
    assert weights.total == pytest.approx(3.866e9, rel=0.002)


@pytest.mark.parametrize(
    ("rank", "targets", "published"),
    [(8, ("q_proj", "v_proj"), 4_194_304), (64, ("all-linear",), 159_907_840)],
)
def test_lora_counts_are_those_peft_prints_for_llama_2_7b(
    rank: int, targets: tuple[str, ...], published: int
) -> None:
    strategy = Strategy(lora_rank=rank, lora_targets=targets)

    assert num_trainable(resolve_model("Llama-2-7b"), strategy) == published


def test_kv_cache_of_llama_2_7b_is_half_a_mebibyte_a_token() -> None:
    """vLLM, arXiv:2309.06180 section 1, gives 800 KB for OPT-13B by the same formula."""
    strategy = Strategy(method=Method.LOAD, seq_len=1, micro_batch=1)

    assert kv_cache_bytes(resolve_model("Llama-2-7b"), strategy) == 524_288


def test_repeated_keys_spare_the_score_matrix_of_grouped_heads_in_fp32() -> None:
    """Measured: Llama-3.2-1B, fp32, 4 x 1024 without recomputation peaks at 40.84 GiB, 8.8 GiB
    more than its tensors without scores (benchmarks/results/h200_steps.json)."""
    fields: dict[str, Any] = {
        "method": "full",
        "weights": "fp32",
        "compute": "fp32",
        "checkpointing": False,
        "micro_batch": 4,
        "seq_len": 1024,
    }
    held = allocated_gib("Llama-3.2-1B", **fields)
    spared = allocated_gib("Llama-3.2-1B", **fields, repeat_keys=True)

    assert held == pytest.approx(40.84, rel=0.05)
    assert spared < held - 6


def test_offload_moves_state_to_the_host() -> None:
    node = resolve_hardware("4xA100-40GB").groups[0].node
    spec = resolve_model("Llama-2-7b")
    kept, moved = (
        estimate_job(
            spec=spec,
            strategy=Strategy(
                method=Method.FULL, sharding=Sharding.ZERO3, gpus_per_node=4, offload=offload
            ),
            node=node,
        )
        for offload in (Offload.NONE, Offload.ALL)
    )

    assert moved.gpu.peak_reserved_bytes < kept.gpu.peak_reserved_bytes
    # 16 bytes a parameter have gone to the host
    assert moved.host.peak_bytes - kept.host.peak_bytes > 14 * spec.num_params


def test_a_sliding_window_bounds_the_cache() -> None:
    spec = resolve_model("gemma-2-2b")
    short, long = (
        kv_cache_bytes(spec, Strategy(method=Method.LOAD, seq_len=length))
        for length in (4096, 8192)
    )

    assert long < 2 * short


def test_the_quick_answer_is_the_full_one() -> None:
    spec, strategy = resolve_model("Qwen2.5-7B"), Strategy(micro_batch=2, loss=Loss.FUSED)
    moments = estimate_moments(spec, strategy)
    held = list_reserved_components(peak_moment(moments), moments, strategy)

    assert estimate_step_peak_bytes(spec, strategy) == sum(held.values())


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "full", "sharding": "fsdp", "gpus_per_node": 4},
        {"weights": "nf4", "attention": "eager", "loss": "plain"},
        {"fp8": True, "checkpointing": False, "loss": "fused"},
        {"method": "full", "optimizer": "adamw-8bit", "checkpointing": True, "dora": True},
    ],
)
@pytest.mark.parametrize("size", [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("is_cpu", [False, True])
def test_what_stands_is_the_same_at_every_micro_batch(
    fields: dict[str, Any], size: tuple[int, int], is_cpu: bool
) -> None:
    check_what_stands("Qwen2.5-7B", Strategy(**fields), size, is_cpu=is_cpu)


@pytest.mark.parametrize("model", ["Llama-3.2-1B", "falcon-7b"])
@pytest.mark.parametrize("quirks", [{}, {"padding_mask": True}])
def test_what_stands_is_the_same_for_several_rows(model: str, quirks: dict[str, bool]) -> None:
    """A lone row has no padding mask, and Falcon's copies no query."""
    strategy = Strategy(micro_batch=2, quirks=quirks)
    for size in ((4, 2), (16, 1)):
        check_what_stands(model, strategy, size)


def check_what_stands(
    model: str, strategy: Strategy, size: tuple[int, int], *, is_cpu: bool = False
) -> None:
    spec = resolve_model(model)
    sized = strategy.model_copy(update={"micro_batch": size[0], "grad_accum": size[1]})
    independent = estimate_batch_independent_bytes(spec, strategy, is_cpu=is_cpu)

    assert estimate_moments(
        spec, sized, is_cpu=is_cpu, independent=independent
    ) == estimate_moments(spec, sized, is_cpu=is_cpu)
