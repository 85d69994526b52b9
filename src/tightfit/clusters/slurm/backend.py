"""Slurm behind the cluster protocol."""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path

from tightfit.clusters.local.outcome import read_lines, read_state, run_error
from tightfit.clusters.protocol import (
    ClusterBackend,
    ClusterOptions,
    Draft,
    Job,
    JobEnd,
    JobSpec,
    RunObserver,
)
from tightfit.clusters.site import Site
from tightfit.clusters.slurm.options import SlurmOptions
from tightfit.clusters.slurm.queue import (
    LOCK_FILE,
    JobState,
    JobStatus,
    SubmittedJob,
    cancel_jobs,
    check_script,
    find_queued,
    list_queued,
    read_job_file,
    read_jobs,
    submit_script,
    wait_for_job,
    write_job_file,
)
from tightfit.clusters.slurm.script import (
    SCRIPT_FILE,
    GpuRequest,
    JobResources,
    find_gpu_request,
    find_resources,
    make_batch_job,
    round_minutes,
    select_nodes,
    write_script,
)
from tightfit.core.errors import NotFoundError, SetupError, UsageError, UserError
from tightfit.core.files import locked_file, temporary_folder, write_atomic
from tightfit.core.text import printable, shorten
from tightfit.core.units import parse_time_limit, render_seconds
from tightfit.hardware.inventory import Inventory, plannable_cluster
from tightfit.hardware.machine import NETWORK_FILE_SYSTEMS, find_file_system
from tightfit.hardware.slurm import probe_slurm_inventory
from tightfit.hardware.types import Cluster
from tightfit.runs.report import parse_time
from tightfit.runs.run_folder import (
    RunFolder,
    RunState,
    RunStatus,
)

SETTLE_SECONDS = 10.0
"""For a shared file system to show what the job wrote last."""
NUM_LAST_CHARACTERS = 200
_ENDED = (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED)


class SlurmBackend(ClusterBackend):
    """Batch jobs by Slurm's own commands; `slurm.json` in a run folder names its job."""

    title = "Slurm"
    takes = frozenset(field.name for field in fields(SlurmOptions))
    other_options = "leave it out    (--dry-run shows the batch script)"

    def __init__(self, options: ClusterOptions, site: Site) -> None:
        text = self._limit_text = options.time_limit
        stated = self._stated_seconds = None if text is None else parse_time_limit(text)
        if text is not None and stated is None:
            raise UsageError(f"`--time-limit {text}` is no limit.", remedy="--time-limit 12:00:00")
        self._limit_seconds = None if stated is None else round_minutes(stated)
        self._site = _override(site, options)
        self._partition = options.target or site.slurm.partition
        self._inventory: Inventory | None = None
        self._notes: tuple[str, ...] = ()
        """On options of the site that the plan does not follow."""

    def inventory(self) -> Cluster:
        return plannable_cluster(self._probe())

    def _probe(self) -> Inventory:
        if self._inventory is None:
            found = probe_slurm_inventory(self._partition)
            self._inventory, self._notes = select_nodes(found, self._site.slurm)
        return self._inventory

    def check_files(self, files: Mapping[str, Path]) -> list[str]:
        if is_this_machine(node.name for node in self._probe().nodes):
            return []
        return check_shared({what: path.absolute() for what, path in files.items()}, self._site)

    def find_job(self, run: RunFolder) -> Job | None:
        """Also one of `sbatch job.sbatch` by hand, and one whose submitter died."""
        noted = read_job_file(run)
        if noted is not None:
            state = read_jobs([noted.job_id])[0].state
            if not state.is_over and state is not JobState.UNKNOWN:
                return _make_job(run, noted.job_id, noted.partition)
        script = run.path / SCRIPT_FILE
        found = find_queued(script) if script.exists() else None
        if found is None:
            return None
        _note(run, *found)
        return _make_job(run, *found)

    def find_last_job(self, run: RunFolder) -> Job | None:
        noted = read_job_file(run)
        return None if noted is None else _make_job(run, noted.job_id, noted.partition)

    def find_job_by_id(self, job_id: str) -> Job | None:
        state = read_jobs([job_id])[0].state
        if state is JobState.UNKNOWN:
            raise NotFoundError(
                f"Slurm knows no job {job_id}.", remedy="squeue --me    (lists yours)"
            )
        if state.is_over:
            return None
        for queued_id, partition, script in list_queued():
            run = RunFolder(path=Path(script).parent)
            if queued_id == job_id and Path(script).name == SCRIPT_FILE and run.is_run():
                return _make_job(run, job_id, partition)
        raise UsageError(
            f"Job {job_id} is not a run that you submitted with tightfit.",
            remedy=f"scancel {job_id}    (ends it all the same)",
        )

    def draft(self, spec: JobSpec) -> Draft:
        assert spec.group is not None
        longest, limit = spec.group.max_seconds, self._limit_seconds
        if limit is not None and longest is not None and limit > longest:
            raise UsageError(
                f"`--time-limit {self._limit_text}` exceeds the limit of {spec.group.name}, "
                f"{render_seconds(longest)}.",
                remedy="leave it out; at the partition's limit the job saves and is queued again",
            )
        partition = spec.group.name.partition("/")[0]
        resources = find_resources(
            spec.plan,
            max_seconds=longest,
            asked_seconds=limit,
            warn=self._site.slurm.warn_seconds,
        )
        gpu = GpuRequest()
        if not spec.plan.hardware.node.gpu.is_cpu:
            gpu = find_gpu_request(
                self._probe(),
                partition=partition,
                gpu_name=spec.plan.hardware.node.gpu.name,
                gpus_per_node=spec.plan.strategy.gpus_per_node,
            )
        job = make_batch_job(spec, self._site, partition=partition, gpu=gpu, resources=resources)
        script = write_script(job, self._site)
        return Draft(
            spec=spec,
            title="Batch script",
            text=script,
            file_name=SCRIPT_FILE,
            notes=(
                *self._notes,
                *self._note_rounding(),
                *_note_slices(resources, can_requeue=spec.can_requeue),
            ),
            details={"script": script, "num_slices": resources.num_slices},
        )

    def _note_rounding(self) -> list[str]:
        """Two numbers are minutes and seconds to Slurm, where many mean hours and minutes."""
        stated, limit = self._stated_seconds, self._limit_seconds
        if stated is None or limit is None or stated == limit:
            return []
        return [
            f"`--time-limit {self._limit_text}` is {render_seconds(stated)} to Slurm, which counts "
            f"whole minutes: {render_seconds(limit)}. Hours are HH:MM:SS."
        ]

    def check(self, draft: Draft) -> str | None:
        with temporary_folder() as folder:
            script = folder / SCRIPT_FILE
            script.write_text(draft.text)
            try:
                return check_script(script)
            except SetupError as error:
                return error.problem

    def submit(self, draft: Draft) -> Job:
        assert draft.spec.group is not None
        run = RunFolder(path=draft.spec.run)
        path = run.path / SCRIPT_FILE
        partition = draft.spec.group.name.partition("/")[0]
        # Two submitters of one run: the second finds the first one's job in the queue.
        with locked_file(run.path / LOCK_FILE, wait_seconds=None, is_required=False):
            if find_queued(path) is not None:
                raise UsageError(
                    f"The same recipe is queued or running already, in {run.path}.",
                    remedy=f"tightfit submit {shlex.quote(str(run.path))}    (follows it)",
                )
            write_atomic(path, draft.text)
            job_id = submit_script(path)
            _note(run, job_id, partition)
        return _make_job(run, job_id, draft.spec.group.name)

    def follow(self, job: Job, observer: RunObserver) -> JobEnd:
        assert job.run is not None
        status = wait_for_job(job.run, job.job_id, observer)
        state = _read_settled(job.run, status)
        is_good = state is not None and state.status in (RunStatus.FINISHED, RunStatus.STOPPED)
        error = None if is_good else explain_end(job.run, status, state)
        code = error.exit_code if error is not None else (state and state.exit_code) or 0
        return JobEnd(
            state=status.state.value,
            exit_code=code,
            error=error,
            num_restarts=status.num_restarts,
            details={"job_id": status.job_id, "num_restarts": status.num_restarts},
        )

    def cancel(self, job: Job) -> None:
        cancel_jobs([job.job_id])


def _override(site: Site, options: ClusterOptions) -> Site:
    """Options win over site.yaml, and must meet its rules: only features may hold spaces."""
    given = {name: getattr(options, name) for name in SlurmBackend.takes}
    stated = {name: value for name, value in given.items() if value is not None}
    for name, value in stated.items():
        is_word = name == "constraint" or not re.search(r"[\s'\"#]", value)
        if not value.isprintable() or not is_word:
            raise UsageError(
                f"`--{name} {shorten(value)}` is more than one word.",
                remedy=f"--{name} NAME, without spaces, quotes or line breaks",
            )
    return site.model_copy(update={"slurm": site.slurm.model_copy(update=stated)})


def _note(run: RunFolder, job_id: str, partition: str) -> None:
    now = datetime.now(timezone.utc).isoformat()
    write_job_file(run, SubmittedJob(job_id=job_id, partition=partition, submitted_at=now))


def _make_job(run: RunFolder, job_id: str, group: str) -> Job:
    script = run.path / SCRIPT_FILE
    folder = shlex.quote(str(run.path))
    return Job(
        job_id=job_id,
        label=f"job {job_id}",
        run=run,
        title=f"Submitted as job {job_id} to {group}",
        commands=(
            f"tightfit submit {folder} --follow    (follows it again)",
            f"squeue -j {job_id}; scancel {job_id}    (ends it; it saves first)",
            f"less {shlex.quote(str(script))}    (what was submitted)",
        ),
        cancel_command=f"scancel {job_id}",
        details={"job_id": job_id, "script": str(script)},
    )


def _note_slices(resources: JobResources, *, can_requeue: bool) -> tuple[str, ...]:
    """A note where the run is longer than one job may be."""
    if resources.num_slices == 1 or resources.seconds is None:
        return ()
    limit = render_seconds(resources.seconds)
    note = f"It will probably not end within {limit}: it then saves and stops, and the same "
    note += "command goes on (--requeue does so by itself)."
    if can_requeue:
        note = f"At a time limit of {limit} it will take about {resources.num_slices} slices: "
        note += "each saves, goes back to the queue and resumes."
    return (note,)


def _read_settled(run: RunFolder, status: JobStatus) -> RunState | None:
    """The run's state, once the file system shows it."""
    ends = time.monotonic() + SETTLE_SECONDS
    while True:
        state = read_state(run)
        if state is not None and _is_stale(run, state):
            state = state.model_copy(update={"status": RunStatus.PREPARED})
        has_ended = state is not None and state.status in _ENDED
        if has_ended or status.state is not JobState.COMPLETED or time.monotonic() >= ends:
            return state
        time.sleep(0.5)


def _is_stale(run: RunFolder, state: RunState) -> bool:
    """Whether an earlier start wrote the state, and this job never replaced it."""
    job = read_job_file(run)
    submitted = None if job is None else parse_time(job.submitted_at)
    updated = parse_time(state.updated_at)
    if submitted is None or updated is None or state.status is RunStatus.FINISHED:
        return False
    return updated < submitted


def explain_end(run: RunFolder, status: JobStatus, state: RunState | None) -> UserError:
    """Why the job ended before its run did: the run's own error, else Slurm's reason."""
    if state is not None and state.status is RunStatus.FAILED and state.problem:
        return run_error(state, remedy=f"less {shlex.quote(str(run.log_path))}")
    at = f" at step {state.step}" if state is not None and state.step else ""
    reasons = {
        JobState.CANCELLED: f"Job {status.job_id} was cancelled{at}.",
        JobState.TIMEOUT: f"Job {status.job_id} met its time limit{at} before it had saved.",
        JobState.NODE_FAIL: f"Job {status.job_id} lost its node{at}.",
        JobState.PREEMPTED: f"Job {status.job_id} was preempted{at}.",
        JobState.UNKNOWN: f"Slurm no longer knows job {status.job_id}.",
    }
    if status.state in reasons:
        again = (
            f"tightfit submit {shlex.quote(str(run.path))}    (goes on from the last checkpoint)"
        )
        return UserError(reasons[status.state], remedy=again)
    if status.state is JobState.OUT_OF_MEMORY:
        return SetupError(
            f"Job {status.job_id} took more host memory than it asked for{at}; Slurm ended it.",
            remedy="`slurm: extra: [--mem=0]` in site.yaml asks for all of a node's memory",
        )
    log = run.path / f"slurm-{status.job_id}.out"
    lines = [line.strip() for line in read_lines(log, start=0) if line.strip()]
    last = f": {printable(lines[-1], most=NUM_LAST_CHARACTERS)}" if lines else "."
    return SetupError(
        f"Job {status.job_id} ended{at} without a message from the run{last}",
        remedy=f"less {shlex.quote(str(log))}",
    )


# Whether the nodes see a job's files, as far as that shows from here.

OWN_KINDS = frozenset(
    {"tmpfs", "ramfs", "devtmpfs", "overlay", "aufs", "squashfs", "proc", "sysfs", "cgroup",
     "cgroup2", "devpts"}
)  # fmt: skip
"""In a machine's memory, in its kernel or in a container: no other machine sees them."""
OWN_FOLDERS = tuple(map(Path, ("/tmp", "/var/tmp", "/dev", "/run", "/proc", "/sys")))
"""Every machine has its own, whatever disk they are on."""


def check_shared(places: Mapping[str, Path], site: Site) -> list[str]:
    """Refuse a place that other machines cannot see; a note on those that may be seen or not.

    `places` are by what they hold: `The run folder`. What lies in `runs` or `shared` of site.yaml
    is shared by the site's own word. A disk of this machine may well be exported to all others,
    which does not show here.
    """
    stated = [Path(path).expanduser() for path in (site.runs, *site.shared) if path is not None]
    unsure = []
    for what, path in places.items():
        kind = find_file_system(path)
        if kind in NETWORK_FILE_SYSTEMS or _is_inside(path, stated):
            continue
        if kind in OWN_KINDS or _is_inside(path, OWN_FOLDERS):
            why = "in a folder that every machine has of its own"
            if kind in OWN_KINDS:
                why = f"on a {kind} of this machine"
            remedy = "move it to a shared file system"
            if what == "The run folder":
                remedy = "--output FOLDER on a shared file system, or `runs:` in site.yaml"
            raise NotFoundError(
                f"No node would see {what.lower()} {path}: it lies {why}.",
                remedy=f"{remedy}    (where every node does see it: `shared:` in site.yaml)",
            )
        unsure.append(f"{what.lower()} {path}")
    if not unsure:
        return []
    return [
        f"Every node must see {' and '.join(unsure)}, which cannot be seen from here; to try it: "
        "tightfit preflight --on slurm:PARTITION --shared FOLDER. Where they do, `runs:` or "
        "`shared:` in site.yaml says so; where not, --output names another folder."
    ]


def is_this_machine(nodes: Iterable[str]) -> bool:
    """Whether the cluster is this machine alone, which sees all of its own files."""
    return {name.partition(".")[0].casefold() for name in (*nodes, socket.gethostname())} == {
        socket.gethostname().partition(".")[0].casefold()
    }


def _is_inside(path: Path, roots: Iterable[Path]) -> bool:
    """By the names as they are given and by where links lead."""
    place = path.resolve()
    return any(
        place.is_relative_to(root.resolve()) or path.absolute().is_relative_to(root.absolute())
        for root in roots
    )
