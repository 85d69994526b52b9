"""`python -m tightfit.training.tracing.worker`: traces jobs; one JSON line each in and out."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from tightfit.core.child_process import (
    end_with_parent,
    limit_data_bytes,
    open_output,
    read_messages,
)
from tightfit.core.errors import UserError
from tightfit.core.units import GIB
from tightfit.hardware.machine import read_machine
from tightfit.runtime.libraries import fast_imports
from tightfit.trace.tracer import TraceResponse
from tightfit.training.tracing.job import TraceJob

CORES_PER_JOB = 3
"""A job traces up to three depths of its model at once."""
MEMORY_LIMIT_BYTES = 8 * GIB
"""Of data, for each process: fake tensors hold none, and a trace takes half a GiB. A model that
makes real ones fails by itself, before the machine that it runs on does."""


def main() -> None:
    """Write one response to standard output for each job on standard input.

    The argument is the pid of the process to end with.
    """
    if len(sys.argv) > 1:
        end_with_parent(int(sys.argv[1]))
    limit_data_bytes(MEMORY_LIMIT_BYTES)
    send = open_output()
    warnings.simplefilter("ignore")
    jobs = [TraceJob.model_validate(message) for message in read_messages()]
    with fast_imports([job.strategy for job in jobs]):
        from tightfit.training.tracing.fake_kernels import import_libraries

        import_libraries()
    for answer in answer_all(jobs, num_cores=read_machine().num_usable_cores):
        send(answer.model_dump(mode="json"))
    os._exit(0)  # skips torch's slow teardown


def answer_all(jobs: Sequence[TraceJob], *, num_cores: int) -> Iterator[TraceResponse]:
    """The responses in the order of the jobs; several jobs in parallel if there are cores."""
    num_parallel = min(len(jobs), num_cores // CORES_PER_JOB)
    if num_parallel < 2:
        yield from map(_answer, jobs)
        return
    from tightfit.training.tracing.trace import fork_pool

    with fork_pool(num_parallel) as pool:
        yield from pool.map(_answer, jobs)


def _answer(job: TraceJob) -> TraceResponse:
    # Imported here: torch takes seconds, and a failing import must become a response.
    from tightfit.trace.compiled_layers import CannotCompile
    from tightfit.training.tracing.trace import CannotTraceError, trace

    try:
        return trace(job)
    except CannotTraceError as error:
        return TraceResponse(problem=str(error))
    except CannotCompile:
        return TraceResponse(problem="its compiled layers are not one graph each")
    except UserError as error:
        return TraceResponse(problem=error.problem.rstrip("."), remedy=error.remedy)
    except Exception as error:  # a library's error must not end a plan: the closed form remains
        kind = type(error).__name__
        first = (str(error).strip().splitlines() or [""])[0][:200]
        problem = f"it failed with {kind} ({first})" if first else f"it failed with {kind}"
        # torch's errors for an operation on fake tensors that depends on values.
        if kind in ("DynamicOutputShapeException", "DataDependentOutputException"):
            operation = first or "an operation"
            problem = f"what {operation} allocates depends on values that a trace lacks"
        return TraceResponse(problem=problem)


if __name__ == "__main__":
    main()
