"""Why a submitted job ended before its run did, and what to do about it."""

from __future__ import annotations

import shlex
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError, UserError
from tightfit.core.faults import printable
from tightfit.launch.outcome import read_lines
from tightfit.launch.slurm.queue import JobState, JobStatus
from tightfit.ledger.run_folder import RunFolder, RunState, RunStatus

NUM_LAST_CHARACTERS = 200


def explain_end(run: RunFolder, status: JobStatus, state: RunState | None) -> UserError:
    """The run's own words where it failed by itself, else Slurm's."""
    if state is not None and state.status is RunStatus.FAILED and state.problem:
        fault = UserError(
            state.problem, remedy=state.remedy or f"less {shlex.quote(str(run.log_path))}"
        )
        fault.exit_code = state.exit_code or UserError.exit_code
        return fault
    at = f" at step {state.step}" if state is not None and state.step else ""
    log = run.path / f"slurm-{status.job_id}.out"
    said = {
        JobState.CANCELLED: f"Job {status.job_id} was cancelled{at}.",
        JobState.TIMEOUT: f"Job {status.job_id} met its time limit{at} before it had saved.",
        JobState.NODE_FAIL: f"Job {status.job_id} lost its node{at}.",
        JobState.PREEMPTED: f"Job {status.job_id} was preempted{at}.",
        JobState.UNKNOWN: f"Slurm no longer knows job {status.job_id}.",
    }
    if status.state in said:
        again = (
            f"tightfit submit {shlex.quote(str(run.path))}    (goes on from the last checkpoint)"
        )
        return UserError(said[status.state], remedy=again)
    if status.state is JobState.OUT_OF_MEMORY:
        return EnvironmentFaultError(
            f"Job {status.job_id} took more host memory than it asked for{at}; Slurm ended it.",
            remedy="`slurm: extra: [--mem=0]` in site.yaml asks for all of a node's memory",
        )
    return EnvironmentFaultError(
        f"Job {status.job_id} ended{at} without a word from the run{_last_words(log)}",
        remedy=f"less {shlex.quote(str(log))}",
    )


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in read_lines(log, start=0) if line.strip()]
    return f": {printable(lines[-1], most=NUM_LAST_CHARACTERS)}" if lines else "."
