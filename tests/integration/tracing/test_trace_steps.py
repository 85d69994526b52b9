"""The step that a trace writes down again, beside the same step run for real."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import Recording
from tightfit.train.tracing import run
from tightfit.train.tracing.job import TraceJob

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
    "checkpointing": {"method": "lora"},
    "nf4": {"weights": "nf4"},
    "nf4-unpacked": {"weights": "nf4", "unpacked_base": True},
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


def _record(strategy: dict[str, Any]) -> Recording:
    job = TraceJob.model_validate(
        {
            "config": LLAMA,
            "strategy": {"micro_batch": 2, "seq_len": 32, **strategy},
            "compute_capability": (9, 0),
        }
    )
    return run.record_job(job, job.config)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the recorder said whenever it was to repeat a step."""
    said: list[bool] = []
    repeat = Recorder.repeat_step

    def listen(recorder: Recorder, since: int) -> bool:
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
    monkeypatch.setattr(run, "FIRST_STEADY", run.NUM_STEPS)

    assert _record(REPEATED[name]) == repeated
    assert answers == [True], "the second time all steps ran"


@pytest.mark.parametrize("name", RUN)
def test_a_step_that_prepares_the_next_is_run_again(name: str, answers: list[bool]) -> None:
    recording = _record(RUN[name])

    assert answers == [False]
    assert {one.step for one in recording.allocations} >= {1, 2, run.NUM_STEPS}
