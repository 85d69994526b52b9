"""Host memory while loading: what each rank holds, against a model that was really read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import make_llama
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB
from tightfit.estimation.host_and_disk import (
    estimate_host_components,
    estimate_loading_bytes_by_rank,
)
from tightfit.models.resolve import resolve_model
from tightfit.runtime.load import load_base
from tightfit.training.model import prepare_model
from tightfit.training.tracing.engine import make_training
from tightfit.training.tracing.fake_kernels import list_quantization_state

FSDP = {"sharding": "fsdp", "gpus_per_node": 4, "num_nodes": 2}
TABLE_BYTES = 4 * (16 + 256 + 1)
"""Beside each nf4 matrix: its code, the code of its scales, their mean. The estimate leaves them
out."""


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "lora"},
        {"method": "lora", "adapter_dtype": "fp32"},
        {"method": "lora", "weights": "nf4"},
        {"method": "full", "weights": "fp32"},
    ],
    ids=str,
)
def test_first_rank_of_fsdp_holds_the_model_it_read(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = make_llama(tmp_path, hidden_size=256, intermediate_size=512)
    strategy = Strategy.model_validate(fields | FSDP)
    first, *others = estimate_loading_bytes_by_rank(resolve_model(str(folder)), strategy)
    assert others == [0] * 7
    model = load_base(folder, strategy, torch.device("cpu"))
    whole = prepare_model(model, strategy, make_training(strategy, folder))
    held = {id(t): t for t in [*whole.parameters(), *list_quantization_state(whole)]}
    read = sum(t.numel() * t.element_size() for t in held.values())
    num_packed = sum(type(t).__name__ == "Params4bit" for t in whole.parameters())
    assert first == read - num_packed * TABLE_BYTES


def test_ranks_that_keep_the_model_whole_all_stream_its_files() -> None:
    spec = resolve_model("Llama-2-7b")  # far more than one file
    strategy = Strategy.model_validate({"sharding": "ddp", "gpus_per_node": 2})
    assert estimate_loading_bytes_by_rank(spec, strategy) == [5 * GIB] * 2
    small = resolve_model("Llama-3.2-1B")
    assert max(estimate_loading_bytes_by_rank(small, strategy)) < 3 * GIB


def test_zero3_reads_files_on_its_first_rank() -> None:
    spec = resolve_model("Llama-3.2-1B")  # bf16 files
    strategy = Strategy.model_validate({"sharding": "zero3", "gpus_per_node": 4})
    assert estimate_loading_bytes_by_rank(spec, strategy) == [2 * spec.num_params, 0, 0, 0]


def test_a_node_holds_what_its_ranks_hold() -> None:
    spec = resolve_model("Llama-2-7b")
    strategy = Strategy.model_validate({"method": "full", "weights": "fp32"} | FSDP)
    assert estimate_host_components(spec, strategy)["loading"] == 4 * spec.num_params
