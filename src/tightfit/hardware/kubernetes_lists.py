"""The nodes and pods of a Kubernetes cluster, by kubectl or by the official Python client."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from tightfit.core.errors import EnvironmentFaultError
from tightfit.hardware.commands import CommandMissingError, RunCommand

Object = Mapping[str, Any]
"""As the API writes it in JSON."""
Lists = tuple[list[Object], list[Object] | None]
"""Nodes, and pods where they may be listed: often forbidden to plain users."""

TIMEOUT_SECONDS = 15.0
REQUEST_SECONDS = 10
NODES_COMMAND = ("kubectl", "get", "nodes", "-o", "json", f"--request-timeout={REQUEST_SECONDS}s")
RUNNING = "status.phase!=Succeeded,status.phase!=Failed"
PODS_COMMAND = (
    *("kubectl", "get", "pods", "-A", "-o", "json", f"--request-timeout={REQUEST_SECONDS}s"),
    f"--field-selector={RUNNING}",
)
PAGE = 500
"""Objects per answer, as kubectl asks for them."""


def read_lists(run: RunCommand) -> Lists:
    """By kubectl; by the client where there is no kubectl."""
    try:
        nodes = _parse(run(NODES_COMMAND, TIMEOUT_SECONDS), "nodes")
    except CommandMissingError as fault:
        return read_by_client(fault)
    try:
        pods = _parse(run(PODS_COMMAND, TIMEOUT_SECONDS), "pods")
    except EnvironmentFaultError:
        return nodes, None
    return nodes, pods


def _parse(text: str, what: str, *, by: str = "kubectl") -> list[Object]:
    try:
        document = json.loads(text)
        items = document["items"]
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise EnvironmentFaultError(
            f"{by} printed no list of {what}.", remedy=f"run by hand: kubectl get {what} -o json"
        ) from fault
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def read_by_client(missing: CommandMissingError) -> Lists:
    """The present context's cluster, or this pod's own."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise EnvironmentFaultError(
            f"{missing.problem} Neither is the Python client.",
            remedy="install kubectl, or: pip install 'tightfit[cluster]'",
        ) from missing
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config()
        else:
            # Named here: the client reads the variable only while it is imported.
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError) as fault:
        raise EnvironmentFaultError(
            f"No Kubernetes cluster is configured: {_first_line(fault)}",
            remedy="set KUBECONFIG, or put the cluster's file at ~/.kube/config",
        ) from fault
    core = client.CoreV1Api()
    nodes = _list_all(core, "list_node", "nodes")
    try:
        pods = _list_all(core, "list_pod_for_all_namespaces", "pods", field_selector=RUNNING)
    except EnvironmentFaultError:
        return nodes, None
    return nodes, pods


def _list_all(core: Any, name: str, what: str, **options: object) -> list[Object]:
    """Every page as the JSON that the API sent: the client's models refuse what a server of
    another version, or a light one, leaves out."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    ask = partial(getattr(core, name), _preload_content=False, **options)
    found: list[Object] = []
    start = None
    while True:
        try:
            answer = ask(limit=PAGE, _continue=start, _request_timeout=REQUEST_SECONDS)
            text = answer.data.decode("utf-8", "replace")
        except ApiException as fault:
            raise _refused(f"{fault.status} {fault.reason}") from fault
        except (HTTPError, OSError, ValueError) as fault:
            raise _refused(_first_line(fault)) from fault
        found += _parse(text, what, by="The Kubernetes API")
        start = json.loads(text).get("metadata", {}).get("continue")
        if not start:
            return found


def _refused(why: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"The Kubernetes API does not answer: {why}",
        remedy="see whether the cluster is up and KUBECONFIG names it",
    )


def _first_line(fault: Exception) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:300]
