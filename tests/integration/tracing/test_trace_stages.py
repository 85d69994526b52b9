"""Every stage of a traced job, and families whose steps branch by chance or by their own rules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tightfit.core.errors import UsageError
from tightfit.trace.caching_allocator import AllocatorSettings, CachingAllocator
from tightfit.trace.recording import (
    GRADIENTS,
    INPUTS,
    KV_CACHE,
    OPTIMIZER,
    TEMPORARY,
    Recording,
    list_stage_peaks,
)
from tightfit.trace.result import TracedStage
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job
from tiny_configs import tiny_config

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 120}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"intermediate_size": 96, "max_position_embeddings": 64},
    "opt": _SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "falcon": _SIZES | {"alibi": False},
    "qwen3_next": tiny_config("qwen3_next"),
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    | {"vocab_size": 120, "decoder_start_token_id": 0, "is_encoder_decoder": True},
}
ALL = ["load", "first step", "steady step", "eval", "save", "generate", "resume"]


def record(family: str, fields: dict[str, Any], **changes: Any) -> Recording:
    config = {"model_type": family, **CONFIGS[family], **changes}
    strategy = {"micro_batch": 2, "seq_len": 32, "checkpointing": False} | fields
    job = TraceJob.model_validate(
        {"config": config, "strategy": strategy, "compute_capability": (9, 0)}
    )
    return record_job(job.model_copy(update={"config": config}))


def list_stages(recording: Recording) -> dict[str, TracedStage]:
    allocator = CachingAllocator(AllocatorSettings())
    return {stage.name: stage for stage in list_stage_peaks(recording, allocator)}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"method": "full"}),
        ("llama", {"sharding": "fsdp", "gpus_per_node": 2}),
        ("llama", {"sharding": "zero2", "gpus_per_node": 2}),
        ("llama", {"packing": True}),
        ("t5", {"method": "full"}),
    ],
)
def test_every_stage_has_its_figure(family: str, fields: dict[str, Any]) -> None:
    stages = list_stages(record(family, fields))

    assert list(stages) == ALL
    assert all(stages["load"].peak_allocated_bytes <= stages[n].peak_allocated_bytes for n in ALL)
    assert stages["save"].peak_allocated_bytes < stages["steady step"].peak_allocated_bytes


def sum_made(recording: Recording, stage: str) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for made in recording.allocations:
        if made.stage == stage:
            sizes[made.category] += made.num_bytes
    return sizes


@pytest.mark.parametrize("fields", [{}, {"sharding": "fsdp", "gpus_per_node": 2}])
def test_later_processes_are_told_by_what_they_hold(fields: dict[str, Any]) -> None:
    recording = record("llama", {"method": "full", **fields})
    resumed, steps = sum_made(recording, "resume"), sum_made(recording, "update")
    assert resumed[OPTIMIZER] == steps[OPTIMIZER] > 0
    assert resumed[GRADIENTS] > 0
    assert resumed[TEMPORARY] < resumed[GRADIENTS]
    # Keys and values of 2 layers for 2 rows: 32 tokens, and then all of them with one more.
    assert sum_made(recording, "generate")[KV_CACHE] == 2 * 2 * (2 * 64 * 2) * (32 + 33)


def test_an_encoder_decoder_caches_what_both_halves_know() -> None:
    recording = record("t5", {"method": "full"})
    assert sum_made(recording, "generate")[KV_CACHE] > 0


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_no_layer_is_left_out_by_chance(method: str, checkpointing: bool) -> None:
    """OPT draws a number before each layer, and skips the layer where it is low."""
    fields = {"method": method, "checkpointing": checkpointing}
    for chance in (0.0, 0.9):
        made = record("opt", fields, layerdrop=chance).allocations
        assert {one.layer for one in made if one.stage == "forward"} >= {0, 1}
        assert {one.layer for one in made if one.stage == "backward"} >= {0, 1}


def test_an_evaluation_s_rows_are_never_packed() -> None:
    packed = record("llama", {"packing": True, "attention": "eager"})
    plain = record("llama", {"packing": False, "attention": "eager"})

    def evaluate(recording: Recording) -> Counter[tuple[str, int]]:
        made = (one for one in recording.allocations if one.stage == "eval")
        return Counter((one.op, one.num_bytes) for one in made if one.category != INPUTS)

    assert evaluate(packed) == evaluate(plain)


def test_what_cannot_be_packed_says_so_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="qwen3_next") as caught:
        record("qwen3_next", {"packing": True, "attention": "eager"})
    assert "packing=false" in caught.value.remedy
    assert list(list_stages(record("falcon", {"repeat_keys": True}))) == ALL
