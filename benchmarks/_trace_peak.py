"""The traced peak of one job, and no more of a trace than that: for many jobs in a row."""

from __future__ import annotations

import os
import warnings
from typing import Any

from tightfit.core.errors import UserError
from tightfit.training.tracing.job import TraceJob

NUM_STEPS = 2
"""Optimizer state appears in the first, and the second is like all that follow."""
NUM_TENSORS = 12


def prepare_process() -> None:
    """No card, no hub, one thread: what the tracer's own process gets."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    warnings.simplefilter("ignore")


def trace_peak(job: dict[str, Any]) -> dict[str, Any]:
    """The tensors alive at the peak of the steps, or `problem`: why the job cannot be traced."""
    # Imported here: torch takes seconds, and the environment must be set before.
    from tightfit.training.tracing import trace
    from tightfit.training.tracing.trace import CannotTraceError

    trace.NUM_STEPS = NUM_STEPS
    try:
        return _trace(TraceJob.model_validate(job))
    except (CannotTraceError, UserError) as error:
        return {"problem": str(error)}
    except Exception as error:  # errors of a library are counted by name
        first = (str(error).strip().splitlines() or [""])[0]
        return {"problem": f"{type(error).__name__}: {first[:200]}"}


def _trace(job: TraceJob) -> dict[str, Any]:
    from tightfit.trace.caching_allocator import AllocatorSettings
    from tightfit.trace.recording import describe_peak
    from tightfit.training.tracing.trace import DepthTracer, replay_unlimited

    tracer = DepthTracer(job)
    recording = tracer.record(job.strategy.count_recomputed(tracer.num_layers))
    replayed = replay_unlimited(recording, AllocatorSettings())
    peak = describe_peak(recording)
    return {
        "traced_bytes": replayed.peak_allocated_bytes,
        "traced_reserved_bytes": replayed.peak_reserved_bytes,
        "stage": peak.stage,
        "op": peak.op,
        "components": peak.components,
        "tensors": [one.model_dump(mode="json") for one in peak.tensors[:NUM_TENSORS]],
    }
