"""Jobs in Slurm's queue: submitted, looked up and cancelled with Slurm's own commands.

slurm.json in a run folder names the job that the run was last submitted as.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import ValidationError

from tightfit.clusters.follow import follow_job
from tightfit.clusters.protocol import RunObserver
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.reading import read_bytes, read_text
from tightfit.hardware.command import RunCommand, run_command
from tightfit.runs.run_folder import RunFolder

_OPTION = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_OVERRIDES = {
    "account": ("ACCOUNT",),
    "array": ("ARRAY_INX",),
    "constraint": ("CONSTRAINT",),
    "gres": ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK"),
    "job-name": ("JOB_NAME",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "no-requeue": ("REQUEUE",),
    "open-mode": ("OPEN_MODE",),
    "output": ("OUTPUT",),
    "partition": ("PARTITION",),
    "qos": ("QOS",),
    "requeue": ("NO_REQUEUE",),
    "reservation": ("RESERVATION",),
    "signal": ("SIGNAL",),
    "time": ("TIMELIMIT",),
}
"""Options and the variables that win over them. Source: sbatch(1), input environment variables."""


def list_overriding(script: str, environ: Mapping[str, str]) -> list[str]:
    """Those that are set and contradict the script; what it leaves open they may set."""
    stated = _OPTION.findall(script)
    names = [f"SBATCH_{name}" for option in stated for name in _OVERRIDES.get(option, ())]
    return [name for name in dict.fromkeys(names) if name in environ]


# What sbatch says when it refuses a job, and what to do about it.

_SITE = "in ~/.config/tightfit/site.yaml"
_NOISE = re.compile(
    r"^(?:`sh`|`sbatch`) failed: |^sbatch: |^(?:error|fatal): |^Batch job submission failed: "
    r"|^allocation failure: "
)
_KNOWN: tuple[tuple[str, type[UserError], str], ...] = (
    ("policy", UsageError, "squeue --me    (what you hold already), or another --qos NAME"),
    (
        "account",
        UsageError,
        f"--account NAME, or `slurm: account:` {_SITE}    (sacctmgr show user $USER -s: yours)",
    ),
    ("qos", UsageError, f"--qos NAME, or `slurm: qos:` {_SITE}    (sacctmgr show qos)"),
    ("partition", NotFoundError, "sinfo -s    (partitions that there are), then --on slurm:NAME"),
    ("time limit", UsageError, "--time-limit HH:MM:SS within the partition's    (sinfo -s)"),
    ("feature", UsageError, "--constraint with a feature that nodes have    (sinfo -o '%N %f')"),
    ("reservation", UsageError, "--reservation NAME    (scontrol show reservation)"),
    ("gres", UsageError, "sinfo -o '%N %G'    (GPUs as this cluster calls them)"),
    ("memory", UsageError, "sinfo -o '%N %m'    (memory per node), then --nodes with more"),
    ("node configuration", UsageError, "sinfo -o '%N %P %G %c %m'    (what its nodes have)"),
    ("node count", UsageError, "--nodes with fewer, or another partition    (sinfo -s)"),
    ("controller", SetupError, "scontrol ping    (is Slurm up?), then the same again"),
    ("socket timed out", SetupError, "the same again in a minute; Slurm is busy"),
    ("limit", UsageError, "squeue --me    (what you hold already), then the same again"),
    ("script", UsageError, "the raw options in site.yaml (`slurm: extra:`) are the likely cause"),
)
"""A part of Slurm's sentence, the kind of error, and the remedy; the first that matches."""


def explain_rejection(output: str, error: UserError | None) -> UserError:
    """One message with a remedy for what Slurm output; `error` where no word of it is known."""
    reason = output.strip()
    while (shorter := _NOISE.sub("", reason)) != reason:
        reason = shorter
    if "not on this machine" in reason or "gave no answer" in reason:
        return SetupError(reason, remedy="run this on a login node of the cluster")
    text = reason.rstrip(".")
    for part, kind, remedy in _KNOWN:
        if part in text.casefold():
            return kind(f"Slurm refuses the job: {text}.", remedy=remedy)
    remedy = (
        "sbatch --test-only job.sbatch    (in the run's folder)" if error is None else error.remedy
    )
    return SetupError(f"Slurm refuses the job: {text}.", remedy=remedy)


# Jobs in Slurm's queue: submitted, looked up, cancelled, by Slurm's own commands.

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
"""sbatch reports both acceptance and refusal on stderr."""
_BATCH_ID = re.compile(r"(\d+)(?:_(\d+))?")


class JobState(str, Enum):
    """Slurm's states of a job, its rarer ones mapped to these."""

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
_RARE_STATES = {
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
    """Why it waits, in Slurm's word; empty where Slurm gives none."""
    nodes: str = ""
    """As Slurm writes host lists."""
    num_restarts: int = 0
    exit_code: int | None = None
    """128 + N for a job that signal N ended; None until it is over."""


def submit_script(path: Path, *, run: RunCommand = run_command) -> str:
    """Submit; returns the job's number."""
    try:
        output = run((*_unset(path), "sbatch", "--parsable", str(path)), TIMEOUT_SECONDS)
    except SetupError as error:
        raise explain_rejection(error.problem, error) from error
    job_id = output.strip().splitlines()[-1].partition(";")[0].strip() if output.strip() else ""
    if not job_id.isdecimal():
        raise SetupError(
            f"sbatch printed no job number but `{output.strip()[:80]}`.",
            remedy=f"see whether it was taken: squeue --me, or run by hand: sbatch {path}",
        )
    return job_id


def check_script(path: Path, *, run: RunCommand = run_command) -> str:
    """What Slurm would do with the script, in its own words; an error where it would refuse."""
    command = (*_unset(path), "sh", "-c", _TEST_ONLY, "sbatch", str(path))
    output = run(command, TIMEOUT_SECONDS)
    lines = [line.strip().removeprefix("sbatch: ") for line in output.splitlines() if line.strip()]
    start_line = next((line for line in lines if " to start at " in line), None)
    if start_line is not None:
        return start_line
    if not shutil.which("sbatch") and run is run_command:
        raise SetupError(
            "The command `sbatch` is not on this machine.", remedy="run this on a login node"
        )
    raise explain_rejection(lines[-1] if lines else "sbatch output nothing", None)


def _unset(path: Path) -> list[str]:
    """`env` for variables of this shell that would win over the script's own lines."""
    try:
        names = list_overriding(read_text(path), os.environ)
    except OSError:
        return []  # sbatch says what is wrong with it
    return ["env", *(f"--unset={name}" for name in names)] if names else []


def read_jobs(ids: Sequence[str], *, run: RunCommand = run_command) -> tuple[JobStatus, ...]:
    """Every job and array task of `ids`, in their order; UNKNOWN where Slurm has forgotten it."""
    if not ids:
        return ()
    wanted = [_check_id(text) for text in ids]
    found = [*_ask_squeue(wanted, run)]
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
        queued = list_queued(run=run)
    except UserError:
        return None  # whoever needs Slurm next says what is wrong with it
    found = [(job_id, partition) for job_id, partition, file in queued if file == str(script)]
    return max(found, key=lambda job: int(job[0]), default=None)


def list_queued(*, run: RunCommand = run_command) -> list[tuple[str, str, str]]:
    """Number, partition and script of each job of this user that is not over."""
    output = run(("squeue", "-h", "--me", "-o", "%A|%P|%o"), TIMEOUT_SECONDS)
    rows = [line.strip().split("|", 2) for line in output.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3 and row[0].isdecimal()]


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
    return _RARE_STATES.get(word, JobState.UNKNOWN)


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


def _ask_squeue(ids: Sequence[str], run: RunCommand) -> Iterator[JobStatus]:
    """-r lists every task of an array; a job that has just ended is listed too, or unknown."""
    try:
        output = run(("squeue", "-h", "-r", "-j", ",".join(ids), "-O", _SQUEUE), TIMEOUT_SECONDS)
    except SetupError as error:
        if "Invalid job id" in error.problem:
            return
        raise
    for line in output.splitlines():
        fields, at = [], 0
        for _, width in _COLUMNS:
            fields.append(line[at : at + width].strip())
            at += width
        name, state, restarts, reason, nodes = fields
        yield from _make_status(name, state, reason=reason, nodes=nodes, restarts=restarts)


def _ask_sacct(ids: Sequence[str], run: RunCommand) -> Iterator[JobStatus]:
    """Accounting, where the site has it; it may lag behind the queue by seconds."""
    command = ("sacct", "-n", "-P", "-X", "-j", ",".join(ids), "-o", _SACCT)
    try:
        output = run(command, TIMEOUT_SECONDS)
    except UserError:
        return
    for line in output.splitlines():
        fields = line.split("|")
        if len(fields) >= 5:
            name, state, code, nodes, reason = fields[:5]
            yield from _make_status(name, state, reason=reason, nodes=nodes, code=code)


def _ask_scontrol(job_id: str, run: RunCommand) -> Iterator[JobStatus]:
    """The controller remembers a job for minutes after its end."""
    try:
        output = run(("scontrol", "-o", "show", "job", job_id), TIMEOUT_SECONDS)
    except UserError:
        return
    for line in output.splitlines():
        fields: dict[str, str] = dict(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line))
        name = fields.get("ArrayJobId", fields.get("JobId", ""))
        if fields.get("ArrayTaskId", "").isdecimal():
            name += f"_{fields['ArrayTaskId']}"
        yield from _make_status(
            name,
            fields.get("JobState", ""),
            reason=fields.get("Reason", ""),
            nodes=fields.get("NodeList", ""),
            restarts=fields.get("Restarts", ""),
            code=fields.get("ExitCode", ""),
        )


_NOTHING = ("None", "(null)", "N/A", "None assigned")
"""Slurm's words for an empty field."""


def _make_status(
    name: str, state: str, *, reason: str, nodes: str, restarts: str = "", code: str = ""
) -> Iterator[JobStatus]:
    """One status; none for a line that names no job."""
    found = _BATCH_ID.fullmatch(name)
    if found is None:
        return
    parsed = parse_state(state)
    yield JobStatus(
        job_id=found[1],
        task=None if found[2] is None else int(found[2]),
        state=parsed,
        reason="" if reason in _NOTHING else reason,
        nodes="" if nodes in _NOTHING else nodes,
        num_restarts=int(restarts) if restarts.isdecimal() else 0,
        exit_code=parse_exit_code(code) if parsed.is_over else None,
    )


# A job followed to its end.

MAX_POLL_SECONDS = 10.0
NUM_LOOKS = 3
"""Times that an end must be seen where Slurm may yet queue the job again, or has lost sight."""
_UNSURE = (JobState.UNKNOWN, JobState.PREEMPTED, JobState.NODE_FAIL, JobState.REQUEUED)


def wait_for_job(
    run: RunFolder, job_id: str, observer: RunObserver, *, ask: RunCommand = run_command
) -> JobStatus:
    """The job's last status."""
    num_looks = 0

    def is_over(status: JobStatus) -> bool:
        nonlocal num_looks
        if not status.state.is_over and status.state not in _UNSURE:
            num_looks = 0
            return False
        num_looks += 1
        return num_looks >= (NUM_LOOKS if status.state in _UNSURE else 1)

    causes: dict[int, list[str]] = {}
    """What was found for each restart, until something was: accounting lags behind the queue."""
    last_nodes = ""

    def describe(status: JobStatus) -> dict[str, str]:
        nonlocal last_nodes
        count = status.num_restarts
        found = causes.setdefault(count, [])
        if count and not any(found) and len(found) < NUM_CAUSE_LOOKS:
            log = run.path / f"slurm-{job_id}.out"
            found.append(find_restart_cause(status, log, last_nodes, run=ask))
        if status.state is JobState.RUNNING:
            last_nodes = status.nodes
        texts = {"job": describe_status(status)}
        if any(found):
            texts = {"restart": f"job {job_id}, restart {count}: {found[-1]}", **texts}
        return texts

    return follow_job(
        lambda: read_jobs([job_id], run=ask)[0],
        run,
        observer,
        is_over=is_over,
        describe=describe,
        max_poll_seconds=MAX_POLL_SECONDS,
    )


NUM_CAUSE_LOOKS = 6
_CAUSES = {
    JobState.NODE_FAIL: "its node was lost",
    JobState.PREEMPTED: "it was preempted",
    JobState.TIMEOUT: "it met its time limit",
    JobState.OUT_OF_MEMORY: "it took more host memory than it asked for",
}
_SAID = (
    ("DUE TO PREEMPTION", _CAUSES[JobState.PREEMPTED]),
    ("DUE TO NODE FAILURE", _CAUSES[JobState.NODE_FAIL]),
    ("DUE TO TIME LIMIT", _CAUSES[JobState.TIMEOUT]),
    ("the time limit is near", "its time limit was near, and it had saved"),
)
"""What slurmstepd and the batch script write into the job's log, the likelier cause first."""
_BACK = re.compile(r"ended with (\d+): back to the queue \(restart (\d+) of")


def find_restart_cause(
    status: JobStatus, log: Path, last_nodes: str, *, run: RunCommand = run_command
) -> str:
    """Why the job's start before this one ended; empty where nothing says so.

    By accounting; where a site has none or the script itself asked for the restart, by the job's
    log; else by the state of the nodes that it was seen on.
    """
    earlier = [
        (state, nodes)
        for state, nodes in _list_starts(status.job_id, run)
        if state.is_over or state is JobState.REQUEUED
    ][: status.num_restarts]
    if len(earlier) == status.num_restarts and earlier[-1][0] in _CAUSES:
        state, nodes = earlier[-1]
        return f"{_CAUSES[state]} ({nodes})" if nodes else _CAUSES[state]
    cause = _find_logged_cause(log, status.num_restarts)
    if cause or not last_nodes:
        return cause
    try:
        states = run(("sinfo", "-h", "-n", last_nodes, "-o", "%N %T"), TIMEOUT_SECONDS)
    except UserError:
        return ""
    down = [line.split()[0] for line in states.splitlines() if " down" in line]
    return f"{_CAUSES[JobState.NODE_FAIL]} ({down[0]})" if down else ""


def _list_starts(job_id: str, run: RunCommand) -> list[tuple[JobState, str]]:
    """State and nodes of every start of the job, the oldest first."""
    command = ("sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "Submit,State,NodeList")
    try:
        rows = [line.split("|") for line in run(command, TIMEOUT_SECONDS).splitlines()]
    except UserError:
        return []
    rows = sorted(row for row in rows if len(row) == 3)  # Submit is that of the start
    return [(parse_state(state), "" if nodes in _NOTHING else nodes) for _, state, nodes in rows]


def _find_logged_cause(log: Path, num_restarts: int) -> str:
    """By the log's lines since the restart before."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    since = 0
    code = ""
    for number, line in enumerate(lines):
        asked = _BACK.search(line)
        if asked is not None and int(asked[2]) < num_restarts:
            since = number + 1
        elif asked is not None and int(asked[2]) == num_restarts:
            lines, code = lines[:number], asked[1]
            break
    text = "\n".join(lines[since:])
    said = (cause for words, cause in _SAID if words in text)
    return next(said, f"it ended with exit code {code}" if code else "")


def describe_status(status: JobStatus) -> str:
    """`job 12 waits (Resources)`, `job 12 runs on gpu[01-02]`."""
    why = f" ({status.reason})" if status.reason else ""
    texts = {
        JobState.PENDING: f" waits{why}",
        JobState.RUNNING: f" runs on {status.nodes or 'its nodes'}",
        JobState.COMPLETING: " is ending",
        JobState.UNKNOWN: " is not known to Slurm",
    }
    text = texts.get(status.state, f": {status.state.value.lower().replace('_', ' ')}")
    has_count = status.num_restarts and status.state is not JobState.COMPLETING
    return f"job {status.job_id}{text}" + (f", restart {status.num_restarts}" if has_count else "")


# slurm.json in a run folder: the job that it was last submitted as.

JOB_FILE = "slurm.json"
LOCK_FILE = "submit.lock"
"""Held between looking for the run's job and noting a new one."""


class SubmittedJob(Frozen):
    """By it the job is found again, from another terminal or another day."""

    job_id: str
    partition: str
    submitted_at: str
    """UTC, ISO 8601."""


def read_job_file(run: RunFolder) -> SubmittedJob | None:
    """None where the run was never submitted."""
    try:
        return SubmittedJob.model_validate_json(read_bytes(run.path / JOB_FILE))
    except (OSError, ValidationError):
        return None


def write_job_file(run: RunFolder, job: SubmittedJob) -> None:
    write_atomic(run.path / JOB_FILE, job.model_dump_json(indent=2) + "\n")
