"""`cancel`: end a run's job wherever it runs; the run saves first."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum

from tightfit.api.call import accepts_keywords
from tightfit.api.options.clusters import CancelOptions
from tightfit.api.submit import DEFAULT_CLUSTER, read_recorded_cluster
from tightfit.clusters.protocol import ClusterBackend, ClusterOptions, Job, open_backend
from tightfit.clusters.schedulers import BACKENDS
from tightfit.clusters.site import read_site
from tightfit.core.errors import NotFoundError
from tightfit.runs.report import find_run, probe_state
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

THIS_MACHINE = "here"
"""Where `train` runs, whatever hardware it was planned for."""


class CancelStatus(str, Enum):
    """What `cancel` did."""

    CANCELLED = "cancelled"
    """The job was told to end."""
    OVER = "over"
    """Nothing: no job of the run is queued or running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelResult:
    """What became of a job."""

    status: CancelStatus
    cluster: str
    """As people call it."""
    job: Job | None
    """The job that was told to end."""
    run: RunFolder | None
    """None where it is not seen from here."""
    state: RunState | None
    """The run's own, when this was asked; a run that is told to end goes on to save."""
    next_command: str | None
    """Goes on with the run, or ends it where it `runs_elsewhere`; None where it is finished, or not
    seen from here."""
    runs_elsewhere: bool = False
    """It runs, but not on the cluster that was named."""


@accepts_keywords(CancelOptions)
def cancel(options: CancelOptions) -> CancelResult:
    """End the job of a run, or the job of that number or name; what is over already is left."""
    run = find_run(options.job)
    recorded = None if run is None else read_recorded_cluster(options.job)
    backend = _open_backend(options, run, recorded)
    if run is not None:
        job = backend.find_job(run)
    else:
        job = backend.find_job_by_id(options.job)
        run = None if job is None else job.run
        recorded = None if run is None else read_recorded_cluster(str(run.path))
    if job is not None:
        backend.cancel(job)
    state = None if run is None else probe_state(run)
    is_finished = state is not None and state.status is RunStatus.FINISHED
    is_running = state is not None and state.status is RunStatus.RUNNING
    runs_elsewhere = job is None and is_running and options.on is not None
    if run is None or is_finished:
        next_command = None
    elif runs_elsewhere:
        next_command = f"tightfit cancel {shlex.quote(str(run.path))}"
    else:
        next_command = _go_on(run, options.on, recorded)
    return CancelResult(
        status=CancelStatus.OVER if job is None else CancelStatus.CANCELLED,
        cluster=backend.title,
        job=job,
        run=run,
        state=state,
        next_command=next_command,
        runs_elsewhere=runs_elsewhere,
    )


def _open_backend(
    options: CancelOptions, run: RunFolder | None, recorded: str | None
) -> ClusterBackend:
    stated = options.on
    if stated is None and run is not None:
        stated = recorded if _is_cluster(recorded) else THIS_MACHINE
    elif stated is None and options.job.partition("_")[0].isdecimal():
        stated = DEFAULT_CLUSTER
    if stated is None:
        raise NotFoundError(
            f"There is no run {options.job}, and it is not the number of a Slurm job.",
            remedy="tightfit runs    (lists the runs; --on k8s takes the name of a Kubernetes Job)",
        )
    name, _, target = stated.partition(":")
    chosen = ClusterOptions(
        context=options.context, namespace=options.namespace, target=target.strip()
    )
    return open_backend(name.strip().casefold(), chosen, read_site())


def _is_cluster(stated: str | None) -> bool:
    """Not the hardware in words that `train` takes."""
    return stated is not None and stated.partition(":")[0].strip().casefold() in BACKENDS


def _go_on(run: RunFolder, on: str | None, recorded: str | None) -> str:
    folder = shlex.quote(str(run.path))
    if on is not None:
        return f"tightfit submit {folder} --on {shlex.quote(on)}"
    return f"tightfit {'submit' if _is_cluster(recorded) else 'train'} {folder}"
