"""The tracer's process: jobs come in as lines of JSON, answers go out as lines of JSON."""

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
from tightfit.train.tracing.job import TraceJob

CORES_PER_JOB = 3
"""A job traces up to three depths of its model at once."""


def main() -> None:
    """Answer every line of standard input on what standard output was at the start.

    The argument is the process to end with; without one it ends by itself.
    """
    if len(sys.argv) > 1:
        end_with_parent(int(sys.argv[1]))
    answers = _take_stdout()
    warnings.simplefilter("ignore")
    jobs = [TraceJob.model_validate(json.loads(line)) for line in sys.stdin]
    with fast_imports([job.strategy for job in jobs]):
        from tightfit.train.tracing.fake_kernels import import_libraries

        import_libraries()
    for answer in answer_all(jobs, num_cores=read_machine().num_usable_cores):
        answers.write(answer.model_dump_json() + "\n")
        answers.flush()
    os._exit(0)  # taking torch down in order takes longer than it is worth


def answer_all(jobs: Sequence[TraceJob], *, num_cores: int) -> Iterator[TraceResponse]:
    """In the order of the jobs, each as soon as it is there; several at once where cores allow."""
    num_beside = min(len(jobs), num_cores // CORES_PER_JOB)
    if num_beside < 2:
        yield from map(_answer, jobs)
        return
    from tightfit.train.tracing.trace import fork_pool

    with fork_pool(num_beside) as beside:
        yield from beside.map(_answer, jobs)


def _answer(job: TraceJob) -> TraceResponse:
    # Imported here: torch takes seconds, and what fails must become an answer.
    from tightfit.train.tracing.trace import CannotTraceError, trace

    try:
        return trace(job)
    except CannotTraceError as error:
        return TraceResponse(problem=str(error))
    except UserError as error:
        return TraceResponse(problem=error.problem.rstrip("."), remedy=error.remedy)
    except Exception as error:  # the closed form still stands: no fault of a library may end a plan
        first = (str(error).strip().splitlines() or [""])[0]
        return TraceResponse(problem=_describe(type(error).__name__, first[:200]))


_VALUES_MISSING = ("DynamicOutputShapeException", "DataDependentOutputException")
"""torch's, where an operation on fake tensors asks what only real values tell."""


def _describe(kind: str, said: str) -> str:
    if kind in _VALUES_MISSING:
        return f"what {said or 'an operation'} allocates follows from values that a trace lacks"
    return f"it failed with {kind} ({said})" if said else f"it failed with {kind}"


def _take_stdout() -> TextIO:
    """Keep standard output for answers; libraries that print do it elsewhere."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
