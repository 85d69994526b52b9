"""A traced fp8 step: its products, and each cast as the one kernel that it is on a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_models import make_llama
from tightfit.core.strategy import Strategy
from tightfit.estimate.trace.operations import BACKWARD, FORWARD, TRITON
from tightfit.train.tracing.job import TraceJob
from tightfit.train.tracing.run import record_job

LORA: dict[str, Any] = {"method": "lora", "folded_adapters": True}
FULL: dict[str, Any] = {"method": "full"}
LINEARS = 14
UNASKED = 3
"""Queries, keys and values of the first layer: nothing before them is trained under LoRA."""


@pytest.mark.parametrize(
    ("fields", "products_back", "casts", "casts_back"),
    [
        (LORA, LINEARS - UNASKED, LINEARS, 2 * (LINEARS - UNASKED)),
        (FULL, LINEARS, 2 * LINEARS, 2 * LINEARS),
    ],
    ids=["lora", "full"],
)
def test_products_and_casts_of_a_step(
    tmp_path: Path, fields: dict[str, Any], products_back: int, casts: int, casts_back: int
) -> None:
    """Backward, a frozen matrix is turned where a trained one is cast."""
    config = json.loads((make_llama(tmp_path) / "config.json").read_text("utf-8"))
    strategy = Strategy(fp8=True, micro_batch=2, seq_len=32, checkpointing=False, **fields)
    job = TraceJob(config=config, strategy=strategy, compute_capability=(9, 0), stages=())
    recording = record_job(job, config)
    assert recording.operations is not None
    calls = list(recording.operations.walk())

    def count(name: str, stage: str) -> int:
        return sum(one.count for one in calls if (one.name, one.stage) == (name, stage))

    assert count("aten::_scaled_mm", FORWARD) == LINEARS
    assert count("aten::_scaled_mm", BACKWARD) == products_back
    assert {one.dtype for one in calls if one.name == "aten::_scaled_mm"} == {"fp8"}
    assert count(TRITON, FORWARD) == casts
    assert count(TRITON, BACKWARD) == casts_back
