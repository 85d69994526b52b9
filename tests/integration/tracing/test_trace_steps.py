"""Steps and micro-batches that a trace writes down again, beside the same ones run for real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tightfit.trace import recorder
from tightfit.trace.recorder import Recorder, RecorderPosition
from tightfit.trace.recording import Allocation, Recording
from tightfit.trace.result import Operation
from tightfit.training.step import train_step
from tightfit.training.tracing import trace
from tightfit.training.tracing.job import TraceJob

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 64,
}
_FULL = {"method": "full"}
REPEATED: dict[str, dict[str, Any]] = {
    "lora": {"checkpointing": False},
    "nf4": {"weights": "nf4"},
    "packed": {"packing": True},
    "full": _FULL,
    "foreach": {**_FULL, "optimizer": "adamw-foreach", "grad_accum": 2},
    "adafactor": {**_FULL, "optimizer": "adafactor"},
    "8bit": {**_FULL, "optimizer": "adamw-8bit"},
    "fsdp": {**_FULL, "sharding": "fsdp", "gpus_per_node": 4},
    "zero2": {**_FULL, "sharding": "zero2", "gpus_per_node": 2},
}
RUN: dict[str, dict[str, Any]] = {
    "ddp": {**_FULL, "sharding": "ddp", "gpus_per_node": 2},  # makes new buckets after a step
    "zero3": {**_FULL, "sharding": "zero3", "gpus_per_node": 2},  # gathers ahead for the next
}


def _make_job(strategy: dict[str, Any]) -> TraceJob:
    return TraceJob.model_validate(
        {
            "config": LLAMA,
            "strategy": {"micro_batch": 2, "seq_len": 32, **strategy},
            "compute_capability": (9, 0),
            "stages": (),
        }
    )


def _record(strategy: dict[str, Any]) -> Recording:
    job = _make_job(strategy)
    return trace.record_job(job)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the recorder said whenever it was to repeat a step."""
    said: list[bool] = []
    repeat = Recorder.repeat_step

    def listen(recorder: Recorder, since: RecorderPosition) -> bool:
        said.append(repeat(recorder, since))
        return said[-1]

    monkeypatch.setattr(Recorder, "repeat_step", listen)
    return said


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_step_is_the_one_that_would_have_run(
    name: str, answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = _record(REPEATED[name])
    assert answers == [True]
    monkeypatch.setattr(trace, "FIRST_STEADY_STEP", trace.NUM_STEPS)

    assert _record(REPEATED[name]) == repeated
    assert answers == [True], "the second time all steps ran"


@pytest.mark.parametrize("name", RUN)
def test_a_step_that_prepares_the_next_is_run_again(name: str, answers: list[bool]) -> None:
    recording = _record(RUN[name])

    assert answers == [False]
    assert {one.step for one in recording.allocations} >= {1, 2, trace.NUM_STEPS}


ACCUMULATED: dict[str, dict[str, Any]] = {
    **{name: REPEATED[name] for name in ("nf4", "full", "zero2")},
    **RUN,
    "fused-loss": {"loss": "fused", "fused_kernels": True, "fused_lora": True},
    "fsdp-lora": {"sharding": "fsdp", "gpus_per_node": 2},
}
NUM_MICRO_BATCHES = 4
SMALLEST_BLOCK = 512
"""Bytes of torch's allocator that a loss takes."""
SUMS = ("stack", "cat", "unsqueeze", "sum")
"""Of the losses, at a step's end: of as many numbers as micro-batches were run."""


@pytest.mark.parametrize("name", ACCUMULATED)
def test_micro_batches_that_are_not_run_are_noted_as_if_they_were(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = {**ACCUMULATED[name], "grad_accum": NUM_MICRO_BATCHES}
    short = _record(strategy)
    monkeypatch.setattr(trace, "count_traced_micro_batches", lambda strategy: strategy.grad_accum)

    whole = _record(strategy)

    assert short.events == whole.events
    assert _without_sums(short.allocations) == _without_sums(whole.allocations)
    assert short.operations is not None
    assert whole.operations is not None
    assert [_name_work(one) for one in short.operations.walk()] == [
        _name_work(one) for one in whole.operations.walk()
    ]


def _without_sums(allocations: Sequence[Allocation]) -> list[Allocation]:
    names = [f"aten.{name}.default" for name in SUMS]
    return [one for one in allocations if one.stage != "update" or one.op not in names]


def _name_work(one: Operation) -> Operation | str:
    is_sum = one.stage == "update" and one.name in [f"aten::{name}" for name in SUMS]
    return one.name if is_sum else one


def test_repeating_micro_batches_is_what_makes_it_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a step has, two are run; of several ranks three."""
    num_run: list[int] = []

    def count(engine: Any, batches: Sequence[Any], **numbers: Any) -> Any:
        num_run.append(len(batches))
        return train_step(engine, batches, **numbers)

    monkeypatch.setattr(trace, "train_step", count)
    for strategy in ({"checkpointing": False}, ACCUMULATED["fsdp-lora"]):
        _record({**strategy, "grad_accum": 64})

    assert set(num_run) == {2, 3}


@pytest.mark.parametrize("name", ["nf4", "fsdp-lora"])
def test_many_micro_batches_take_what_a_few_take(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocations of a few are noted; those of all would say the same."""
    job = _make_job({**ACCUMULATED[name], "grad_accum": 24})
    few = trace.trace(job)
    monkeypatch.setattr(recorder, "MOST_REPEATED", 24)

    every = trace.trace(job)

    assert few.operations == every.operations
    assert few.traced is not None
    assert every.traced is not None
    assert few.traced.peak_reserved_bytes == every.traced.peak_reserved_bytes
    assert few.traced.smallest_capacity_bytes == every.traced.smallest_capacity_bytes
    more = every.traced.peak_allocated_bytes - few.traced.peak_allocated_bytes
    assert 0 <= more <= 24 * SMALLEST_BLOCK, "the losses alone"
