"""Workers as one Slurm job array per partition; Slurm requeues them after a node failure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tightfit.clusters.site import Site
from tightfit.clusters.slurm.queue import JobState, cancel_jobs, read_jobs, submit_script
from tightfit.clusters.slurm.script import (
    BatchJob,
    JobResources,
    join_argv,
    srun_argv,
    write_script,
)
from tightfit.core.errors import EXIT_REQUEUE, SetupError
from tightfit.core.files import write_atomic
from tightfit.farming.backends.local import WORKER_COMMAND
from tightfit.farming.worker_pool import StartedWorkers, WorkerGroup, farm_prefix
from tightfit.hardware.command import RunCommand, run_command

MAX_RESTARTS = 20
"""Of one task by itself; after that the submitter's command starts it again."""


class SlurmStarter:
    """One array for what is missing in a partition."""

    def __init__(
        self,
        folder: Path,
        site: Site,
        *,
        words: Sequence[str] = WORKER_COMMAND,
        mounts: Sequence[str] = (),
        run: RunCommand = run_command,
    ) -> None:
        self._folder = folder
        self._site = site
        self._words = words
        self._mounts = mounts
        self._run = run

    def start(self, group: WorkerGroup, count: int) -> tuple[str, ...]:
        number = 0
        while (path := self._folder / "logs" / f"{group.name}-{number}.sbatch").exists():
            number += 1
        write_atomic(path, self.write_script(group, count))
        return (submit_script(path, run=self._run),)

    def write_script(self, group: WorkerGroup, count: int) -> str:
        log = str(self._folder / "logs").replace("%", "%%")
        job = BatchJob(
            name=farm_prefix(self._folder, group),
            partition=group.partition,
            log=f"{log}/{group.name}-%A-%a.log",
            body=tuple(self._body(group)),
            gpus_per_node=group.gpus_per_worker,
            resources=JobResources(
                cores=group.cores_per_worker, warn_seconds=self._site.slurm.warn_seconds
            ),
            array_size=count,
            can_requeue=True,
        )
        site = self._site
        if group.excluded:
            extra = (*site.slurm.extra, f"--exclude={','.join(group.excluded)}")
            slurm = site.slurm.model_copy(update={"extra": extra})
            site = site.model_copy(update={"slurm": slurm})
        return write_script(job, site)

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        ids = [name for job in jobs for name in job.names]
        try:
            found = read_jobs(ids, run=self._run)
        except SetupError:
            return sum(job.num_workers for job in jobs)  # a busy controller: ask again later
        gone = (JobState.UNKNOWN, JobState.COMPLETING)
        return sum(not (one.state.is_over or one.state in gone) for one in found)

    def find(self, group: WorkerGroup) -> Mapping[str, int]:
        command = ("squeue", "-h", "-r", "-n", farm_prefix(self._folder, group), "-o", "%F")
        try:
            return Counter(self._run(command, 60.0).split())
        except SetupError:
            return {}

    def stop(self, jobs: Sequence[StartedWorkers]) -> None:
        cancel_jobs([name for job in jobs for name in job.names], run=self._run)

    def name_cancel_command(self, jobs: Sequence[StartedWorkers]) -> str:
        names = [name for job in jobs for name in job.names]
        return f"scancel {' '.join(names)}" if names else ""

    def _body(self, group: WorkerGroup) -> Iterator[str]:
        words = [*self._site.python_argv, *self._words, str(self._folder)]
        words += ["--partition", group.name]
        if self._site.container_image is not None:
            mounts = [str(self._folder.parent), *self._mounts]
            words = [*srun_argv(self._site, mounts=mounts), "--ntasks=1", *words]
        folder = shlex.quote(str(self._folder))
        yield f"# One worker of the farm in {folder}: takes chunks until none is left."
        if group.cores_per_worker is not None:
            yield f"export OMP_NUM_THREADS={group.cores_per_worker}"
        yield f"{join_argv(words)} &"
        yield "worker=$!"
        yield "# Before the time limit: finish what is under way. Cancelled: give it back at once."
        yield "trap 'kill -USR1 $worker' USR1"
        yield "trap 'kill -TERM $worker' TERM"
        yield "while kill -0 $worker 2>/dev/null; do wait $worker; done"
        yield "wait $worker"
        yield "code=$?"
        yield "# Stopped in the middle, or killed: back to the queue, unless it was cancelled."
        yield "case $code in"
        yield f"  {EXIT_REQUEUE}|129|13?|14?)"
        yield '    if [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ] &&'
        yield f'      [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_RESTARTS} ]; then'
        yield '      scontrol requeue "$SLURM_JOB_ID" && sleep 600'
        yield "    fi ;;"
        yield "esac"
        yield "exit $code"
