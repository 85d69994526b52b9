"""The one protocol for clusters: inventory, draft, submit, follow, cancel.

A backend is a folder with a class that implements `ClusterBackend`, and a line in `schedulers.py`.
`api/submit.py` asks the backend and knows no scheduler by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tightfit.clusters.schedulers import BACKENDS, SchedulerOptions, name_clusters
from tightfit.clusters.site import Site
from tightfit.core.errors import UsageError, UserError
from tightfit.core.options import list_declared
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import Record
from tightfit.runs.run_folder import RunFolder


class RunObserver(Protocol):
    """Receives the progress of a run."""

    def record(self, record: Record) -> None:
        """A step, an evaluation or an event, as the worker wrote it."""

    def line(self, line: str) -> None:
        """A line of the workers' log."""

    def say(self, text: str) -> None:
        """A message of the launcher or the cluster."""

    def tick(self) -> None:
        """Called a few times a second, whatever happens."""


class SilentObserver:
    """Shows nothing; a subclass overrides what it shows."""

    def record(self, record: Record) -> None: ...
    def line(self, line: str) -> None: ...
    def say(self, text: str) -> None: ...
    def tick(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(SchedulerOptions):
    """Options of `submit` for the cluster. A backend refuses those that it does not list."""

    target: str = ""
    """What follows the colon of `--on`: a partition, a node pool, hardware."""
    is_offline: bool = False
    """Nothing is applied, and the hardware is stated: the cluster need not be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A run to be started on a cluster."""

    plan: Plan
    run: Path
    """The run folder as the job sees it."""
    group: NodeGroup | None = None
    """The nodes that it is planned for; None where the plan alone is known."""
    can_requeue: bool = True
    argv: tuple[str, ...] | None = None
    """Instead of `tightfit train RUN --as-planned`."""
    carries_plan: bool = False
    """The plan travels with the job, to a run folder that only the job sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Everything that would be submitted."""

    spec: JobSpec
    title: str
    """What `text` is: `Batch script`."""
    text: str
    """The script or manifest, as a person would submit it by hand."""
    file_name: str
    """Under which `text` is kept in the run folder."""
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """The backend's own facts, for `--json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job."""

    job_id: str
    label: str
    """`job 42`, `Job mine-1a2b3c`."""
    run: RunFolder | None
    """None where only the job sees the folder."""
    title: str = ""
    """`Submitted as job 42 to gpu`."""
    commands: tuple[str, ...] = ()
    """What the user can do next, as shell commands."""
    cancel_command: str = ""
    """Ends the job by hand."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The backend's own facts, for `--json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a followed job ended."""

    state: str
    """In the scheduler's own word."""
    exit_code: int
    error: UserError | None = None
    """None where the run finished, or saved and stopped as asked."""
    num_restarts: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


class ClusterBackend(Protocol):
    """A place that runs jobs: this machine, a Slurm, a Kubernetes."""

    title: ClassVar[str]
    """As people call it."""
    takes: ClassVar[frozenset[str]]
    """Fields of `ClusterOptions` that it reads beside `target` and `time_limit`."""
    other_options: ClassVar[str]
    """What its users do instead of giving an option of another backend."""

    def __init__(self, options: ClusterOptions, site: Site) -> None:
        """Check the options and connect; wrong options are refused before any work."""

    def inventory(self) -> Cluster:
        """The nodes to plan for."""

    def check_files(self, files: Mapping[str, Path]) -> list[str]:  # noqa: ARG002
        """Refuse files that the job would not see; notes on those that it may not see."""
        return []

    def is_remote(self, folder: Path) -> bool:  # noqa: ARG002
        """Whether the job sees the folder, and this machine does not."""
        return False

    def translate_plan(self, plan: Plan) -> Plan:
        """A saved plan with its model's path as the job sees it."""
        return plan

    def find_job(self, run: RunFolder) -> Job | None:
        """The run's job that is queued or running."""

    def find_last_job(self, run: RunFolder) -> Job | None:  # noqa: ARG002
        """The run's last job, over or not, where the cluster still knows how it ended."""
        return None

    def find_job_by_id(self, job_id: str) -> Job | None:
        """A run's job by its number or name; None where it is over. Refuses other jobs."""

    def draft(self, spec: JobSpec) -> Draft:
        """The job as it would be submitted. Changes nothing."""

    def check(self, draft: Draft) -> str | None:  # noqa: ARG002
        """What the scheduler would do with the draft, in its own words; None: unknown."""
        return None

    def submit(self, draft: Draft) -> Job:
        """Submit; the run folder is written by now. Refuses a second job for one run."""

    def follow(self, job: Job, observer: RunObserver) -> JobEnd:
        """Wait for the job's end; an exception leaves the job running."""

    def cancel(self, job: Job) -> None:
        """End the job; it saves first."""


def open_backend(name: str, options: ClusterOptions, site: Site) -> ClusterBackend:
    """The backend called `name`, with its options checked."""
    kind = find_backend(name)
    _refuse_foreign_options(kind, options)
    return kind(options, site)


def find_backend(name: str) -> type[ClusterBackend]:
    if name not in BACKENDS:
        raise UsageError(
            f"`--on {name[:60]}` is no cluster that takes jobs.",
            remedy=f"--on {name_clusters()}; slurm:gpu names a partition",
        )
    module, _, attribute = BACKENDS[name].partition(":")
    found: type[ClusterBackend] = getattr(import_module(module), attribute)
    return found


def _refuse_foreign_options(kind: type[ClusterBackend], options: ClusterOptions) -> None:
    for name, option in list_declared(SchedulerOptions).items():
        if getattr(options, name) and name not in (*kind.takes, "time_limit"):
            owner = next(
                other.title for other in map(find_backend, BACKENDS) if name in other.takes
            )
            raise UsageError(f"`{option.name}` is for {owner}.", remedy=kind.other_options)
