"""Jobs of preference objectives: with adapters off, with a copy, before training, without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tightfit.core.strategy import Strategy
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Gpu

_LLAMA = "Llama-3.2-1B"
_SHORT = {"micro_batch": 2, "seq_len": 1024}
_FULL = {"method": "full", "loss": "fused", **_SHORT}
_FP16 = {"weights": "fp16", "compute": "fp16", "adapter_dtype": "fp32", "autocast": True}
_OURS = {"fused_kernels": True, "fused_lora": True, "loss_chunk_factor": 4, "loss": "fused"}
JOBS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Qwen3-1.7B", "H200", {"objective": "kto", "loss": "fused", "grad_accum": 4, **_SHORT}),
    (_LLAMA, "H200", {"objective": "dpo", "loss": "fused", "checkpointing": False, **_SHORT}),
    (_LLAMA, "H200", {"objective": "dpo", **_OURS, **_SHORT}),
    (_LLAMA, "H200", {"objective": "dpo", **_FULL, "fused_kernels": True}),
    (
        "SmolLM2-360M",
        "A100-80GB",
        {
            "objective": "orpo",
            "method": "full",
            "weights": "fp32",
            "micro_batch": 4,
            "seq_len": 512,
        },
    ),
    (
        "pythia-1.4b",
        "V100-32GB",
        {
            **{"objective": "kto", "loss": "chunked", "checkpointing": False, **_FP16},
            **{"micro_batch": 4, "seq_len": 512, "sharding": "ddp", "gpus_per_node": 4},
        },
    ),
    (
        "Qwen2.5-1.5B",
        "A100-80GB",
        {"objective": "dpo", "weights": "nf4", "loss": "fused", **_SHORT},
    ),
    (
        _LLAMA,
        "A100-80GB",
        {
            **{"objective": "dpo", **_FULL, "micro_batch": 1, "weights": "fp32"},
            **{"sharding": "fsdp", "gpus_per_node": 4, "precompute_reference": True},
        },
    ),
    (
        _LLAMA,
        "H200",
        {"objective": "ipo", **_FULL, "checkpointing": False},
    ),
    ("gemma-2-2b", "H200", {"objective": "simpo", "attention": "eager", "loss": "fused", **_SHORT}),
    (
        _LLAMA,
        "H200",
        {
            **{"objective": "dpo", "packing": True, "attention": "flash", "loss": "fused"},
            **{"micro_batch": 1, "checkpointing": False},
        },
    ),
    (_LLAMA, "A100-80GB", {"objective": "dpo", "loss": "plain", **_SHORT}),
)


def list_jobs() -> Iterator[tuple[str, Gpu, Strategy]]:
    for model, gpu, fields in JOBS:
        yield model, find_gpu(gpu), Strategy(**fields)
