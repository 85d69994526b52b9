"""The API server of a kubeconfig: objects read, applied and deleted; errors explained."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.clusters.kubernetes.names import FIELD_MANAGER
from tightfit.clusters.kubernetes.pod import Document, load_client
from tightfit.clusters.site import KubernetesSite
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UsageError, UserError

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
            raise _unknown_kind(thing["kind"], self.namespace)
        return found

    def delete(self, kind: str, name: str) -> bool:
        """With everything it owns; False where it was gone."""
        query = {"propagation_policy": "Background"}
        return self._ask("DELETE", kind, name, **query) is not None

    def get_path(self, path: str, **query: str) -> Document | None:
        """What stands outside a namespace: nodes, all pods, a group of kinds."""
        return self._send("GET", path, "list", path.rpartition("/")[2], **query)

    def _ask(self, method: str, kind: str, name: str | None, **more: Any) -> Document | None:
        group, plural = _GROUPS[kind]
        path = f"{group}/namespaces/{self.namespace}/{plural}"
        verb = _VERBS[method] if name is not None else "list"
        return self._send(method, path if name is None else f"{path}/{name}", verb, plural, **more)

    def _send(self, method: str, path: str, verb: str, plural: str, **more: Any) -> Document | None:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        timeout = (CONNECT_SECONDS, ANSWER_SECONDS)
        try:
            found: Document = self.client.request(
                method, path, serializer=_unserialized, _request_timeout=timeout, **more
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
        said = _message(error)
        where = f"in namespace {self.namespace}"
        if error.status == 401:
            return SetupError(
                f"The API server {self.server} does not know you: {said}.",
                remedy="log in to the cluster again; kubectl auth whoami    (shows who you are)",
            )
        if error.status == 403:
            return SetupError(
                f"You may not {verb} {plural} {where}: {said}.",
                remedy=f"ask for that right; kubectl auth can-i {verb} {plural} -n "
                f"{self.namespace}    (tells when you have it)",
            )
        if error.status in (400, 409, 422):
            return InvalidInputError(
                f"The cluster refuses to {verb} {plural} {where}: {said}.",
                remedy="look at the objects with --dry-run, and at site.yaml",
            )
        return SetupError(
            f"The API server {self.server} failed to {verb} {plural} ({error.status}): {said}.",
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
    if _is_in_pod() and context is None and not _find_kubeconfig():
        config.load_incluster_config(client_configuration=settings)
    else:
        held = _load_kubeconfig(config, settings, context)
    settings.retries = False
    api = dynamic.DynamicClient(client.ApiClient(settings), discoverer=lambda _client, _cache: None)
    chosen = namespace or (site.namespace if "namespace" in site.model_fields_set else held)
    return KubernetesApi(client=api, server=settings.host, namespace=chosen or site.namespace)


def _load_kubeconfig(config: Any, settings: Any, context: str | None) -> str | None:
    """Fill the settings; returns the context's own namespace."""
    path = _kubeconfig_paths()  # the client itself looks at the variable only when it is loaded
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
        raise _not_configured(error) from error
    chosen = active if context is None else contexts[names.index(context)]
    found = (chosen or {}).get("context", {}).get("namespace")
    return None if found is None else str(found)


def _not_configured(error: BaseException) -> NotFoundError:
    return NotFoundError(
        f"No Kubernetes cluster is configured here: {_first_line(error).rstrip('.')}.",
        remedy="set KUBECONFIG to the cluster's file, or say what the nodes have and write the "
        "objects: --on 'k8s:4xA100-40GB' --write job.yaml",
    )


def _kubeconfig_paths() -> str:
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def _find_kubeconfig() -> bool:
    named = _kubeconfig_paths().split(os.pathsep)
    return any(Path(path).expanduser().is_file() for path in named if path)


def _is_in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _unknown_kind(kind: str, namespace: str) -> UserError:
    if kind == "TrainJob":
        return NotFoundError(
            "This cluster knows no TrainJob: Kubeflow Trainer v2 is not installed.",
            remedy="--as job    (a plain Job needs nothing installed)",
        )
    return NotFoundError(
        f"The cluster has no namespace {namespace}.",
        remedy=f"kubectl create namespace {namespace}, or --namespace ANOTHER",
    )


def _unserialized(_client: Any, document: Any) -> Any:
    return document


def _message(error: Any) -> str:
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason or "no reason given"
    return " ".join(str(said).split())[:600].rstrip(".")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


# Objects into a cluster and out of it again.

JOB_KINDS = ("Job", "TrainJob")
"""Kinds that start pods; what else a job has belongs to its leader and goes with it."""
DELETE_SECONDS = 180.0
"""For the pods of an earlier start to be gone."""
POLL_SECONDS = 1.0


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
    for thing in companions:
        cluster.apply(_owned(thing, made))
    return held is None


def cancel_job(cluster: KubernetesApi, leader: Document) -> bool:
    """Delete a job with its pods, which save first; False where it was gone."""
    return cluster.delete(leader["kind"], leader["metadata"]["name"])


def find_job_object(objects: Sequence[Document]) -> Document:
    return next(thing for thing in objects if thing["kind"] in JOB_KINDS)


def is_over(job: Document) -> bool:
    """Whether a Job or TrainJob has ended, either way."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(
        one.get("type") in ("Complete", "Failed") and one.get("status") == "True"
        for one in conditions
    )


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


def _owned(thing: Document, owner: Document) -> Document:
    """The same, to be deleted by the cluster when its owner is."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return {**thing, "metadata": {**thing["metadata"], "ownerReferences": [reference]}}


def _remove(cluster: KubernetesApi, leader: Document, sleep: Callable[[float], None]) -> None:
    kind, name = leader["kind"], leader["metadata"]["name"]
    cluster.delete(kind, name)
    waited = 0.0
    while cluster.get(kind, name) is not None:
        if waited >= DELETE_SECONDS:
            raise SetupError(
                f"{kind} {name} is over but will not go away.",
                remedy=f"kubectl describe {kind.lower()} {name} -n {cluster.namespace}",
            )
        sleep(POLL_SECONDS)
        waited += POLL_SECONDS
