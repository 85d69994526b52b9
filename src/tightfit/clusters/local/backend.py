"""This machine behind the cluster protocol: a run in the background, in a session of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

from tightfit.clusters.follow import follow_job
from tightfit.clusters.local.launcher import find_launcher
from tightfit.clusters.local.outcome import read_state, run_error
from tightfit.clusters.local.workers import start_with_log
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
from tightfit.core.errors import SetupError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.import_path import module_words
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster
from tightfit.runs.run_folder import RunFolder, RunStatus

PYTHON = sys.executable
SCRIPT_FILE = "job.sh"
LOG_FILE = "local.out"


class LocalBackend(ClusterBackend):
    """`tightfit train RUN --as-planned`, which outlives the process that submitted it."""

    title = "this machine"
    takes = frozenset()
    other_options = "leave it out    (this machine has no scheduler)"

    def __init__(self, options: ClusterOptions, site: Site) -> None:
        if options.time_limit is not None:
            raise UsageError(
                "`--time-limit` is for clusters with a scheduler.", remedy="leave it out"
            )
        self._hardware = options.target or "here"
        self._site = site
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        """Children of this process, which have to be waited for."""

    def inventory(self) -> Cluster:
        return resolve_hardware(self._hardware)

    def find_job(self, run: RunFolder) -> Job | None:
        pid = find_launcher(run)
        return None if pid is None else _make_job(run, pid)

    def find_job_by_id(self, job_id: str) -> Job | None:
        raise UsageError(
            f"`{job_id}` is no run's folder; a run on this machine is named by it.",
            remedy="tightfit runs    (lists the runs there are)",
        )

    def draft(self, spec: JobSpec) -> Draft:
        if spec.plan.strategy.num_nodes > 1:
            raise UsageError(
                f"The plan is for {spec.plan.strategy.num_nodes} nodes, and this is one machine.",
                remedy="--nodes 1, or --on slurm:PARTITION",
            )
        words = shlex.join(["tightfit", "train", str(spec.run), "--as-planned"])
        return Draft(
            spec=spec,
            title="Command",
            text=f"{words}\n",
            file_name=SCRIPT_FILE,
            details={"command": words},
        )

    def submit(self, draft: Draft) -> Job:
        run = RunFolder(path=draft.spec.run)
        write_atomic(run.path / SCRIPT_FILE, draft.text)
        command = [PYTHON, *module_words("tightfit", "train", str(run.path), "--as-planned")]
        process = start_with_log(command, run.path / LOG_FILE, self._site.environment)
        self._started[str(process.pid)] = process
        return _make_job(run, process.pid)

    def follow(self, job: Job, observer: RunObserver) -> JobEnd:
        assert job.run is not None
        follow_job(
            lambda: self._is_alive(job), job.run, observer, is_over=lambda is_alive: not is_alive
        )
        state = read_state(job.run)
        log = shlex.quote(str(job.run.path / LOG_FILE))
        if state is None or state.status in (RunStatus.PREPARED, RunStatus.RUNNING):
            error: UserError | None = SetupError(
                f"The run in {job.run.path} ended without a message.", remedy=f"less {log}"
            )
        else:
            is_failed = state.status is RunStatus.FAILED
            error = run_error(state, remedy=f"less {log}") if is_failed else None
        return JobEnd(
            state="unknown" if state is None else state.status.value,
            exit_code=error.exit_code if error else (state and state.exit_code) or 0,
            error=error,
            details={"job_id": job.job_id},
        )

    def _is_alive(self, job: Job) -> bool:
        if job.job_id in self._started:
            return self._started[job.job_id].poll() is None
        return psutil.pid_exists(int(job.job_id))

    def cancel(self, job: Job) -> None:
        with suppress(ProcessLookupError):
            os.kill(int(job.job_id), signal.SIGTERM)


def _make_job(run: RunFolder, pid: int) -> Job:
    folder = shlex.quote(str(run.path))
    return Job(
        job_id=str(pid),
        label=f"process {pid}",
        run=run,
        title=f"Started as process {pid}",
        commands=(
            f"tightfit submit {folder} --on here --follow    (follows it again)",
            f"tightfit cancel {folder}    (ends it; it saves first)",
        ),
        cancel_command=f"kill {pid}",
        details={"job_id": str(pid)},
    )
