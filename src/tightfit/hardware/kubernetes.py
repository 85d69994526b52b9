"""What a Kubernetes cluster has, from `kubectl get nodes` and the pods' requests."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import EnvironmentFaultError
from tightfit.hardware.commands import RunCommand, run_command
from tightfit.hardware.gpu_hints import Guess, guess_gpu
from tightfit.hardware.kubernetes_labels import read_labels
from tightfit.hardware.types import Cluster, Node, NodeGroup

TIMEOUT_SECONDS = 15.0
NODES_COMMAND = ("kubectl", "get", "nodes", "-o", "json", "--request-timeout=10s")
PODS_COMMAND = (
    *("kubectl", "get", "pods", "-A", "-o", "json", "--request-timeout=10s"),
    "--field-selector=status.phase!=Succeeded,status.phase!=Failed",
)

_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(?:[eE]\+?([0-9]{1,2})|([kKMGTPE]i?|m))?")
_FACTORS = {
    **{prefix: 1000.0**power for power, prefix in enumerate("kMGTPE", start=1)},
    **{f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)},
    "m": 0.001,
}
_GPU_RESOURCE = re.compile(
    r"(?:nvidia|amd)\.com/(?:gpu(?:\.shared)?|mig-(?P<mig>[1-7]g\.[0-9]+gb))"
)
_OWN_TAINTS = ("node.kubernetes.io/", "nvidia.com/gpu", "amd.com/gpu")

_Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """GPUs of one resource on one node."""

    node: str
    count: int
    free: int
    memory_bytes: int
    num_cores: int
    disk_bytes: int


def probe_kubernetes(*, run: RunCommand = run_command) -> Cluster:
    """Ask the cluster that kubectl's present context points at."""
    nodes = _parse(run(NODES_COMMAND, TIMEOUT_SECONDS), "nodes")
    try:
        pods = _parse(run(PODS_COMMAND, TIMEOUT_SECONDS), "pods")
    except EnvironmentFaultError:
        pods = None  # often forbidden to plain users
    return build_cluster(nodes, pods)


def build_cluster(nodes: Sequence[_Object], pods: Sequence[_Object] | None) -> Cluster:
    """Groups by node pool, GPU and count. Memory, cores and disk are a group's smallest."""
    held = requested_gpus(pods or ())
    warnings: list[str] = []
    members: dict[tuple[str, str, int], list[_Member]] = defaultdict(list)
    guesses: dict[str, Guess] = {}
    without: list[str] = []
    for node in nodes:
        name = str(_at(node, "metadata", "name") or "?")
        found = _gpu_resources(node)
        if not found:
            without.append(name)
            continue
        fault = _why_unusable(node)
        if fault is not None:
            warnings.append(f"Node {name} is left out: {fault}.")
            continue
        for resource, count in found.items():
            _add_member(node, resource, count, held=held, members=members, guesses=guesses)
        warnings += _taint_notes(node, name)
    groups = _groups(members, guesses, warnings, knows_use=pods is not None)
    if without:
        shown = ", ".join(without[:4]) + (" and more" if len(without) > 4 else "")
        warnings.append(f"{len(without)} nodes without GPUs are left out ({shown}).")
    if pods is None:
        warnings.append("Pods may not be listed, so it is not known which GPUs are free.")
    if not groups:
        raise EnvironmentFaultError(
            f"The Kubernetes cluster shows no GPU to plan for. {' '.join(warnings[:3])}".strip(),
            remedy="see that the device plug-in runs: kubectl describe nodes | grep nvidia.com/gpu",
        )
    return Cluster(groups=tuple(groups), source="k8s", warnings=tuple(dict.fromkeys(warnings)))


def requested_gpus(pods: Iterable[_Object]) -> dict[tuple[str, str], int]:
    """(node, resource) to GPUs that running or starting pods ask for."""
    held: dict[tuple[str, str], int] = defaultdict(int)
    for pod in pods:
        node = _at(pod, "spec", "nodeName")
        if not node or _at(pod, "status", "phase") in ("Succeeded", "Failed"):
            continue
        for resource, count in _pod_request(pod).items():
            held[(str(node), resource)] += count
    return dict(held)


def parse_quantity(text: object) -> float:
    """A Kubernetes quantity (`64Gi`, `31850m`, `1e3`) as a number; 0 where it is none."""
    parts = _QUANTITY.fullmatch(str(text))
    if parts is None:
        return 0.0
    number, exponent, suffix = parts.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else _FACTORS.get(suffix, 1.0))


def _parse(text: str, what: str) -> list[_Object]:
    try:
        document = json.loads(text)
        items = document["items"]
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise EnvironmentFaultError(
            f"kubectl printed no list of {what}.", remedy=f"run by hand: kubectl get {what} -o json"
        ) from fault
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _at(thing: object, *keys: str) -> Any:
    """The value under nested keys, None where any is missing."""
    for key in keys:
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def _keys_at(thing: object, *keys: str) -> dict[str, Any]:
    value = _at(thing, *keys)
    return value if isinstance(value, dict) else {}


def _list_at(thing: object, *keys: str) -> list[Any]:
    value = _at(thing, *keys)
    return value if isinstance(value, list) else []


def _gpu_resources(node: _Object) -> dict[str, int]:
    """Resource name to how many of it jobs may have."""
    allocatable = _keys_at(node, "status", "allocatable")
    found = {name: int(parse_quantity(value)) for name, value in allocatable.items()}
    return {name: n for name, n in found.items() if n > 0 and _GPU_RESOURCE.fullmatch(name)}


def _why_unusable(node: _Object) -> str | None:
    if _at(node, "spec", "unschedulable"):
        return "it is cordoned"
    conditions = _list_at(node, "status", "conditions")
    ready = [_at(one, "status") for one in conditions if _at(one, "type") == "Ready"]
    return "it is not ready" if ready and ready[0] != "True" else None


def _taint_notes(node: _Object, name: str) -> list[str]:
    """Taints that a job must tolerate, beside the customary ones of GPU nodes."""
    return [
        f"Node {name} wants a toleration for the taint {taint.get('key')}."
        for taint in _list_at(node, "spec", "taints")
        if isinstance(taint, dict)
        and taint.get("effect") in ("NoSchedule", "NoExecute")
        and not str(taint.get("key")).startswith(_OWN_TAINTS)
    ]


def _add_member(
    node: _Object,
    resource: str,
    count: int,
    *,
    held: Mapping[tuple[str, str], int],
    members: dict[tuple[str, str, int], list[_Member]],
    guesses: dict[str, Guess],
) -> None:
    name = str(_at(node, "metadata", "name"))
    words = read_labels(_keys_at(node, "metadata", "labels"))
    mig = _GPU_RESOURCE.fullmatch(resource)
    profile = mig["mig"] if mig else None
    product = f"{words.product or ''}-MIG-{profile}" if profile else words.product
    guess = guess_gpu(product, words.hints)
    key = guess.gpu.name if guess.gpu else product or "unknown GPU"
    if words.replicas > 1:
        note = f"{key}: {words.replicas} pods share each GPU in turns; whole GPUs are counted."
        guess = Guess(gpu=guess.gpu, warnings=(*guess.warnings, note), is_slice=guess.is_slice)
    guesses[key] = guess
    whole = max(1, count // words.replicas)
    free = max(0, count - held.get((name, resource), 0)) // words.replicas
    allocatable = _keys_at(node, "status", "allocatable")
    member = _Member(
        node=name,
        count=1 if guess.is_slice else whole,
        free=free,
        memory_bytes=int(parse_quantity(allocatable.get("memory"))),
        num_cores=int(parse_quantity(allocatable.get("cpu"))),
        disk_bytes=int(parse_quantity(allocatable.get("ephemeral-storage"))),
    )
    members[(words.pool or "", key, member.count)].append(member)


def _groups(
    members: Mapping[tuple[str, str, int], Sequence[_Member]],
    guesses: Mapping[str, Guess],
    warnings: list[str],
    *,
    knows_use: bool,
) -> list[NodeGroup]:
    groups = []
    kinds: dict[str, int] = defaultdict(int)
    for pool, _, _ in members:
        kinds[pool] += 1
    for (pool, key, count), inside in sorted(members.items()):
        guess = guesses[key]
        warnings += guess.warnings
        if guess.gpu is None:
            continue
        label = pool if pool and kinds[pool] == 1 else f"{pool}/{count}x{key}".lstrip("/")
        node = Node(
            gpu=guess.gpu,
            num_gpus=count,
            host_memory_bytes=min(one.memory_bytes for one in inside) or None,
            num_cores=min(one.num_cores for one in inside) or None,
            disk_bytes=min(one.disk_bytes for one in inside) or None,
        )
        groups.append(
            NodeGroup(
                name=label,
                node=node,
                num_nodes=len(inside),
                num_free_nodes=sum(one.free >= count for one in inside) if knows_use else None,
                num_free_gpus=sum(one.free for one in inside) if knows_use else None,
            )
        )
    return groups


def _pod_request(pod: _Object) -> dict[str, int]:
    """GPUs a pod holds: containers together, or its largest init container."""
    total: dict[str, int] = defaultdict(int)
    for container in _list_at(pod, "spec", "containers"):
        for resource, count in _container_request(container).items():
            total[resource] += count
    for container in _list_at(pod, "spec", "initContainers"):
        for resource, count in _container_request(container).items():
            total[resource] = max(total[resource], count)
    return dict(total)


def _container_request(container: object) -> dict[str, int]:
    limits = _keys_at(container, "resources", "limits")
    requests = _keys_at(container, "resources", "requests")
    return {
        name: int(parse_quantity(value))
        for name, value in {**limits, **requests}.items()
        if _GPU_RESOURCE.fullmatch(name)
    }
