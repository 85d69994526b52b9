"""How a job in a cluster stands: its pods, why they wait, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tightfit.core.errors import EnvironmentFaultError
from tightfit.launch.kubernetes.connect import Cluster
from tightfit.launch.kubernetes.objects import JOB_NAME_LABEL
from tightfit.launch.kubernetes.pod import Document

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_JOB_SET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_STUCK = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
MAX_WORDS = 400


class JobPhase(str, Enum):
    """Where a job in a cluster stands."""

    SUSPENDED = "suspended"
    """In a queue, with no pods yet."""
    ACTIVE = "active"
    COMPLETE = "complete"
    FAILED = "failed"
    GONE = "gone"
    """Deleted by somebody, or by its time to live."""

    @property
    def is_over(self) -> bool:
        return self in (JobPhase.COMPLETE, JobPhase.FAILED, JobPhase.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """One pod in a few words."""

    name: str
    index: int | None
    phase: str
    node: str | None
    why: str
    """Why it waits or how it ended; empty where it just runs."""
    exit_code: int | None = None
    is_stuck: bool = False
    """Waiting for something that will hardly come by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job at one moment."""

    phase: JobPhase
    why: str
    pods: tuple[PodState, ...]


def read_view(cluster: Cluster, leader: Document) -> JobView:
    """One look at the job and its pods."""
    kind, name = leader["kind"], leader["metadata"]["name"]
    job = cluster.get(kind, name)
    if job is None:
        return JobView(phase=JobPhase.GONE, why="", pods=())
    phase, why = _phase_of(job)
    label = JOB_NAME_LABEL if kind == "Job" else _JOB_SET_LABEL
    pods = [_read_pod(pod) for pod in cluster.list("Pod", label_selector=f"{label}={name}")]
    if not phase.is_over:
        pods = _with_events(cluster, pods)
    ordered = sorted(pods, key=lambda pod: (-1 if pod.index is None else pod.index, pod.name))
    return JobView(phase=phase, why=why, pods=tuple(ordered))


def _phase_of(job: Document) -> tuple[JobPhase, str]:
    status = job.get("status") or {}
    for one in status.get("conditions") or []:
        if one.get("status") != "True":
            continue
        said = _words(one.get("reason"), one.get("message"))
        if one.get("type") == "Complete":
            return JobPhase.COMPLETE, said
        if one.get("type") == "Failed":
            return JobPhase.FAILED, said
        if one.get("type") == "Suspended":
            return JobPhase.SUSPENDED, said
    return JobPhase.ACTIVE, ""


def _read_pod(pod: Document) -> PodState:
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    why, exit_code, is_stuck = _why(status)
    return PodState(
        name=str(meta.get("name")),
        index=_index(meta),
        phase=str(status.get("phase") or "Pending"),
        node=(pod.get("spec") or {}).get("nodeName"),
        why=why,
        exit_code=exit_code,
        is_stuck=is_stuck,
    )


def _index(meta: Document) -> int | None:
    for place in ("labels", "annotations"):
        text = str((meta.get(place) or {}).get(INDEX_LABEL, ""))
        if text.isdecimal():
            return int(text)
    return None


def _why(status: Document) -> tuple[str, int | None, bool]:
    for container in _containers(status):
        state = container.get("state") or {}
        ended = state.get("terminated")
        if ended and ended.get("exitCode"):
            said = _words(ended.get("reason"), ended.get("message"))
            return said, int(ended["exitCode"]), False
        waiting = state.get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            said = _words(waiting.get("reason"), waiting.get("message"))
            return said, None, waiting["reason"] in _STUCK
    if status.get("reason"):  # Evicted, DeadlineExceeded
        return _words(status["reason"], status.get("message")), None, False
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return _words(one.get("reason"), one.get("message")), None, False
    return "", None, False


def _containers(status: Document) -> list[Any]:
    return [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]


def _with_events(cluster: Cluster, pods: list[PodState]) -> list[PodState]:
    """Volumes that do not mount show in no pod's state, only in its events."""
    from dataclasses import replace

    silent = {pod.name for pod in pods if pod.phase == "Pending" and not pod.why and pod.node}
    if not silent:
        return pods
    try:
        events = cluster.list("Event", field_selector="type=Warning")
    except EnvironmentFaultError:  # forbidden to many
        return pods
    told = {
        str((event.get("involvedObject") or {}).get("name")): _words(
            event.get("reason"), event.get("message")
        )
        for event in events
    }
    return [
        replace(pod, why=told[pod.name]) if pod.name in silent and pod.name in told else pod
        for pod in pods
    ]


def _words(reason: object, message: object) -> str:
    said = " ".join(str(message or "").split())
    text = f"{reason}: {said}" if reason and said else str(reason or said)
    return text if len(text) <= MAX_WORDS else "..." + text[-MAX_WORDS:]
