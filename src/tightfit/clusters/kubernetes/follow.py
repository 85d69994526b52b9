"""The state of a job in a cluster: its pods, why they wait, how it ended; followed to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tightfit.clusters.follow import RunFollower
from tightfit.clusters.kubernetes.client import KubernetesApi
from tightfit.clusters.kubernetes.objects import JOB_NAME_LABEL
from tightfit.clusters.kubernetes.pod import Document
from tightfit.clusters.protocol import RunObserver
from tightfit.core.errors import SetupError
from tightfit.runs.run_folder import RunFolder

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
class JobSnapshot:
    """A job at one moment."""

    phase: JobPhase
    why: str
    pods: tuple[PodState, ...]


def read_job_snapshot(cluster: KubernetesApi, leader: Document) -> JobSnapshot:
    """One look at the job and its pods."""
    kind, name = leader["kind"], leader["metadata"]["name"]
    job = cluster.get(kind, name)
    if job is None:
        return JobSnapshot(phase=JobPhase.GONE, why="", pods=())
    phase, why = _phase_of(job)
    label = JOB_NAME_LABEL if kind == "Job" else _JOB_SET_LABEL
    pods = [_read_pod(pod) for pod in cluster.list("Pod", label_selector=f"{label}={name}")]
    if not phase.is_over:
        pods = _with_events(cluster, pods)
    ordered = sorted(pods, key=lambda pod: (-1 if pod.index is None else pod.index, pod.name))
    return JobSnapshot(phase=phase, why=why, pods=tuple(ordered))


def _phase_of(job: Document) -> tuple[JobPhase, str]:
    status = job.get("status") or {}
    for one in status.get("conditions") or []:
        if one.get("status") != "True":
            continue
        text = _join_reason(one.get("reason"), one.get("message"))
        if one.get("type") == "Complete":
            return JobPhase.COMPLETE, text
        if one.get("type") == "Failed":
            return JobPhase.FAILED, text
        if one.get("type") == "Suspended":
            return JobPhase.SUSPENDED, text
    return JobPhase.ACTIVE, ""


def _read_pod(pod: Document) -> PodState:
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    why, exit_code, is_stuck = _explain_pod(status)
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


def _explain_pod(status: Document) -> tuple[str, int | None, bool]:
    for container in _containers(status):
        state = container.get("state") or {}
        ended = state.get("terminated")
        if ended and ended.get("exitCode"):
            text = _join_reason(ended.get("reason"), ended.get("message"))
            return text, int(ended["exitCode"]), False
        waiting = state.get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            text = _join_reason(waiting.get("reason"), waiting.get("message"))
            return text, None, waiting["reason"] in _STUCK
    if status.get("reason"):  # Evicted, DeadlineExceeded
        return _join_reason(status["reason"], status.get("message")), None, False
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return _join_reason(one.get("reason"), one.get("message")), None, False
    return "", None, False


def _containers(status: Document) -> list[Any]:
    return [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]


def _with_events(cluster: KubernetesApi, pods: list[PodState]) -> list[PodState]:
    """Volumes that do not mount show in no pod's state, only in its events."""
    from dataclasses import replace

    silent = {pod.name for pod in pods if pod.phase == "Pending" and not pod.why and pod.node}
    if not silent:
        return pods
    try:
        events = cluster.list("Event", field_selector="type=Warning")
    except SetupError:  # forbidden to many
        return pods
    warnings = {
        str((event.get("involvedObject") or {}).get("name")): _join_reason(
            event.get("reason"), event.get("message")
        )
        for event in events
    }
    return [
        replace(pod, why=warnings[pod.name]) if pod.name in silent and pod.name in warnings else pod
        for pod in pods
    ]


def _join_reason(reason: object, message: object) -> str:
    text = " ".join(str(message or "").split())
    text = f"{reason}: {text}" if reason and text else str(reason or text)
    return text if len(text) <= MAX_WORDS else "..." + text[-MAX_WORDS:]


# From one look after the other to news: how pods start, wait and end, and the run's records.

POLL_SECONDS = 3.0
TICK_SECONDS = 0.25
MAX_ERRORS = 20
"""Looks in a row that the API server may leave unanswered: it is updated while jobs run."""


class KubernetesFollower:
    """Reports a job's pods and the records of its run until the job is over."""

    def __init__(
        self,
        api: KubernetesApi,
        leader: Document,
        observer: RunObserver,
        *,
        run: RunFolder | None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api, self._leader, self._observer = api, leader, observer
        self._sleep = sleep
        self._news = RunFollower(run, observer)
        self._described: dict[str, str] = {}
        self._phase: JobPhase | None = None

    def wait(self) -> JobSnapshot:
        """The last snapshot."""
        num_errors = 0
        while True:
            try:
                snapshot = read_job_snapshot(self._api, self._leader)
                num_errors = 0
            except SetupError as error:
                num_errors += 1
                if num_errors > MAX_ERRORS:
                    raise
                if num_errors == 1:
                    self._observer.say(f"{error.problem} Asking again.")
            else:
                self._describe(snapshot)
                if snapshot.phase.is_over:
                    self._news.report()
                    return snapshot
            for _ in range(round(POLL_SECONDS / TICK_SECONDS)):
                self._news.report()
                self._sleep(TICK_SECONDS)

    def _describe(self, snapshot: JobSnapshot) -> None:
        if snapshot.phase is not self._phase:
            self._phase = snapshot.phase
            if snapshot.phase is JobPhase.SUSPENDED:
                self._observer.say("waiting in the queue; no pods yet")
        for pod in snapshot.pods:
            text = describe_pod(pod)
            if self._described.get(pod.name) != text:
                self._described[pod.name] = text
                self._observer.say(text)


def describe_pod(pod: PodState) -> str:
    """`pod 0 is running on gpu-3`."""
    who = f"pod {pod.name if pod.index is None else pod.index}"
    where = f" on {pod.node}" if pod.node else ""
    if pod.phase == "Running" and not pod.why:
        return f"{who} is running{where}"
    if pod.phase == "Succeeded":
        return f"{who} is done"
    if pod.phase == "Failed":
        code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
        return f"{who} ended{code}{where}" + (f": {pod.why}" if pod.why else "")
    if pod.is_stuck:
        return f"{who} cannot start{where}: {pod.why}"
    what = "is being made ready" if pod.node else "waits for a node"
    return f"{who} {what}{where}" + (f": {pod.why}" if pod.why else "")
