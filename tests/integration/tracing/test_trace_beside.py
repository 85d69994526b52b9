"""Several jobs at once say what each says alone."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tightfit.trace.tracer import TraceResponse
from tightfit.training.tracing import worker
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


def _job(**strategy: Any) -> TraceJob:
    return TraceJob.model_validate(
        {
            "config": LLAMA,
            "strategy": {"micro_batch": 2, "seq_len": 32, **strategy},
            "compute_capability": (9, 0),
            "stages": (),
        }
    )


JOBS = [_job(method="full"), _job(offload="optimizer"), _job(checkpointing=False)]


def _timeless(answer: TraceResponse) -> dict[str, Any]:
    reported = answer.model_dump()
    if reported["traced"] is not None:
        assert reported["traced"].pop("seconds") > 0
    return reported


def test_answers_are_those_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [_timeless(one) for one in worker.answer_all(JOBS, num_cores=2)]
    answer, here = worker._answer, os.getpid()

    def elsewhere(job: TraceJob) -> TraceResponse:
        assert os.getpid() != here
        return answer(job)

    elsewhere.__qualname__ = "_answer"
    elsewhere.__module__ = worker.__name__
    monkeypatch.setattr(worker, "_answer", elsewhere)

    beside = [_timeless(one) for one in worker.answer_all(JOBS, num_cores=6)]

    assert beside == alone
    assert [bool(one["problem"]) for one in alone] == [False, True, False]
