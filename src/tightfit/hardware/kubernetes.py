"""What a Kubernetes cluster has and what of it is free: its nodes less the pods' requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightfit.core.errors import EnvironmentFaultError, NotFoundError
from tightfit.core.suggest import did_you_mean
from tightfit.hardware.commands import RunCommand, run_command
from tightfit.hardware.gpu_hints import guess_gpu
from tightfit.hardware.inventory import ClusterNode, Devices, Inventory, NodeState, Pool
from tightfit.hardware.kubernetes_labels import LabelWords, read_labels
from tightfit.hardware.kubernetes_lists import Object, read_lists
from tightfit.hardware.kubernetes_objects import (
    GPU_RESOURCE,
    at,
    keys_at,
    list_at,
    parse_quantity,
    sum_requests,
)
from tightfit.hardware.plannable import plan_over
from tightfit.hardware.types import Cluster

IDLE_FRACTION = 0.9
"""Of a node's cores: the cluster's own pods always ask for some."""
BUSY_FRACTION = 0.1

_OWN_TAINTS = ("node.kubernetes.io/", "nvidia.com/gpu", "amd.com/gpu")
_CONTROL_TAINTS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


def probe_kubernetes(pool: str | None = None, *, run: RunCommand = run_command) -> Cluster:
    """What can be planned for; only the node pool `pool` where one is named."""
    return plan_over(probe_kubernetes_inventory(pool, run=run))


def probe_kubernetes_inventory(
    pool: str | None = None, *, run: RunCommand = run_command
) -> Inventory:
    """Every node of the cluster that the present context points at."""
    nodes, pods = read_lists(run)
    return build_inventory(nodes, pods, pool=pool)


def build_inventory(
    nodes: Sequence[Object], pods: Sequence[Object] | None, *, pool: str | None = None
) -> Inventory:
    """Nodes by pool, as their labels name it; those without such a label are in the pool ``."""
    if not nodes:
        raise EnvironmentFaultError(
            "The Kubernetes cluster shows no nodes to this user.", remedy="kubectl get nodes"
        )
    held = None if pods is None else sum_requests(pods)
    warnings = [] if pods is not None else [_UNKNOWN_USE]
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
        pools=tuple(Pool(name=name) for name in names),
        nodes=tuple(found),
        warnings=tuple(dict.fromkeys(warnings)),
    )
    return inventory if pool is None else inventory.only(pool)


_UNKNOWN_USE = "Pods may not be listed, so it is not known what is free."


def _node(
    node: Object, held: Mapping[str, Mapping[str, float]] | None, warnings: list[str]
) -> ClusterNode:
    name = str(at(node, "metadata", "name") or "?")
    words = read_labels(keys_at(node, "metadata", "labels"))
    taken = None if held is None else held.get(name, {})
    fault = _why_unusable(node)
    devices = _devices(node, words, taken, takes_jobs=fault is None)
    if words.replicas > 1 and devices:
        shared = f"{words.replicas} pods share each GPU in turns"
        warnings.append(f"{devices[0].name}: {shared}; whole GPUs are counted.")
    if fault is None:
        warnings += _taint_notes(node, name)
    cores, free_cores = _amounts(node, "cpu", taken)
    memory, free_memory = _amounts(node, "memory", taken)
    state = _state(fault, devices, cores, free_cores)
    return ClusterNode(
        name=name,
        pools=(words.pool or "",),
        devices=devices,
        memory_bytes=int(memory) or None,
        free_memory_bytes=None if free_memory is None else int(free_memory),
        num_cores=int(cores) or None,
        num_free_cores=None if free_cores is None else int(free_cores),
        disk_bytes=int(parse_quantity(at(node, "status", "allocatable", "ephemeral-storage")))
        or None,
        state=state,
        state_word=state.value,
        reason=fault or "",
    )


def _amounts(
    node: Object, resource: str, taken: Mapping[str, float] | None
) -> tuple[float, float | None]:
    """What jobs may have of it, and what is left."""
    whole = parse_quantity(at(node, "status", "allocatable", resource))
    return whole, None if taken is None else max(0.0, whole - taken.get(resource, 0.0))


def _state(
    fault: str | None, devices: Sequence[Devices], cores: float, free_cores: float | None
) -> NodeState:
    """Of a GPU node by its GPUs, of another by its cores."""
    if fault is not None:
        return NodeState.DRAINED if fault in (_CORDONED, _CONTROL) else NodeState.DOWN
    if free_cores is None:
        return NodeState.READY
    free, whole, is_idle = free_cores, cores, free_cores >= IDLE_FRACTION * cores
    is_full = free_cores <= BUSY_FRACTION * cores
    if devices:
        whole = sum(one.count for one in devices)
        free = sum(one.num_free or 0 for one in devices)
        is_idle, is_full = free >= whole, free <= 0
    return NodeState.IDLE if is_idle else NodeState.ALLOCATED if is_full else NodeState.MIXED


_CORDONED = "it is cordoned"
_CONTROL = "it is kept for the control plane"


def _why_unusable(node: Object) -> str | None:
    if at(node, "spec", "unschedulable"):
        return _CORDONED
    conditions = list_at(node, "status", "conditions")
    ready = [one for one in conditions if at(one, "type") == "Ready"]
    if ready and at(ready[0], "status") != "True":
        told = str(at(ready[0], "message") or "").strip()
        return f"it is not ready{f': {told[:160]}' if told else ''}"
    taints = list_at(node, "spec", "taints")
    return _CONTROL if any(_keeps_out(taint, _CONTROL_TAINTS) for taint in taints) else None


def _keeps_out(taint: object, keys: tuple[str, ...]) -> bool:
    effect = at(taint, "effect")
    return effect in ("NoSchedule", "NoExecute") and str(at(taint, "key")).startswith(keys)


def _taint_notes(node: Object, name: str) -> list[str]:
    """Taints that a job must tolerate, beside the customary ones of GPU nodes."""
    return [
        f"Node {name} wants a toleration for the taint {at(taint, 'key')}."
        for taint in list_at(node, "spec", "taints")
        if _keeps_out(taint, ("",)) and not _keeps_out(taint, _OWN_TAINTS)
    ]


def _devices(
    node: Object, words: LabelWords, taken: Mapping[str, float] | None, *, takes_jobs: bool
) -> tuple[Devices, ...]:
    """One entry per GPU resource; the cards' own name where the catalogue knows it."""
    found = []
    for resource, value in keys_at(node, "status", "allocatable").items():
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
            Devices(
                kind=product,
                label=gpu.name if gpu is not None else product or "unknown GPU",
                hints=words.hints,
                count=max(1, amount // words.replicas),
                num_free=free,
            )
        )
    return tuple(found)
