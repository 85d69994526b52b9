"""The API server of a kubeconfig: objects read, applied and deleted; a job followed to its end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.clusters.follow import follow_job
from tightfit.clusters.kubernetes.pod import FIELD_MANAGER, JOB_NAME_LABEL, Document, load_client
from tightfit.clusters.protocol import RunObserver
from tightfit.clusters.site import KubernetesSite
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UsageError, UserError
from tightfit.runs.run_folder import RunFolder

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
_GROUPS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Event": ("/api/v1", "events"),
    "Job": ("/apis/batch/v1", "jobs"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "TrainJob": ("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
_VERBS = {"GET": "get", "PATCH": "patch", "DELETE": "delete"}
APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesApi:
    """One namespace of one cluster."""

    client: Any
    """kubernetes.dynamic.DynamicClient: its `request` is the same in every release."""
    server: str
    namespace: str

    def get(self, kind: str, name: str) -> Document | None:
        """One object; None where there is none, or where the cluster knows no such kind."""
        return self._ask("GET", kind, name)

    def list(self, kind: str, **query: str) -> list[Document]:
        found = self._ask("GET", kind, None, **query)
        items = [] if found is None else found.get("items") or []
        return [item for item in items if isinstance(item, dict)]

    def apply(self, thing: Document) -> Document:
        """Server-side: made where it is missing, and as it is where nothing has changed."""
        query = {"field_manager": FIELD_MANAGER, "force_conflicts": "true", "content_type": APPLY}
        name = thing["metadata"]["name"]
        found = self._ask("PATCH", thing["kind"], name, body=thing, **query)
        if found is None:
            raise unknown_kind(thing["kind"], self.namespace)
        return found

    def delete(self, kind: str, name: str) -> bool:
        """With everything it owns; False where it was gone."""
        query = {"propagation_policy": "Background"}
        return self._ask("DELETE", kind, name, **query) is not None

    def get_path(self, path: str, **query: str) -> Document | None:
        """What is outside a namespace: nodes, all pods, a group of kinds."""
        return self._send("GET", path, "list", path.rpartition("/")[2], **query)

    def _ask(self, method: str, kind: str, name: str | None, **more: Any) -> Document | None:
        group, plural = _GROUPS[kind]
        path = f"{group}/namespaces/{self.namespace}/{plural}"
        verb = _VERBS[method] if name is not None else "list"
        return self._send(method, path if name is None else f"{path}/{name}", verb, plural, **more)

    def _send(self, method: str, path: str, verb: str, plural: str, **more: Any) -> Document | None:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            found: Document = self.client.request(
                method,
                path,
                serializer=lambda _client, document: document,
                _request_timeout=(CONNECT_SECONDS, ANSWER_SECONDS),
                **more,
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise self._explain(error, verb, plural) from error
        except (HTTPError, OSError) as error:
            raise SetupError(
                f"The API server {self.server} gives no answer: {_first_line(error)}.",
                remedy="kubectl cluster-info    (shows whether it can be reached at all)",
            ) from error
        return found

    def _explain(self, error: Any, verb: str, plural: str) -> UserError:
        message = _message(error)
        where = f"in namespace {self.namespace}"
        if error.status == 401:
            return SetupError(
                f"The API server {self.server} does not know you: {message}.",
                remedy="log in to the cluster again; kubectl auth whoami    (shows who you are)",
            )
        if error.status == 403:
            return SetupError(
                f"You may not {verb} {plural} {where}: {message}.",
                remedy=f"ask for that right; kubectl auth can-i {verb} {plural} -n "
                f"{self.namespace}    (shows when you have it)",
            )
        if error.status in (400, 409, 422):
            return InvalidInputError(
                f"The cluster refuses to {verb} {plural} {where}: {message}.",
                remedy="look at the objects with --dry-run, and at site.yaml",
            )
        return SetupError(
            f"The API server {self.server} failed to {verb} {plural} ({error.status}): {message}.",
            remedy="try again in a while; kubectl get --raw /readyz    (asks how it is)",
        )


def connect(
    site: KubernetesSite, *, context: str | None = None, namespace: str | None = None
) -> KubernetesApi:
    """By kubeconfig, or from inside a pod by its service account."""
    client = load_client()
    config, dynamic = (import_module(f"kubernetes.{name}") for name in ("config", "dynamic"))
    settings = client.Configuration()
    held: str | None = None
    paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
    has_file = any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path)
    if "KUBERNETES_SERVICE_HOST" in os.environ and context is None and not has_file:
        config.load_incluster_config(client_configuration=settings)
    else:
        held = _load_kubeconfig(config, settings, context, paths)
    settings.retries = False
    api = dynamic.DynamicClient(client.ApiClient(settings), discoverer=lambda _client, _cache: None)
    chosen = namespace or (site.namespace if "namespace" in site.model_fields_set else held)
    return KubernetesApi(client=api, server=settings.host, namespace=chosen or site.namespace)


def _load_kubeconfig(config: Any, settings: Any, context: str | None, path: str) -> str | None:
    """Fill the settings; returns the context's own namespace.

    `path` is given because the client itself reads $KUBECONFIG only when it is imported.
    """
    try:
        contexts, active = config.list_kube_config_contexts(config_file=path)
        names = [str(one["name"]) for one in contexts]
        if context is not None and context not in names:
            raise UsageError(
                f"There is no context `{context}` in the kubeconfig.",
                remedy=f"--context {names[0]}" if names else "kubectl config get-contexts",
            )
        config.load_kube_config(config_file=path, context=context, client_configuration=settings)
    except UserError:
        raise
    except Exception as error:  # whatever a file that is no kubeconfig makes its reader do
        raise NotFoundError(
            f"No Kubernetes cluster is configured here: {_first_line(error).rstrip('.')}.",
            remedy="set KUBECONFIG to the cluster's file; `tightfit submit` also writes the "
            "objects without a cluster: --on 'k8s:4xA100-40GB' --write job.yaml",
        ) from error
    chosen = active if context is None else contexts[names.index(context)]
    found = (chosen or {}).get("context", {}).get("namespace")
    return None if found is None else str(found)


def unknown_kind(kind: str, namespace: str) -> NotFoundError:
    """Why the API server knows no path for objects of this kind."""
    if kind == "TrainJob":
        return NotFoundError(
            "This cluster knows no TrainJob: Kubeflow Trainer v2 is not installed.",
            remedy="--as job    (a plain Job needs nothing installed)",
        )
    return NotFoundError(
        f"The cluster has no namespace {namespace}.",
        remedy=f"kubectl create namespace {namespace}, or --namespace ANOTHER",
    )


def _message(error: Any) -> str:
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = error.reason or "no reason given"
    return " ".join(str(message).split())[:600].rstrip(".")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


# Objects into a cluster and out of it again.

JOB_KINDS = ("Job", "TrainJob")
"""Kinds that start pods; what else a job has belongs to its leader and goes with it."""
DELETE_SECONDS = 180
"""For the pods of an earlier start to be gone."""


def apply_objects(
    cluster: KubernetesApi,
    objects: Sequence[Document],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Make or keep the objects; False where the very job was already there and not over.

    A job of this name that is over makes room: it is the same run, gone on with.
    """
    leader = find_job_object(objects)
    companions = [thing for thing in objects if thing is not leader]
    held = cluster.get(leader["kind"], leader["metadata"]["name"])
    if held is not None and is_over(held):
        _remove(cluster, leader, sleep)
        held = None
    for thing in companions:
        cluster.apply(thing)
    made = cluster.apply(leader)
    owner = {key: made[key] for key in ("apiVersion", "kind")}
    owner |= {key: made["metadata"][key] for key in ("name", "uid")}
    for thing in companions:  # the cluster deletes them with their owner
        meta = {**thing["metadata"], "ownerReferences": [owner]}
        cluster.apply({**thing, "metadata": meta})
    return held is None


def find_job_object(objects: Sequence[Document]) -> Document:
    return next(thing for thing in objects if thing["kind"] in JOB_KINDS)


def is_over(job: Document) -> bool:
    """Whether a Job or TrainJob has ended, either way."""
    return _read_phase(job)[0].is_over


def check_claims(
    cluster: KubernetesApi, objects: Sequence[Document], *, num_pods: int
) -> list[str]:
    """Refuse claims that are not there; warn of those that one node alone can mount.

    Claims are in the pod template of a Job and in the patch of a TrainJob: both are searched.
    """
    warnings = []
    for name in sorted(_claims_in(list(objects))):
        try:
            claim = cluster.get("PersistentVolumeClaim", name)
        except SetupError:  # one may be allowed to use what one may not read
            continue
        if claim is None:
            raise NotFoundError(
                f"Namespace {cluster.namespace} has no PersistentVolumeClaim {name}.",
                remedy=f"kubectl get pvc -n {cluster.namespace}    (lists them; see volumes in "
                "site.yaml)",
            )
        modes = (claim.get("spec") or {}).get("accessModes") or []
        if num_pods > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            warnings.append(
                f"claim {name} can be mounted by one node ({', '.join(modes)}), but the job has "
                f"{num_pods} pods"
            )
    return warnings


def _claims_in(thing: object) -> set[str]:
    if isinstance(thing, list):
        return {name for item in thing for name in _claims_in(item)}
    if not isinstance(thing, dict):
        return set()
    found = {name for value in thing.values() for name in _claims_in(value)}
    claim = thing.get("persistentVolumeClaim")
    return found | ({str(claim["claimName"])} if isinstance(claim, dict) else set())


def _remove(cluster: KubernetesApi, leader: Document, sleep: Callable[[float], None]) -> None:
    kind, name = leader["kind"], leader["metadata"]["name"]
    cluster.delete(kind, name)
    for _ in range(DELETE_SECONDS):
        if cluster.get(kind, name) is None:
            return
        sleep(1.0)
    raise SetupError(
        f"{kind} {name} is over but will not go away.",
        remedy=f"kubectl describe {kind.lower()} {name} -n {cluster.namespace}",
    )


# The state of a job in a cluster: its pods, why they wait, how it ended; followed to its end.

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
    """The state of a job in a cluster."""

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


_PHASES = {
    "Complete": JobPhase.COMPLETE,
    "Failed": JobPhase.FAILED,
    "Suspended": JobPhase.SUSPENDED,
}
"""By the condition that is true."""


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


def read_job_snapshot(cluster: KubernetesApi, kind: str, name: str) -> JobSnapshot:
    """The job and its pods now."""
    job = cluster.get(kind, name)
    if job is None:
        return JobSnapshot(phase=JobPhase.GONE, why="", pods=())
    phase, why = _read_phase(job)
    label = JOB_NAME_LABEL if kind == "Job" else _JOB_SET_LABEL
    pods = [_read_pod(pod) for pod in cluster.list("Pod", label_selector=f"{label}={name}")]
    if not phase.is_over:
        pods = _add_warnings(cluster, pods)
    pods.sort(key=lambda pod: (-1 if pod.index is None else pod.index, pod.name))
    return JobSnapshot(phase=phase, why=why, pods=tuple(pods))


def _read_phase(job: Document) -> tuple[JobPhase, str]:
    """The phase of a Job or TrainJob, and the cluster's reason for it."""
    conditions = (job.get("status") or {}).get("conditions") or []
    held = {one.get("type"): one for one in conditions if one.get("status") == "True"}
    for kind, phase in _PHASES.items():  # one that was suspended once may be over by now
        if kind in held:
            return phase, _join_reason(held[kind])
    return JobPhase.ACTIVE, ""


def _read_pod(pod: Document) -> PodState:
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    known = {**(meta.get("annotations") or {}), **(meta.get("labels") or {})}
    index = str(known.get(INDEX_LABEL, ""))
    why, exit_code, is_stuck = _explain_pod(status)
    return PodState(
        name=str(meta.get("name")),
        index=int(index) if index.isdecimal() else None,
        phase=str(status.get("phase") or "Pending"),
        node=(pod.get("spec") or {}).get("nodeName"),
        why=why,
        exit_code=exit_code,
        is_stuck=is_stuck,
    )


def _explain_pod(status: Document) -> tuple[str, int | None, bool]:
    """Why it waits or ended, its exit code, and whether it is stuck."""
    why, exit_code, is_stuck = _explain_containers(status)
    for one in status.get("conditions") or []:
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
            words = _DISRUPTIONS.get(str(one.get("reason")), "disrupted")
            return f"{words} ({_join_reason(one)})", exit_code, False
    return why, exit_code, is_stuck


_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "its node was lost or drained",
    "EvictionByEvictionAPI": "evicted, as when a node is drained",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node shut down, or ran short of memory or disk",
}
"""Reasons of the condition DisruptionTarget. Source: kubernetes.io/docs/concepts/workloads/pods/
disruptions, "Pod disruption conditions"."""


def _explain_containers(status: Document) -> tuple[str, int | None, bool]:
    for containers in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(containers) or []:
            state = container.get("state") or {}
            ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
            if ended.get("exitCode"):
                return _join_reason(ended), int(ended["exitCode"]), False
            reason = waiting.get("reason")
            if reason not in (None, "ContainerCreating", "PodInitializing"):
                return _join_reason(waiting), None, reason in _STUCK
    if status.get("reason"):  # Evicted, DeadlineExceeded
        return _join_reason(status), None, False
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return _join_reason(one), None, False
    return "", None, False


def _add_warnings(cluster: KubernetesApi, pods: list[PodState]) -> list[PodState]:
    """Volumes that do not mount show in no pod's state, only in its events."""
    silent = {pod.name for pod in pods if pod.phase == "Pending" and not pod.why and pod.node}
    if not silent:
        return pods
    try:
        events = cluster.list("Event", field_selector="type=Warning")
    except SetupError:  # forbidden to many
        return pods
    warnings = {
        str((event.get("involvedObject") or {}).get("name")): _join_reason(event)
        for event in events
    }
    return [
        replace(pod, why=warnings.get(pod.name, "")) if pod.name in silent else pod for pod in pods
    ]


def _join_reason(state: Document) -> str:
    """`Reason: message` of anything that has both."""
    reason = state.get("reason")
    text = " ".join(str(state.get("message") or "").split())
    text = f"{reason}: {text}" if reason and text else str(reason or text)
    return text if len(text) <= MAX_WORDS else "..." + text[-MAX_WORDS:]


# A job followed to its end.

FOLLOW_SECONDS = 3.0


def wait_for_job(
    api: KubernetesApi, kind: str, name: str, observer: RunObserver, *, run: RunFolder | None
) -> JobSnapshot:
    """The last snapshot; the state of each pod is reported whenever it changes."""

    def describe(snapshot: JobSnapshot) -> dict[str, str]:
        texts = {pod.name: describe_pod(pod) for pod in snapshot.pods}
        if snapshot.phase is JobPhase.SUSPENDED:
            texts["queue"] = "waiting in the queue; no pods yet"
        return texts

    return follow_job(
        lambda: read_job_snapshot(api, kind, name),
        run,
        observer,
        is_over=lambda snapshot: snapshot.phase.is_over,
        describe=describe,
        max_poll_seconds=FOLLOW_SECONDS,
    )


def describe_pod(pod: PodState) -> str:
    """`pod 0 is running on gpu-3`."""
    who = f"pod {pod.name if pod.index is None else pod.index}"
    where = f" on {pod.node}" if pod.node else ""
    if pod.phase == "Running":
        return f"{who} is running{where}" + (f": {pod.why}" if pod.why else "")
    if pod.phase == "Succeeded":
        return f"{who} is done"
    if pod.phase == "Failed":
        code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
        return f"{who} ended{code}{where}" + (f": {pod.why}" if pod.why else "")
    if pod.is_stuck:
        return f"{who} cannot start{where}: {pod.why}"
    what = "is being made ready" if pod.node else "waits for a node"
    return f"{who} {what}{where}" + (f": {pod.why}" if pod.why else "")
