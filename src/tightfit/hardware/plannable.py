"""The part of an inventory that can be planned for: groups of equal nodes that take jobs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.units import GIB
from tightfit.hardware.cpu import describe_cpu_node
from tightfit.hardware.inventory import ClusterNode, Devices, Inventory, Pool, total_of
from tightfit.hardware.types import Cluster, Gpu, Node, NodeGroup

_Key = tuple[str, str, int, str]
"""Pool, the cluster's word for the GPU, GPUs per node, the GPU: one word may mean several."""
_Member = tuple[ClusterNode, Devices]


def plan_over(inventory: Inventory) -> Cluster:
    """Groups by pool, GPU type and count; memory, cores and disk are a group's smallest.

    CPUs are planned for only where no node has a GPU: whoever has both means the GPUs, and
    says `--on slurm:cpu` otherwise.
    """
    pools = {pool.name: pool for pool in inventory.pools}
    has_gpus = any(node.devices for node in inventory.nodes)
    warnings = [*inventory.warnings, *_left_out(inventory)]
    if has_gpus:
        groups = _gpu_groups(inventory, pools, warnings)
        warnings += _cpus_left_out(inventory)
    else:
        groups = _cpu_groups(inventory, pools, warnings)
    if not groups:
        raise _nothing(inventory, warnings)
    planned = [node for node in inventory.nodes if bool(node.devices) == has_gpus]
    warnings += _shared_nodes(planned, set(pools))
    return Cluster(
        groups=tuple(groups), source=inventory.source, warnings=tuple(dict.fromkeys(warnings))
    )


def _usable(inventory: Inventory, pools: dict[str, Pool]) -> Iterator[tuple[str, ClusterNode]]:
    for node in inventory.nodes:
        for pool in node.pools:
            if pool in pools and pools[pool].is_open and node.state.takes_jobs:
                yield pool, node


def _gpu_groups(
    inventory: Inventory, pools: dict[str, Pool], warnings: list[str]
) -> list[NodeGroup]:
    members: dict[_Key, list[_Member]] = defaultdict(list)
    for pool, node in _usable(inventory, pools):
        for devices in node.devices:
            # A job uses one slice of a card, however many the node has.
            count = 1 if devices.guess.is_slice else devices.count
            members[(pool, devices.label, count, devices.name)].append((node, devices))
    groups = []
    for key, inside in sorted(members.items()):
        guess, limit = inside[0][1].guess, pools[key[0]].max_seconds
        warnings += guess.warnings
        if guess.gpu is not None:
            group = _gpu_group(guess.gpu, inside, count=key[2])
            name = _name_group(key, list(members))
            groups.append(group.model_copy(update={"name": name, "max_seconds": limit}))
    return groups


def _name_group(key: _Key, keys: Sequence[_Key]) -> str:
    """The pool's name, with what tells the group from others of the pool."""
    pool, label, count, gpu = key
    if pool and [other[0] for other in keys].count(pool) == 1:
        return pool
    is_unique = [other[:3] for other in keys].count(key[:3]) == 1
    return f"{pool}/{count}x{label if is_unique else gpu}".lstrip("/")


def _gpu_group(gpu: Gpu, members: Sequence[_Member], *, count: int) -> NodeGroup:
    nodes, free = [node for node, _ in members], [devices.num_free for _, devices in members]
    says_nvlink = any("nvlink" in feature.casefold() for feature in nodes[0].features)
    has_free = [None if number is None else int(number >= count) for number in free]
    return NodeGroup(
        name=gpu.name,
        node=Node(
            gpu=gpu,
            num_gpus=count,
            host_memory_bytes=_smallest([node.memory_bytes for node in nodes]),
            num_cores=_smallest([node.num_cores for node in nodes]),
            disk_bytes=_smallest([node.disk_bytes for node in nodes]),
            has_nvlink=True if says_nvlink and gpu.nvlink_bytes_per_second else None,
        ),
        num_nodes=len(nodes),
        num_free_nodes=total_of(has_free),
        num_free_gpus=total_of(free),
    )


def _cpu_groups(
    inventory: Inventory, pools: dict[str, Pool], warnings: list[str]
) -> list[NodeGroup]:
    """By pool, cores and about the same memory (steps of 1.4)."""
    members: dict[tuple[str, int, int], list[ClusterNode]] = defaultdict(list)
    untold = []
    for pool, node in _usable(inventory, pools):
        if not node.num_cores or not node.memory_bytes:
            untold.append(node.name)
            continue
        step = round(2 * math.log2(max(1.0, node.memory_bytes / GIB)))
        members[(pool, node.num_cores, step)].append(node)
    if untold:
        warnings.append(f"{list_some(untold)}: the cluster tells no cores or no memory; left out.")
    kinds = [pool for pool, _, _ in members]
    sizes = [(pool, cores) for pool, cores, _ in members]
    groups = []
    for (pool, cores, _), nodes in sorted(members.items()):
        memory = min(node.memory_bytes or 0 for node in nodes)
        label = f"{pool}/{cores}-cores".lstrip("/")
        if sizes.count((pool, cores)) > 1:
            label = f"{label}-{round(memory / GIB)}GiB"
        name = pool if pool and kinds.count(pool) == 1 else label
        groups.append(_cpu_group(name, nodes, max_seconds=pools[pool].max_seconds))
    if groups:
        notes = dict.fromkeys(group.node.gpu.notes for group in groups)
        warnings += [f"CPU nodes, {note}." for note in notes]
    return groups


def _cpu_group(name: str, nodes: Sequence[ClusterNode], *, max_seconds: float | None) -> NodeGroup:
    memory = min(node.memory_bytes or 1 for node in nodes)
    cores = min(node.num_cores or 1 for node in nodes)
    free = total_of([None if node.is_free is None else int(node.is_free) for node in nodes])
    cpu = describe_cpu_node(
        num_cores=cores,
        memory_bytes=memory,
        features=nodes[0].features,
        threads_per_core=max(node.threads_per_core for node in nodes),
    )
    return NodeGroup(
        name=name,
        node=Node(
            gpu=cpu,
            num_gpus=1,
            host_memory_bytes=memory,
            num_cores=cores,
            disk_bytes=_smallest([node.disk_bytes for node in nodes]),
        ),
        num_nodes=len(nodes),
        num_free_nodes=free,
        max_seconds=max_seconds,
    )


def _smallest(amounts: Sequence[int | None]) -> int | None:
    """None where one was not told."""
    told = [amount for amount in amounts if amount]
    return min(told) if len(told) == len(amounts) else None


def _left_out(inventory: Inventory) -> Iterator[str]:
    """Closed partitions, and nodes that take no jobs with the reason of each."""
    for pool in inventory.pools:
        if not pool.is_open:
            yield f"Partition {pool.name} takes no jobs at present; left out."
    broken = [describe_fault(node) for node in inventory.nodes if not node.state.takes_jobs]
    if broken:
        yield f"Left out, for taking no jobs: {list_some(broken)}."


def describe_fault(node: ClusterNode) -> str:
    """`gpu03 (drain: bad fan)`."""
    return f"{node.name} ({node.state_word}{f': {node.reason}' if node.reason else ''})"


def _cpus_left_out(inventory: Inventory) -> Iterator[str]:
    plain = [node for node in inventory.nodes if not node.devices and node.state.takes_jobs]
    if not plain:
        return
    with_gpus = {pool for node in inventory.nodes if node.devices for pool in node.pools}
    only_cpus = sorted({pool for node in plain for pool in node.pools} - with_gpus - {""})
    source = inventory.source.partition(":")[0]
    remedy = f" (--on {source}:{only_cpus[0]} plans for them)" if only_cpus else ""
    count = "1 node" if len(plain) == 1 else f"{len(plain)} nodes"
    names = list_some([node.name for node in plain])
    yield f"{count} without GPUs not planned for: {names}{remedy}."


def list_some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _shared_nodes(nodes: Sequence[ClusterNode], named: set[str]) -> Iterator[str]:
    shared = {tuple(pool for pool in node.pools if pool in named) for node in nodes}
    for names in sorted(names for names in shared if len(names) > 1):
        yield f"Partitions {' and '.join(names)} share nodes; they are listed in each."


def _nothing(inventory: Inventory, warnings: Sequence[str]) -> EnvironmentFaultError:
    system, _, partition = inventory.source.partition(":")
    where = f"Partition {partition}" if partition else f"The cluster ({system})"
    what = "GPU node" if any(node.devices for node in inventory.nodes) else "node"
    detail = f" {' '.join(warnings[:3])}" if warnings else ""
    return EnvironmentFaultError(
        f"{where} has no {what} that can be planned for.{detail}",
        remedy=f"tightfit hardware --on {system} --each    (every node and its state)",
    )
