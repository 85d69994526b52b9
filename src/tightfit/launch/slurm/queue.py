"""Jobs in Slurm's queue: submitted, looked up, cancelled, by Slurm's own commands."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError, InvalidInputError, UserError
from tightfit.hardware.commands import RunCommand, run_command
from tightfit.launch.slurm.environment import list_overruling
from tightfit.launch.slurm.rejections import explain_rejection

TIMEOUT_SECONDS = 60.0
"""A busy controller answers late, but it answers."""
_COLUMNS = (
    ("JobArrayID", 48),
    ("State", 24),
    ("RestartCnt", 12),
    ("Reason", 80),
    ("NodeList", 256),
)
_SQUEUE = ",".join(f"{name}:{width}" for name, width in _COLUMNS)
_SACCT = "JobID,State,ExitCode,NodeList,Reason"
_TEST_ONLY = 'sbatch --test-only "$1" 2>&1 || true'
"""sbatch tells what it found on stderr, whether it is good or bad."""
_BATCH_ID = re.compile(r"(\d+)(?:_(\d+))?")


class JobState(str, Enum):
    """What Slurm says of a job, its rarer words folded into these."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"

    @property
    def is_over(self) -> bool:
        """Whether the job will do nothing more, unless it is requeued by hand."""
        return self in _OVER


_OVER = {
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.PREEMPTED,
    JobState.NODE_FAIL,
    JobState.OUT_OF_MEMORY,
}
_FOLDED = {
    "CONFIGURING": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "SPECIAL_EXIT": JobState.REQUEUED,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "BOOT_FAIL": JobState.NODE_FAIL,
    "DEADLINE": JobState.TIMEOUT,
    "REVOKED": JobState.CANCELLED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job, or one task of an array."""

    job_id: str
    """Of the job as it was submitted: an array's tasks share it."""
    task: int | None
    state: JobState
    reason: str = ""
    """Why it waits, in Slurm's word; empty where there is nothing to tell."""
    nodes: str = ""
    """As Slurm writes host lists."""
    num_restarts: int = 0
    exit_code: int | None = None
    """128 + N for a job that signal N ended; None until it is over."""


def submit_script(path: Path, *, run: RunCommand = run_command) -> str:
    """Submit; returns the job's number."""
    try:
        said = run((*_unset(path), "sbatch", "--parsable", str(path)), TIMEOUT_SECONDS)
    except EnvironmentFaultError as fault:
        raise explain_rejection(fault.problem, fault) from fault
    job_id = said.strip().splitlines()[-1].partition(";")[0].strip() if said.strip() else ""
    if not job_id.isdecimal():
        raise EnvironmentFaultError(
            f"sbatch printed no job number but `{said.strip()[:80]}`.",
            remedy=f"see whether it was taken: squeue --me, or run by hand: sbatch {path}",
        )
    return job_id


def test_script(path: Path, *, run: RunCommand = run_command) -> str:  # noqa: PT028
    """What Slurm would do with the script, in its own words; a fault where it would refuse."""
    command = (*_unset(path), "sh", "-c", _TEST_ONLY, "sbatch", str(path))
    said = run(command, TIMEOUT_SECONDS)
    lines = [line.strip().removeprefix("sbatch: ") for line in said.splitlines() if line.strip()]
    told = next((line for line in lines if " to start at " in line), None)
    if told is not None:
        return told
    if not shutil.which("sbatch") and run is run_command:
        raise EnvironmentFaultError(
            "The command `sbatch` is not on this machine.", remedy="run this on a login node"
        )
    raise explain_rejection(lines[-1] if lines else "sbatch said nothing", None)


def _unset(path: Path) -> list[str]:
    """`env` for variables of this shell that would win over the script's own lines."""
    try:
        names = list_overruling(path.read_text("utf-8"), os.environ)
    except OSError:
        return []  # sbatch says what is wrong with it
    return ["env", *(f"--unset={name}" for name in names)] if names else []


test_script.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test by its name


def read_jobs(ids: Sequence[str], *, run: RunCommand = run_command) -> tuple[JobStatus, ...]:
    """Every job and array task of `ids`, in their order; UNKNOWN where Slurm has forgotten it."""
    if not ids:
        return ()
    wanted = [_check_id(text) for text in ids]
    found = _ask_squeue(wanted, run)
    gone = [text for text in wanted if not any(_is_of(text, status) for status in found)]
    if gone:
        found += _ask_sacct(gone, run)
    for text in gone:
        if not any(_is_of(text, status) for status in found):
            found += _ask_scontrol(text, run)
    return tuple(
        status
        for text in dict.fromkeys(wanted)
        for status in sorted(
            (status for status in found if _is_of(text, status)), key=lambda item: item.task or 0
        )
        or [JobStatus(job_id=text.partition("_")[0], task=None, state=JobState.UNKNOWN)]
    )


def find_queued(script: Path, *, run: RunCommand = run_command) -> tuple[str, str] | None:
    """Number and partition of this user's newest job from that file that is not over."""
    try:
        said = run(("squeue", "-h", "--me", "-o", "%A|%P|%o"), TIMEOUT_SECONDS)
    except UserError:
        return None  # whoever needs Slurm next says what is wrong with it
    rows = [line.strip().split("|", 2) for line in said.splitlines()]
    held = [(row[0], row[1]) for row in rows if row[0].isdecimal() and row[2:] == [str(script)]]
    return max(held, key=lambda job: int(job[0]), default=None)


def cancel_jobs(ids: Sequence[str], *, run: RunCommand = run_command) -> None:
    """End jobs, running or not; those that are over already are passed over by Slurm."""
    if ids:
        run(("scancel", *map(_check_id, ids)), TIMEOUT_SECONDS)


def parse_state(text: str) -> JobState:
    """`CANCELLED by 0`, `NODE_FAIL`, `COMPLETING` as one of ours."""
    words = text.strip().split()
    word = words[0].rstrip("+").upper() if words else ""
    if word in JobState.__members__:
        return JobState[word]
    return _FOLDED.get(word, JobState.UNKNOWN)


def parse_exit_code(text: str) -> int | None:
    """`75:0` is 75, `0:15` is 143."""
    code, _, signum = text.strip().partition(":")
    if not code.isdecimal():
        return None
    return 128 + int(signum) if signum.isdecimal() and int(signum) else int(code)


def _check_id(text: str) -> str:
    if not _BATCH_ID.fullmatch(text):
        raise InvalidInputError(
            f"`{text[:40]}` is not a job's number.", remedy="squeue --me    (lists yours)"
        )
    return text


def _is_of(wanted: str, status: JobStatus) -> bool:
    job_id, _, task = wanted.partition("_")
    return status.job_id == job_id and (not task or status.task == int(task))


def _ask_squeue(ids: Sequence[str], run: RunCommand) -> list[JobStatus]:
    """-r lists every task of an array; a job that has just ended is listed too, or unknown."""
    try:
        said = run(("squeue", "-h", "-r", "-j", ",".join(ids), "-O", _SQUEUE), TIMEOUT_SECONDS)
    except EnvironmentFaultError as fault:
        if "Invalid job id" in fault.problem:
            return []
        raise
    return [status for line in said.splitlines() if (status := _read_row(line)) is not None]


def _read_row(line: str) -> JobStatus | None:
    fields, at = [], 0
    for _, width in _COLUMNS:
        fields.append(line[at : at + width].strip())
        at += width
    name, state, restarts, reason, nodes = fields
    found = _BATCH_ID.fullmatch(name)
    if found is None:
        return None
    return JobStatus(
        job_id=found.group(1),
        task=None if found.group(2) is None else int(found.group(2)),
        state=parse_state(state),
        reason=_reason(reason),
        nodes="" if nodes == "(null)" else nodes,
        num_restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _ask_sacct(ids: Sequence[str], run: RunCommand) -> list[JobStatus]:
    """Accounting, where the site has it; it may lag behind the queue by seconds."""
    command = ("sacct", "-n", "-P", "-X", "-j", ",".join(ids), "-o", _SACCT)
    try:
        said = run(command, TIMEOUT_SECONDS)
    except UserError:
        return []
    found = []
    for line in said.splitlines():
        fields = line.split("|")
        name = _BATCH_ID.fullmatch(fields[0])
        if name is None or len(fields) < 5:
            continue
        state = parse_state(fields[1])
        found.append(
            JobStatus(
                job_id=name.group(1),
                task=None if name.group(2) is None else int(name.group(2)),
                state=state,
                reason=_reason(fields[4]),
                nodes="" if fields[3] == "None assigned" else fields[3],
                exit_code=parse_exit_code(fields[2]) if state.is_over else None,
            )
        )
    return found


def _ask_scontrol(job_id: str, run: RunCommand) -> list[JobStatus]:
    """The controller remembers a job for minutes after its end."""
    try:
        said = run(("scontrol", "-o", "show", "job", job_id), TIMEOUT_SECONDS)
    except UserError:
        return []
    return [status for line in said.splitlines() if (status := _read_shown(line)) is not None]


def _read_shown(line: str) -> JobStatus | None:
    held: dict[str, str] = dict(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line))
    state = parse_state(held.get("JobState", ""))
    job_id = held.get("ArrayJobId", held.get("JobId", ""))
    task = held.get("ArrayTaskId", "")
    if not job_id.isdecimal():
        return None
    return JobStatus(
        job_id=job_id,
        task=int(task) if task.isdecimal() else None,
        state=state,
        reason=_reason(held.get("Reason", "")),
        nodes="" if held.get("NodeList") == "(null)" else held.get("NodeList", ""),
        num_restarts=int(held["Restarts"]) if held.get("Restarts", "").isdecimal() else 0,
        exit_code=parse_exit_code(held.get("ExitCode", "")) if state.is_over else None,
    )


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A") else text
