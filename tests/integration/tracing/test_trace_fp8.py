"""A traced fp8 step: its products, and each cast as the one kernel that it is on a card."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import make_llama
from tightfit.core.strategy import Strategy
from tightfit.runtime.kernels import fp8
from tightfit.trace.caching_allocator import find_peak
from tightfit.trace.recording import Recording
from tightfit.trace.result import BACKWARD, FORWARD, TRITON
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job

LORA: dict[str, Any] = {"method": "lora", "fused_lora": True}
FULL: dict[str, Any] = {"method": "full"}
LINEARS = 14
INPUTS = 8
"""Of these: queries, keys and values have one, gates and what they gate too."""
UNASKED = 3
"""Queries, keys and values of the first layer: nothing before them is trained under LoRA."""


@pytest.mark.parametrize(
    ("fields", "products_back", "casts", "casts_back"),
    [
        (LORA, LINEARS - UNASKED, INPUTS, 2 * (LINEARS - UNASKED)),
        (FULL, 2 * LINEARS, INPUTS + LINEARS, 5 * LINEARS + 2 * INPUTS),
    ],
    ids=["lora", "full"],
)
def test_products_and_casts_of_a_step(
    tmp_path: Path, fields: dict[str, Any], products_back: int, casts: int, casts_back: int
) -> None:
    """Backward, a frozen matrix is turned, where a trained one, and what its gradient is made of,
    are read twice to be cast."""
    recording = record(tmp_path, fields | {"checkpointing": False})
    assert recording.operations is not None
    calls = list(recording.operations.walk())

    def count(name: str, stage: str) -> int:
        return sum(one.count for one in calls if (one.name, one.stage) == (name, stage))

    assert count("aten::_scaled_mm", FORWARD) == LINEARS
    assert count("aten::_scaled_mm", BACKWARD) == products_back
    dtypes = {(one.dtype, one.stage) for one in calls if one.name == "aten::_scaled_mm"}
    assert dtypes == {("fp8", FORWARD), ("fp8-exact", BACKWARD)}
    assert count(TRITON, FORWARD) == casts
    assert count(TRITON, BACKWARD) == casts_back


def test_of_fp8_gradients_the_forward_pass_is_bf16_s(tmp_path: Path) -> None:
    """And the backward pass the one of full tuning in fp8."""
    kept = FULL | {"checkpointing": False}
    found = record(tmp_path, kept | {"fp8": False, "fp8_gradients": True}).operations
    both = record(tmp_path, kept).operations
    assert found is not None
    assert both is not None
    calls = [one for one in found.walk() if one.stage == FORWARD]
    assert not any(one.name in ("aten::_scaled_mm", TRITON) for one in calls)
    products = [one for one in calls if one.name in ("aten::mm", "aten::addmm")]
    assert sum(one.count for one in products) == LINEARS + 1, "the head too"

    def list_back(operations: Any) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        for one in operations.walk():
            if one.stage == BACKWARD and one.name in ("aten::_scaled_mm", TRITON):
                counts[one.name, one.dtype] += one.count
        return counts

    assert list_back(found) == list_back(both)
    assert list_back(both).total() == 7 * LINEARS + 2 * INPUTS


def test_joined_readers_are_one_layer_backward(tmp_path: Path) -> None:
    """Queries, keys and values are one, gates and what they gate another: 8 products a layer, not
    14."""
    found = record(tmp_path, FULL | {"checkpointing": False, "fused_kernels": True}).operations
    assert found is not None
    products = [one for one in found.walk() if one.name == "aten::_scaled_mm"]
    counts = {
        stage: sum(one.count for one in products if one.stage == stage)
        for stage in (FORWARD, BACKWARD)
    }
    assert counts == {FORWARD: LINEARS, BACKWARD: 16}


def record(folder: Path, fields: dict[str, Any]) -> Recording:
    config = json.loads((make_llama(folder) / "config.json").read_text("utf-8"))
    strategy = Strategy(**({"fp8": True, "micro_batch": 2, "seq_len": 32} | fields))
    job = TraceJob(config=config, strategy=strategy, compute_capability=(9, 0), stages=())
    return record_job(job.model_copy(update={"config": config}))


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("fields", [LORA, FULL], ids=["lora", "full"])
def test_shared_casts_are_not_there_at_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], checkpointing: bool
) -> None:
    fields = fields | {"checkpointing": checkpointing}
    shared = record(tmp_path, fields)
    monkeypatch.setattr(fp8._CastCache, "keep", lambda *_: None)
    apart = record(tmp_path, fields)
    assert len(shared.allocations) < len(apart.allocations)
    assert peak(shared) == peak(apart)


def peak(recording: Recording) -> int:
    return find_peak([one.num_bytes for one in recording.allocations], recording.events)[0]


def test_kernels_that_do_nothing_are_forgotten(tmp_path: Path) -> None:
    record(tmp_path, LORA | {"fused_kernels": True})
    assert "tightfit.runtime.kernels.fp8_triton" not in sys.modules
    assert not fp8._runs_kernels(torch.ones(1))
