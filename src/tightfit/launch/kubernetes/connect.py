"""The API server that a kubeconfig points at, and its refusals in plain words."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.core.errors import (
    EnvironmentFaultError,
    InvalidInputError,
    NotFoundError,
    UsageError,
    UserError,
)
from tightfit.launch.kubernetes.names import FIELD_MANAGER
from tightfit.launch.kubernetes.pod import Document, load_client
from tightfit.launch.site import KubernetesSite

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
class Cluster:
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
                method, path, serializer=_as_is, _request_timeout=timeout, **more
            )
        except ApiException as fault:
            if fault.status == 404:
                return None
            raise self._explain(fault, verb, plural) from fault
        except (HTTPError, OSError) as fault:
            raise EnvironmentFaultError(
                f"The API server {self.server} gives no answer: {_first_line(fault)}.",
                remedy="kubectl cluster-info    (shows whether it can be reached at all)",
            ) from fault
        return found

    def _explain(self, fault: Any, verb: str, plural: str) -> UserError:
        said = _message(fault)
        where = f"in namespace {self.namespace}"
        if fault.status == 401:
            return EnvironmentFaultError(
                f"The API server {self.server} does not know you: {said}.",
                remedy="log in to the cluster again; kubectl auth whoami    (shows who you are)",
            )
        if fault.status == 403:
            return EnvironmentFaultError(
                f"You may not {verb} {plural} {where}: {said}.",
                remedy=f"ask for that right; kubectl auth can-i {verb} {plural} -n "
                f"{self.namespace}    (tells when you have it)",
            )
        if fault.status in (400, 409, 422):
            return InvalidInputError(
                f"The cluster refuses to {verb} {plural} {where}: {said}.",
                remedy="look at the objects with --dry-run, and at site.yaml",
            )
        return EnvironmentFaultError(
            f"The API server {self.server} failed to {verb} {plural} ({fault.status}): {said}.",
            remedy="try again in a while; kubectl get --raw /readyz    (asks how it is)",
        )


def connect(
    site: KubernetesSite, *, context: str | None = None, namespace: str | None = None
) -> Cluster:
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
    return Cluster(client=api, server=settings.host, namespace=chosen or site.namespace)


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
    except Exception as fault:  # whatever a file that is no kubeconfig makes its reader do
        raise _not_configured(fault) from fault
    chosen = active if context is None else contexts[names.index(context)]
    found = (chosen or {}).get("context", {}).get("namespace")
    return None if found is None else str(found)


def _not_configured(fault: BaseException) -> NotFoundError:
    return NotFoundError(
        f"No Kubernetes cluster is configured here: {_first_line(fault).rstrip('.')}.",
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


def _as_is(_client: Any, document: Any) -> Any:
    return document


def _message(fault: Any) -> str:
    try:
        said = json.loads(fault.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = fault.reason or "no reason given"
    return " ".join(str(said).split())[:600].rstrip(".")


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0][:300] if lines else type(fault).__name__
