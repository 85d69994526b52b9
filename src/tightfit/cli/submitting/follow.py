"""Following a submitted job: the queue, the steps as `train` shows them, the report, or why it
ended.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import typer

from tightfit.cli.exit_codes import EXIT_INTERRUPTED
from tightfit.cli.terminal.output import show_json, write_err, write_out
from tightfit.cli.terminal.run_display import Progress, open_display
from tightfit.cli.training.finish import find_artefact
from tightfit.clusters.local.outcome import read_lines
from tightfit.clusters.slurm.follow import SlurmFollower
from tightfit.clusters.slurm.queue import JobState, JobStatus, cancel_jobs, read_job_file, read_jobs
from tightfit.core.errors import SetupError, UserError
from tightfit.core.validation import printable
from tightfit.runs.report import parse_time
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

# Why a submitted job ended before its run did, and what to do about it.

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
        return SetupError(
            f"Job {status.job_id} took more host memory than it asked for{at}; Slurm ended it.",
            remedy="`slurm: extra: [--mem=0]` in site.yaml asks for all of a node's memory",
        )
    return SetupError(
        f"Job {status.job_id} ended{at} without a word from the run{_last_words(log)}",
        remedy=f"less {shlex.quote(str(log))}",
    )


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in read_lines(log, start=0) if line.strip()]
    return f": {printable(lines[-1], most=NUM_LAST_CHARACTERS)}" if lines else "."


SETTLE_SECONDS = 10.0
"""For a shared file system to show what the job wrote last."""
_ENDED = (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED)


def follow_job(run: RunFolder, job_id: str, *, as_json: bool) -> None:
    """Watch to the end and leave with the run's exit code; Ctrl-C asks what is to become of it."""
    is_cancelled = False
    while True:
        try:
            status = _watch(run, job_id, as_json=as_json)
            break
        except KeyboardInterrupt:
            if is_cancelled or not _ask_to_cancel(job_id):
                _leave(run, job_id)
            is_cancelled = True
            cancel_jobs([job_id])
    _end(run, status, as_json=as_json, is_cancelled=is_cancelled)


def is_active(job_id: str) -> bool:
    """Whether the job is queued or running."""
    status = read_jobs([job_id])[0]
    return not status.state.is_over and status.state is not JobState.UNKNOWN


def report_finished(run: RunFolder, *, as_json: bool) -> None:
    """There is nothing to submit."""
    artefact = find_artefact(run)
    if as_json:
        show_json(
            {
                "run": str(run.path),
                "artefact": None if artefact is None else str(artefact),
                "exit_code": 0,
                "notes": ["finished before; nothing was submitted"],
            }
        )
        return
    where = f"; the result is in {artefact}" if artefact is not None else ""
    write_out(f"{run.path} is finished{where}.\nTrain once more: add --again\n")


def _watch(run: RunFolder, job_id: str, *, as_json: bool) -> JobStatus:
    capacity = run.read_plan().estimate.gpu.capacity_bytes

    def read_num_steps() -> int:
        try:
            return run.read_state().num_steps
        except UserError:
            return 0

    progress = Progress(num_steps=read_num_steps(), capacity_bytes=capacity)
    with open_display(progress, read_num_steps=read_num_steps, is_silent=as_json) as display:
        return SlurmFollower(run, job_id, display).wait()


def _ask_to_cancel(job_id: str) -> bool:
    """Only a clear yes; where nobody can answer, the job is left alone."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    write_err(f"\nCancel job {job_id}? It saves first. [y/N] ")
    try:
        return input().strip().casefold() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def _leave(run: RunFolder, job_id: str) -> None:
    write_err(
        f"\njob {job_id} goes on without being watched; follow it again: "
        f"tightfit submit {shlex.quote(str(run.path))} --follow\n"
    )
    raise typer.Exit(EXIT_INTERRUPTED)


def _end(run: RunFolder, status: JobStatus, *, as_json: bool, is_cancelled: bool) -> None:
    state = _read_settled(run, status)
    is_good = state is not None and state.status in (RunStatus.FINISHED, RunStatus.STOPPED)
    fault = None if is_good else explain_end(run, status, state)
    code = fault.exit_code if fault is not None else (state and state.exit_code) or 0
    if is_cancelled:
        code, fault = EXIT_INTERRUPTED, None
    if fault is None or not as_json:
        _show(run, status, code=code, as_json=as_json)
    if fault is not None:
        raise fault
    if code:
        raise typer.Exit(code)


def _read_settled(run: RunFolder, status: JobStatus) -> RunState | None:
    """What the run says of itself, once the file system shows it."""
    ends = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            state: RunState | None = run.read_state()
        except UserError:
            state = None
        if state is not None and _is_stale(run, state):
            state = state.model_copy(update={"status": RunStatus.PREPARED})
        is_said = state is not None and state.status in _ENDED
        if is_said or status.state is not JobState.COMPLETED or time.monotonic() >= ends:
            return state
        time.sleep(0.5)


def _is_stale(run: RunFolder, state: RunState) -> bool:
    """Whether it is the word of an earlier start, which this job never came to replace."""
    job = read_job_file(run)
    begun = None if job is None else parse_time(job.submitted_at)
    said = parse_time(state.updated_at)
    if begun is None or said is None or state.status is RunStatus.FINISHED:
        return False
    return said < begun


def _show(run: RunFolder, status: JobStatus, *, code: int, as_json: bool) -> None:
    from tightfit.runs.report import make_report

    try:
        report = make_report(run)
    except UserError:
        return
    artefact = find_artefact(run)
    if as_json:
        show_json(
            {
                "run": str(run.path),
                "job_id": status.job_id,
                "job_state": status.state.value,
                "num_restarts": status.num_restarts,
                "artefact": None if artefact is None else str(artefact),
                "exit_code": code,
                "report": report.model_dump(mode="json"),
            }
        )
        return
    from tightfit.cli.render.train import show_end

    notes = [] if not status.num_restarts else [f"queued again {status.num_restarts} times"]
    show_end(report, folder=_short(run.path), artefact=artefact, notes=notes)


def _short(path: Path) -> Path:
    """As it is typed from here."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
