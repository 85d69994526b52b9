"""QLoRA with an dequantized base: the closed form beside a trace, and both beside 16-bit LoRA."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.estimation.job import estimate_job
from tightfit.estimation.result import Estimate
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.config import read_config_file
from tightfit.trace.result import TracedMemory
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import trace

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
UNPACKED: dict[str, Any] = {"weights": "nf4", "dequantized_base": True}
FP16: dict[str, Any] = {"compute": "fp16", "autocast": True, "adapter_dtype": "fp32"}
FP8: dict[str, Any] = {"fp8": True, "fused_lora": True}
CASES: list[dict[str, Any]] = [
    {"checkpointing": False, "fused_lora": True},
    {"checkpointing": True},
    {"checkpointing": True, **FP16},
    {"checkpointing": False, **FP8},
    {"checkpointing": True, "double_quant": False, **FP8},
]


def _look(folder: Path, **fields: Any) -> tuple[TracedMemory, Estimate]:
    (folder / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    asked = {"micro_batch": 4, "seq_len": 1024, "loss": "chunked"} | fields
    strategy = Strategy.model_validate(asked)
    spec = read_config_file(folder / "config.json", name="llama")
    node = Node(gpu=find_gpu("H200"), num_gpus=1)
    return _trace(strategy), estimate_job(spec=spec, strategy=strategy, node=node)


@cache
def _trace(strategy: Strategy) -> TracedMemory:
    job = TraceJob(config=LLAMA, strategy=strategy, compute_capability=(9, 0), stages=())
    traced = trace(job).traced
    assert traced is not None
    return traced


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_closed_form_and_trace_agree(tmp_path: Path, fields: dict[str, Any]) -> None:
    traced, estimate = _look(tmp_path, **UNPACKED, **fields)
    assert estimate.gpu.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=0.05)
    load = next(stage for stage in traced.stages if stage.name == "load")
    reported = next(phase for phase in estimate.phases if phase.name == "load")
    assert reported.peak_allocated_bytes == pytest.approx(load.peak_allocated_bytes, rel=0.01)


def test_a_step_holds_what_one_of_16_bit_lora_holds(tmp_path: Path) -> None:
    unpacked, _ = _look(tmp_path, **UNPACKED)
    lora, _ = _look(tmp_path, weights="bf16", compute="bf16")
    packed, _ = _look(tmp_path, weights="nf4")
    assert unpacked.peak_allocated_bytes == pytest.approx(lora.peak_allocated_bytes, rel=1e-4)
    assert packed.peak_allocated_bytes < 0.8 * unpacked.peak_allocated_bytes
    # The holes that codes leave are filled: loading reserves little more than what stays.
    load = next(stage for stage in unpacked.stages if stage.name == "load")
    assert load.peak_reserved_bytes < 1.1 * load.peak_allocated_bytes


def test_in_fp8_a_step_holds_what_one_of_lora_in_fp8_holds(tmp_path: Path) -> None:
    unpacked, _ = _look(tmp_path, **UNPACKED, **FP8)
    lora, _ = _look(tmp_path, weights="bf16", **FP8)
    assert unpacked.peak_allocated_bytes == pytest.approx(lora.peak_allocated_bytes, rel=1e-4)
    loads = [
        stage.peak_allocated_bytes
        for traced in (unpacked, lora)
        for stage in traced.stages
        if stage.name == "load"
    ]
    assert loads[0] < 0.7 * loads[1], "never is all of it bf16"
