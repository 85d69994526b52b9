"""What DeepSpeed's runs and their traces share: a model, its strategies, its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tightfit.core.strategy import Strategy

WORLD_SIZE = 4
NUM_STEPS = 3
BUCKET_VALUES = 700_000
"""Small enough that a step fills it several times, and one matrix does not fit."""
LIVE_VALUES = 2_000_000
"""A third of the model."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
ZERO_TRACES: dict[str, dict[str, Any]] = {
    "zero1": {"sharding": "zero1", "grad_accum": 2},
    "zero2": {"sharding": "zero2", "grad_accum": 2, "checkpointing": False},
    "zero3": {"sharding": "zero3"},
    "zero3-accumulated": {"sharding": "zero3", "grad_accum": 2, "checkpointing": False},
    "zero3-fp32": {"sharding": "zero3", "weights": "fp32", "compute": "fp32"},
    "zero3-lora": {"sharding": "zero3", "method": "lora"},
}


def make_strategy(**changes: Any) -> Strategy:
    settings = {"micro_batch": 2, "seq_len": 8, "gpus_per_node": WORLD_SIZE, "method": "full"}
    return Strategy.model_validate(settings | changes)


def make_rows(strategy: Strategy) -> dict[str, torch.Tensor]:
    ids = torch.ones((strategy.micro_batch, strategy.seq_len), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
