"""Compiled layers are traced as an H200 measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model
from tightfit.trace.caching_allocator import find_peak
from tightfit.training.tracing import worker
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job, trace
from tiny_configs import tiny_config

pytest.importorskip("peft", reason="pip install 'tightfit[train]'")

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "h200_families.json"
CAPABILITY = (9, 0)


def _job(config: dict[str, Any], **strategy: Any) -> TraceJob:
    return TraceJob(
        config=config,
        strategy=Strategy(compile=True, compute="bf16", weights="bf16", **strategy),
        compute_capability=CAPABILITY,
        random_weights=True,
        stages=(),
    )


@pytest.mark.parametrize(
    ("name", "model", "strategy"),
    [
        ("pythia-1.4b-full", "pythia-1.4b", {"loss": "fused", "loss_chunk_factor": 4}),
        ("bloom-1b7-full", "bloom-1b7", {"loss": "chunked", "attention": "flex"}),
    ],
)
def test_memory_and_time_are_what_a_gpu_took(
    name: str, model: str, strategy: dict[str, Any]
) -> None:
    row = json.loads(RESULT.read_text())["measured"][name]
    config = read_source_config(resolve_model(model))
    assert config is not None
    size = {"micro_batch": row["num_rows"], "seq_len": row["seq_len"]}

    found = trace(_job(config, method="full", checkpointing=False, **size, **strategy))

    assert found.traced is not None
    assert found.traced.peak_allocated_bytes == pytest.approx(row["allocated_bytes"], rel=0.01)
    assert found.traced.num_traced_layers < 6, "equal layers are extrapolated"
    assert found.operations is not None, "an operation was not understood"


def _peak(job: TraceJob) -> int:
    recording = record_job(job)
    assert recording.operations is not None, "an operation was not understood"
    sizes = [one.num_bytes for one in recording.allocations]
    return find_peak(sizes, recording.events)[0]


def test_recomputed_layers_dropout_and_evaluation_are_followed() -> None:
    config = tiny_config("arcee")
    sizes = {"micro_batch": 4, "seq_len": 512}

    kept = _peak(_job(config, checkpointing=False, lora_dropout=0.1, **sizes))
    job = _job(config, checkpointing=True, **sizes)
    recomputed = _peak(job.model_copy(update={"stages": ("eval", "generate")}))

    assert recomputed < kept


def test_compiled_layers_keep_less_under_autocast_too() -> None:
    config = tiny_config("arcee")
    cast = {"method": "full", "compute": "fp16", "weights": "fp32", "checkpointing": False}
    peaks = [
        _peak(
            TraceJob(
                config=config,
                strategy=Strategy(compile=is_compiled, micro_batch=4, seq_len=512, **cast),
                compute_capability=(7, 0),
                stages=(),
            )
        )
        for is_compiled in (True, False)
    ]

    assert peaks[0] < peaks[1]


def test_experts_that_leave_the_graph_are_said() -> None:
    config = tiny_config("ernie4_5_moe")
    job = _job(config, seq_len=32, lora_targets=("all-linear", "experts"))

    answer = worker._answer(job)

    assert answer.traced is None
    assert answer.problem == "its compiled layers are not one graph each"
