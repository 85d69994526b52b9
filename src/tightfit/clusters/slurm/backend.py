"""Slurm behind the cluster protocol."""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from tightfit.clusters.local.outcome import read_lines, run_error
from tightfit.clusters.protocol import (
    ClusterOptions,
    Draft,
    Job,
    JobEnd,
    JobSpec,
    RunObserver,
)
from tightfit.clusters.site import Site
from tightfit.clusters.slurm.follow import SlurmFollower
from tightfit.clusters.slurm.queue import (
    JobState,
    JobStatus,
    SubmittedJob,
    cancel_jobs,
    check_script,
    find_queued,
    lock_submission,
    read_job_file,
    read_jobs,
    submit_script,
    write_job_file,
)
from tightfit.clusters.slurm.resources import (
    GpuRequest,
    JobResources,
    filter_nodes,
    find_gpu_request,
    find_resources,
)
from tightfit.clusters.slurm.script import SCRIPT_FILE, TrainingJob, make_batch_job, write_script
from tightfit.clusters.slurm.shared_files import check_shared, is_this_machine
from tightfit.core.errors import SetupError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.text import shorten
from tightfit.core.units import parse_time_limit, render_seconds
from tightfit.core.validation import printable
from tightfit.hardware.inventory import Inventory, plannable_cluster
from tightfit.hardware.slurm import probe_slurm_inventory
from tightfit.hardware.types import Cluster
from tightfit.planning.plan import Plan
from tightfit.runs.report import parse_time
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

SETTLE_SECONDS = 10.0
"""For a shared file system to show what the job wrote last."""
NUM_LAST_CHARACTERS = 200
_SITE_OPTIONS = ("account", "qos", "constraint", "reservation")
_ENDED = (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED)


class SlurmBackend:
    """Batch jobs by Slurm's own commands; `slurm.json` in a run folder names its job."""

    title = "Slurm"
    takes = frozenset(_SITE_OPTIONS)
    other_options = "leave it out    (--dry-run shows the batch script)"

    def __init__(self, options: ClusterOptions, site: Site) -> None:
        self._limit_seconds = _read_time_limit(options.time_limit)
        self._limit_text = options.time_limit
        self._site = _override(site, options)
        self._partition = options.target or site.slurm.partition
        self._inventory: Inventory | None = None

    def inventory(self) -> Cluster:
        return plannable_cluster(self._probe())

    def _probe(self) -> Inventory:
        if self._inventory is None:
            found = probe_slurm_inventory(self._partition)
            self._inventory = filter_nodes(found, self._site.slurm.constraint)
        return self._inventory

    def check_files(self, files: Mapping[str, Path]) -> list[str]:
        if is_this_machine(node.name for node in self._probe().nodes):
            return []
        return check_shared({what: path.absolute() for what, path in files.items()}, self._site)

    def is_remote(self, folder: Path) -> bool:  # noqa: ARG002
        return False

    def translate_plan(self, plan: Plan) -> Plan:
        return plan

    def find_job(self, run: RunFolder) -> Job | None:
        """Also one of `sbatch job.sbatch` by hand, and one whose submitter died."""
        noted = read_job_file(run)
        if noted is not None and _is_active(noted.job_id):
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
        job = TrainingJob(
            plan=spec.plan,
            run=spec.run,
            partition=partition,
            gpu=_request_gpus(self._probe(), partition, spec.plan),
            resources=resources,
            can_requeue=spec.can_requeue,
        )
        script = write_script(make_batch_job(job, self._site), self._site)
        return Draft(
            spec=spec,
            title="Batch script",
            text=script,
            file_name=SCRIPT_FILE,
            notes=tuple(_list_notes(resources, can_requeue=spec.can_requeue)),
            details={"script": script, "num_slices": resources.num_slices},
        )

    def check(self, draft: Draft) -> str | None:
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as stream:
            stream.write(draft.text)
            stream.flush()
            try:
                return check_script(Path(stream.name))
            except SetupError as error:
                return error.problem

    def submit(self, draft: Draft) -> Job:
        assert draft.spec.group is not None
        run = RunFolder(path=draft.spec.run)
        path = run.path / SCRIPT_FILE
        partition = draft.spec.group.name.partition("/")[0]
        # Two submitters of one run: the second finds the first one's job in the queue.
        with lock_submission(run):
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
        status = SlurmFollower(job.run, job.job_id, observer).wait()
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


def _read_time_limit(text: str | None) -> float | None:
    if text is None:
        return None
    limit = parse_time_limit(text)
    if limit is None:
        raise UsageError(f"`--time-limit {text}` is no limit.", remedy="--time-limit 12:00:00")
    return limit


def _override(site: Site, options: ClusterOptions) -> Site:
    """Options win over site.yaml, and must meet its rules: only features may hold spaces."""
    given = {name: getattr(options, name) for name in _SITE_OPTIONS}
    stated = {name: value for name, value in given.items() if value is not None}
    for name, value in stated.items():
        is_word = name == "constraint" or not re.search(r"[\s'\"#]", value)
        if not value.isprintable() or not is_word:
            raise UsageError(
                f"`--{name} {shorten(value)}` is more than one word.",
                remedy=f"--{name} NAME, without spaces, quotes or line breaks",
            )
    return site.model_copy(update={"slurm": site.slurm.model_copy(update=stated)})


def _is_active(job_id: str) -> bool:
    status = read_jobs([job_id])[0]
    return not status.state.is_over and status.state is not JobState.UNKNOWN


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


def _request_gpus(inventory: Inventory, partition: str, plan: Plan) -> GpuRequest:
    if plan.hardware.node.gpu.is_cpu:
        return GpuRequest()
    return find_gpu_request(
        inventory,
        partition=partition,
        gpu_name=plan.hardware.node.gpu.name,
        gpus_per_node=plan.strategy.gpus_per_node,
    )


def _list_notes(resources: JobResources, *, can_requeue: bool) -> list[str]:
    """Where the run is longer than one job may be."""
    if resources.num_slices == 1 or resources.seconds is None:
        return []
    limit = render_seconds(resources.seconds)
    if can_requeue:
        return [
            f"At a time limit of {limit} it will take about {resources.num_slices} slices: each "
            "saves, goes back to the queue and resumes."
        ]
    return [
        f"It will probably not end within {limit}: it then saves and stops, and the same command "
        "goes on (--requeue does so by itself)."
    ]


def _read_settled(run: RunFolder, status: JobStatus) -> RunState | None:
    """The run's state, once the file system shows it."""
    ends = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            state: RunState | None = run.read_state()
        except UserError:
            state = None
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
    log = run.path / f"slurm-{status.job_id}.out"
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
    lines = [line.strip() for line in read_lines(log, start=0) if line.strip()]
    last = f": {printable(lines[-1], most=NUM_LAST_CHARACTERS)}" if lines else "."
    return SetupError(
        f"Job {status.job_id} ended{at} without a message from the run{last}",
        remedy=f"less {shlex.quote(str(log))}",
    )
