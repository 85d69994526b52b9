"""Plans of preference objectives are traced by the step that will run."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.objectives import Objective
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.config import read_config
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search
from tightfit.trace.recording import Recording
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job
from tiny_configs import tiny_config

pytest.importorskip("peft", reason="pip install 'tightfit[train]'")

CARD = resolve_hardware("H100-SXM")
CONFIG = tiny_config("llama")
SPEC = read_config(CONFIG, name="llama", source="a tiny config")


STAGES = ("eval",)


def record(strategy: Any) -> Recording:
    job = TraceJob(config=CONFIG, strategy=strategy, compute_capability=(9, 0), stages=STAGES)
    return record_job(job)


@pytest.mark.parametrize(
    ("objective", "method"),
    [(Objective.DPO, "lora"), (Objective.IPO, "full"), (Objective.ORPO, "full")],
)
def test_the_first_plan_is_traced(objective: Objective, method: str) -> None:
    request = JobRequest(
        spec=SPEC, method=method, seq_len=32, effective_batch=4, fixed={"objective": objective}
    )
    [first, *_] = search(request, CARD).plans
    recording = record(first.strategy)
    assert recording.operations is not None, "an operation was not understood"
    assert {one.stage for one in recording.allocations} >= {"forward", "backward", "update", "eval"}


def count_products(recording: Recording) -> int:
    assert recording.operations is not None
    return sum(one.kind == "matmul" for one in recording.operations.walk())


def test_every_micro_batch_has_its_pass_for_the_divergence() -> None:
    """Also those that are recorded as copies of one that was run."""
    job: dict[str, Any] = {"objective": "kto", "loss": "fused", "micro_batch": 2, "seq_len": 32}
    request = JobRequest(spec=SPEC, method="lora", fixed={**job, "precompute_reference": True})
    [first, *_] = search(request, CARD).plans
    few, many = (
        count_products(record(first.strategy.model_copy(update={"grad_accum": number})))
        for number in (2, 6)
    )
    assert many == 3 * few
