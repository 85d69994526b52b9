"""What a Kubernetes cluster has and what is free: its nodes less the requests of its pods."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tightfit.core.errors import NotFoundError, SetupError, first_line
from tightfit.core.text import did_you_mean
from tightfit.hardware.catalogue import guess_gpu
from tightfit.hardware.command import CommandMissingError, RunCommand, run_command
from tightfit.hardware.inventory import (
    ClusterNode,
    Inventory,
    NodeGpus,
    NodePool,
    NodeState,
)

# Which GPU and which pool a Kubernetes node's labels name, in each cloud's own words.

_PRODUCT_LABELS = (
    "nvidia.com/gpu.product",  # NVIDIA GPU feature discovery
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "accelerator",
)
_POOL_LABELS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
    "agentpool",
    "node-pool",
    "pool",
)
_INSTANCE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_INSTANCES = (
    # From the clouds' lists of GPU machine types; general knowledge, 2025.
    (r"g4dn\..*|Standard_NC\d+as_T4_v3", "T4"),
    (r"g5\..*", "A10G"),
    (r"g6\..*|g2-standard-.*", "L4"),
    (r"g6e\..*", "L40S"),
    (r"p3dn\..*|Standard_ND40rs_v2", "V100-SXM2-32GB"),
    (r"p3\..*|Standard_NC\d+r?s_v3", "V100-16GB"),
    (r"p4de\..*|a2-ultragpu-.*|Standard_ND96amsr_A100_v4", "A100-80GB"),
    (r"Standard_NC\d+ads_A100_v4", "A100-PCIE-80GB"),
    (r"p4d\..*|a2-highgpu-.*|a2-megagpu-.*|Standard_ND96asr_v4", "A100-40GB"),
    (r"p5\..*|a3-(?:high|mega)gpu-.*|Standard_ND96isr_H100_v5", "H100"),
    (r"p5en?\..*|a3-ultragpu-.*|Standard_ND96isr_H200_v5", "H200"),
    (r"p6-b200\..*|a4-highgpu-.*", "B200"),
)
_SHARED = re.compile(r"-SHARED$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLabels:
    """What the labels say, as words for `guess_gpu`."""

    product: str | None
    hints: tuple[str, ...]
    pool: str | None
    replicas: int
    """How many pods share one GPU in turns; 1 where none do."""


def read_labels(labels: Mapping[str, str]) -> GpuLabels:
    """Collect what is known about the GPU; the plug-in's own label first."""
    labels = {key: value for key, value in labels.items() if isinstance(value, str)}
    products = [labels[key] for key in _PRODUCT_LABELS if labels.get(key)]
    instance = next((labels[key] for key in _INSTANCE_LABELS if labels.get(key)), "")
    named = [gpu for pattern, gpu in _INSTANCES if re.fullmatch(pattern, instance)]
    words = [_SHARED.sub("", word) for word in (*products, *named[:1])]
    replicas = labels.get("nvidia.com/gpu.replicas", "")
    sizes: tuple[str, ...] = ()
    mebibytes = labels.get("nvidia.com/gpu.memory", "")
    if re.fullmatch(r"[0-9]{4,7}", mebibytes):
        # The driver's total, somewhat below the size as sold.
        whole = -(-int(mebibytes) // 1024)
        sizes = (f"{whole}gb", f"{whole + 1}gb")
    return GpuLabels(
        product=words[0] if words else None,
        hints=(*words[1:], *sizes),
        pool=next((labels[key] for key in _POOL_LABELS if labels.get(key)), None),
        replicas=max(1, int(replicas)) if re.fullmatch(r"[0-9]{1,4}", replicas) else 1,
    )


# The nodes and pods of a Kubernetes cluster, by kubectl or by the official Python client.

KubernetesObject = Mapping[str, Any]
"""As the API writes it in JSON."""
Lists = tuple[list[KubernetesObject], list[KubernetesObject] | None]
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


def read_nodes_and_pods(run: RunCommand) -> Lists:
    """By kubectl; by the client where there is no kubectl."""
    try:
        nodes = _parse(run(NODES_COMMAND, TIMEOUT_SECONDS), "nodes")
    except CommandMissingError as error:
        return read_by_client(error)
    with suppress(SetupError):
        return nodes, _parse(run(PODS_COMMAND, TIMEOUT_SECONDS), "pods")
    return nodes, None


def _parse(text: str, what: str, *, by: str = "kubectl") -> list[KubernetesObject]:
    try:
        document = json.loads(text)
        items = document["items"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SetupError(
            f"{by} printed no list of {what}.", remedy=f"run by hand: kubectl get {what} -o json"
        ) from error
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def read_by_client(missing: CommandMissingError) -> Lists:
    """The present context's cluster, or this pod's own."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise SetupError(
            f"{missing.problem} Neither is the Python client.",
            remedy="install kubectl, or: pip install 'tightfit[cluster]'",
        ) from missing
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config()
        else:
            # Named here: the client reads the variable only while it is imported.
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError) as error:
        raise SetupError(
            f"No Kubernetes cluster is configured: {first_line(error)}",
            remedy="set KUBECONFIG, or put the cluster's file at ~/.kube/config",
        ) from error
    core = client.CoreV1Api()
    nodes = _list_all(core.list_node, "nodes")
    with suppress(SetupError):
        every_pod = partial(core.list_pod_for_all_namespaces, field_selector=RUNNING)
        return nodes, _list_all(every_pod, "pods")
    return nodes, None


def _list_all(ask: Callable[..., Any], what: str) -> list[KubernetesObject]:
    """Every page as the JSON that the API sent: the client's models refuse what a server of
    another version, or a light one, leaves out."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    found: list[KubernetesObject] = []
    start = None
    while True:
        try:
            answer = ask(
                limit=PAGE,
                _continue=start,
                _request_timeout=REQUEST_SECONDS,
                _preload_content=False,
            )
            text = answer.data.decode("utf-8", "replace")
        except (ApiException, HTTPError, OSError, ValueError) as error:
            why = first_line(error)
            if isinstance(error, ApiException):
                why = f"{error.status} {error.reason}"
            raise SetupError(
                f"The Kubernetes API does not answer: {why}",
                remedy="see whether the cluster is up and KUBECONFIG names it",
            ) from error
        found += _parse(text, what, by="The Kubernetes API")
        start = json.loads(text).get("metadata", {}).get("continue")
        if not start:
            return found


# Reading a Kubernetes API object without trusting its shape: quantities, requests, conditions.

GPU_RESOURCE = re.compile(r"(?:nvidia|amd)\.com/(?:gpu(?:\.shared)?|mig-(?P<mig>[1-7]g\.[0-9]+gb))")

_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(?:[eE]\+?([0-9]{1,2})|([kKMGTPE]i?|m))?")
_FACTORS = {
    **{prefix: 1000.0**power for power, prefix in enumerate("kMGTPE", start=1)},
    **{f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)},
    "m": 0.001,
}


def parse_quantity(text: object) -> float:
    """A Kubernetes quantity (`64Gi`, `31850m`, `1e3`) as a number; 0 where it is none."""
    parts = _QUANTITY.fullmatch(str(text))
    if parts is None:
        return 0.0
    number, exponent, suffix = parts.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else _FACTORS.get(suffix, 1.0))


T = TypeVar("T", list[Any], dict[str, Any])


def at(thing: object, *keys: str) -> Any:
    """The value under nested keys, None where any is missing."""
    for key in keys:
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def _typed(kind: type[T], thing: object, *keys: str) -> T:
    """The same, empty where it is of another type."""
    value = at(thing, *keys)
    return value if isinstance(value, kind) else kind()


def sum_requests(pods: Iterable[KubernetesObject]) -> dict[str, dict[str, float]]:
    """Node to resource to how much of it running or starting pods ask for."""
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pod in pods:
        node = at(pod, "spec", "nodeName")
        if not node or at(pod, "status", "phase") in ("Succeeded", "Failed"):
            continue
        for resource, amount in _pod_request(pod).items():
            held[str(node)][resource] += amount
    return held


def _pod_request(pod: KubernetesObject) -> dict[str, float]:
    """What a pod holds: containers and sidecars together, or its largest init container."""
    total: dict[str, float] = defaultdict(float)
    first = _typed(list, pod, "spec", "initContainers")
    sidecars = [one for one in first if at(one, "restartPolicy") == "Always"]
    for container in (*_typed(list, pod, "spec", "containers"), *sidecars):
        for resource, amount in _container_request(container).items():
            total[resource] += amount
    for container in first:
        for resource, amount in _container_request(container).items():
            total[resource] = max(total[resource], amount)
    return total


def _container_request(container: object) -> dict[str, float]:
    resources = _typed(dict, container, "resources")
    stated = {**_typed(dict, resources, "limits"), **_typed(dict, resources, "requests")}
    return {name: parse_quantity(value) for name, value in stated.items()}


IDLE_FRACTION = 0.9
"""Of a node's cores: the cluster's own pods always ask for some."""
BUSY_FRACTION = 0.1

_OWN_TAINTS = ("node.kubernetes.io/", "nvidia.com/gpu", "amd.com/gpu")
_CONTROL_TAINTS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


def probe_kubernetes_inventory(
    pool: str | None = None, *, run: RunCommand = run_command
) -> Inventory:
    """Every node of the cluster that the present context points at."""
    nodes, pods = read_nodes_and_pods(run)
    return build_inventory(nodes, pods, pool=pool)


def build_inventory(
    nodes: Sequence[KubernetesObject],
    pods: Sequence[KubernetesObject] | None,
    *,
    pool: str | None = None,
) -> Inventory:
    """Nodes by pool, as their labels name it; those without such a label are in the pool ``."""
    if not nodes:
        raise SetupError(
            "The Kubernetes cluster shows no nodes to this user.", remedy="kubectl get nodes"
        )
    held = None if pods is None else sum_requests(pods)
    warnings = []
    if pods is None:
        warnings.append("Pods may not be listed, so it is not known what is free.")
    found = [_node(node, held, warnings) for node in nodes]
    names = sorted({name for node in found for name in node.pools})
    if pool is not None and pool not in names:
        known = [name for name in names if name]
        raise NotFoundError(
            f"Kubernetes has no node pool `{pool[:60]}`.{did_you_mean(pool[:60], known)}",
            remedy=f"choose one of: {', '.join(known[:20])}" if known else "--on k8s",
        )
    inventory = Inventory(
        source="k8s",
        pools=tuple(NodePool(name=name) for name in names),
        nodes=tuple(found),
        warnings=tuple(dict.fromkeys(warnings)),
    )
    return inventory if pool is None else inventory.only(pool)


def _node(
    node: KubernetesObject, held: Mapping[str, Mapping[str, float]] | None, warnings: list[str]
) -> ClusterNode:
    name = str(at(node, "metadata", "name") or "?")
    labels = read_labels(_typed(dict, node, "metadata", "labels"))
    taken = None if held is None else held.get(name, {})
    whole = {
        resource: parse_quantity(at(node, "status", "allocatable", resource))
        for resource in ("cpu", "memory", "ephemeral-storage")
    }
    free: dict[str, int] = {}
    if taken is not None:
        free = {key: max(0, int(whole[key] - taken.get(key, 0.0))) for key in whole}
    problem = _why_unusable(node)
    devices = _devices(node, labels, taken, takes_jobs=problem is None)
    if labels.replicas > 1 and devices:
        shared = f"{labels.replicas} pods share each GPU in turns"
        warnings.append(f"{devices[0].name}: {shared}; whole GPUs are counted.")
    if problem is None:
        # Taints that a job must tolerate, beside the customary ones of GPU nodes.
        warnings += [
            f"Node {name} wants a toleration for the taint {at(taint, 'key')}."
            for taint in _typed(list, node, "spec", "taints")
            if _keeps_out(taint, ("",)) and not _keeps_out(taint, _OWN_TAINTS)
        ]
    if problem is not None:
        state = NodeState.DRAINED if problem in (_CORDONED, _CONTROL) else NodeState.DOWN
    elif taken is None:
        state = NodeState.READY
    elif devices:
        num_free = sum(one.num_free or 0 for one in devices)
        state = _state(is_idle=num_free >= sum(one.count for one in devices), is_full=num_free <= 0)
    else:
        left = max(0.0, whole["cpu"] - taken.get("cpu", 0.0))
        state = _state(
            is_idle=left >= IDLE_FRACTION * whole["cpu"],
            is_full=left <= BUSY_FRACTION * whole["cpu"],
        )
    return ClusterNode(
        name=name,
        pools=(labels.pool or "",),
        devices=devices,
        memory_bytes=int(whole["memory"]) or None,
        free_memory_bytes=free.get("memory"),
        num_cores=int(whole["cpu"]) or None,
        num_free_cores=free.get("cpu"),
        disk_bytes=int(whole["ephemeral-storage"]) or None,
        state=state,
        state_word=state.value,
        reason=problem or "",
    )


def _state(*, is_idle: bool, is_full: bool) -> NodeState:
    return NodeState.IDLE if is_idle else NodeState.ALLOCATED if is_full else NodeState.MIXED


_CORDONED = "it is cordoned"
_CONTROL = "it is kept for the control plane"


def _why_unusable(node: KubernetesObject) -> str | None:
    if at(node, "spec", "unschedulable"):
        return _CORDONED
    conditions = _typed(list, node, "status", "conditions")
    ready = [one for one in conditions if at(one, "type") == "Ready"]
    if ready and at(ready[0], "status") != "True":
        reported = str(at(ready[0], "message") or "").strip()
        return f"it is not ready{f': {reported[:160]}' if reported else ''}"
    taints = _typed(list, node, "spec", "taints")
    return _CONTROL if any(_keeps_out(taint, _CONTROL_TAINTS) for taint in taints) else None


def _keeps_out(taint: object, keys: tuple[str, ...]) -> bool:
    effect = at(taint, "effect")
    return effect in ("NoSchedule", "NoExecute") and str(at(taint, "key")).startswith(keys)


def _devices(
    node: KubernetesObject, words: GpuLabels, taken: Mapping[str, float] | None, *, takes_jobs: bool
) -> tuple[NodeGpus, ...]:
    """One entry per GPU resource; the cards' own name where the catalogue knows it."""
    found = []
    for resource, value in _typed(dict, node, "status", "allocatable").items():
        mig, amount = GPU_RESOURCE.fullmatch(resource), int(parse_quantity(value))
        if mig is None or amount < 1:
            continue
        product = f"{words.product or ''}-MIG-{mig['mig']}" if mig["mig"] else words.product
        free = None
        if taken is not None:
            left = max(0, amount - int(taken.get(resource, 0.0)))
            free = left // words.replicas if takes_jobs else 0
        gpu = guess_gpu(product, words.hints).gpu
        found.append(
            NodeGpus(
                kind=product,
                label=gpu.name if gpu is not None else product or "unknown GPU",
                hints=words.hints,
                count=max(1, amount // words.replicas),
                num_free=free,
            )
        )
    return tuple(found)
