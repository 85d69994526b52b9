"""A Job of independent workers: each pod runs the same command until it has nothing more to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tightfit.launch.kubernetes.names import escape, name_job
from tightfit.launch.kubernetes.objects import build_job
from tightfit.launch.kubernetes.pod import Document, Task, User
from tightfit.launch.kubernetes.resources import PodResources
from tightfit.launch.kubernetes.volumes import choose_mounts
from tightfit.launch.margins import MIN_RESTARTS
from tightfit.launch.site import Site

WORKER_NUMBER = "$(JOB_COMPLETION_INDEX)"
"""A word of `argv` that becomes the pod's number, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a farm may say beside command, number and size."""

    written: tuple[str, ...] = ()
    """Paths that the workers write to; volumes that hold none of them are read-only."""
    environment: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    seconds: int | None = None
    """After which a pod is told to stop."""
    user: User | None = None
    """Who owns the folder that is written to. None: user 1000, as in our images."""


def worker_job(
    name: str,
    argv: Sequence[str],
    *,
    num_workers: int,
    resources: PodResources,
    site: Site,
    options: WorkerOptions | None = None,
) -> list[Document]:
    """The objects to write or apply: one Indexed Job of `num_workers` pods.

    `argv` is plain words; a word that is `WORKER_NUMBER` becomes the pod's number, and nothing
    else is expanded. A pod that is preempted or drained comes back and is not counted; one that
    fails or stops comes back up to ten times; a fault that no restart cures ends that worker
    alone. The Job is complete when all have ended with 0.
    """
    chosen = options or WorkerOptions()
    task = Task(
        name=name_job(name),
        argv=tuple(word if word == WORKER_NUMBER else escape(word) for word in argv),
        resources=resources,
        mounts=choose_mounts(site.kubernetes, written=chosen.written),
        environment=chosen.environment,
        seconds=chosen.seconds,
        user=chosen.user,
        node_selector=chosen.node_selector,
    )
    return [
        build_job(
            task,
            site,
            num_pods=num_workers,
            is_group=False,
            num_restarts=MIN_RESTARTS,
            annotations=chosen.annotations,
        )
    ]
