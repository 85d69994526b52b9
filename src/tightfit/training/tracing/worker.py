"""`python -m tightfit.training.tracing.worker`: traces jobs; one JSON line each in and out."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from tightfit.core.errors import UserError
from tightfit.core.with_parent import end_with_parent
from tightfit.hardware.machine import read_machine
from tightfit.runtime.libraries import fast_imports
from tightfit.trace.tracer import TraceResponse
from tightfit.training.tracing.job import TraceJob

CORES_PER_JOB = 3
"""A job traces up to three depths of its model at once."""


def main() -> None:
    """Write one response to standard output for each job on standard input.

    The argument is the pid of the process to end with.
    """
    if len(sys.argv) > 1:
        end_with_parent(int(sys.argv[1]))
    answers = _take_stdout()
    warnings.simplefilter("ignore")
    jobs = [TraceJob.model_validate(json.loads(line)) for line in sys.stdin]
    with fast_imports([job.strategy for job in jobs]):
        from tightfit.training.tracing.fake_kernels import import_libraries

        import_libraries()
    for answer in answer_all(jobs, num_cores=read_machine().num_usable_cores):
        answers.write(answer.model_dump_json() + "\n")
        answers.flush()
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
    from tightfit.training.tracing.trace import CannotTraceError, trace

    try:
        return trace(job)
    except CannotTraceError as error:
        return TraceResponse(problem=str(error))
    except UserError as error:
        return TraceResponse(problem=error.problem.rstrip("."), remedy=error.remedy)
    except Exception as error:  # a library's error must not end a plan: the closed form remains
        first = (str(error).strip().splitlines() or [""])[0]
        return TraceResponse(problem=_describe(type(error).__name__, first[:200]))


_VALUES_MISSING = ("DynamicOutputShapeException", "DataDependentOutputException")
"""torch's errors for an operation on fake tensors that depends on values."""


def _describe(kind: str, message: str) -> str:
    if kind in _VALUES_MISSING:
        return f"what {message or 'an operation'} allocates depends on values that a trace lacks"
    return f"it failed with {kind} ({message})" if message else f"it failed with {kind}"


def _take_stdout() -> TextIO:
    """Keep standard output for responses; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
