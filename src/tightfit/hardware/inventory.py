"""A cluster's nodes as its own commands report them, and the groups that can be planned for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tightfit.core.errors import SetupError
from tightfit.core.text import list_some
from tightfit.core.units import GIB
from tightfit.hardware.catalogue import GpuGuess, guess_gpu
from tightfit.hardware.local import describe_cpu_node
from tightfit.hardware.types import Cluster, Gpu, Node, NodeGroup


class NodeState(str, Enum):
    """A node in one word, whatever its cluster calls it."""

    IDLE = "idle"
    MIXED = "mixed"
    """Some of it is taken, some is not."""
    ALLOCATED = "allocated"
    READY = "ready"
    """Takes jobs; how many it has is not known."""
    RESERVED = "reserved"
    """Kept for other jobs, or in maintenance: ours may wait for it."""
    DRAINED = "drained"
    DOWN = "down"

    @property
    def takes_jobs(self) -> bool:
        """Now or once the present ones end."""
        return self not in (NodeState.DRAINED, NodeState.DOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpus:
    """GPUs of one type on one node."""

    kind: str | None
    """The cluster's own word for the type: a GRES type, a product label."""
    label: str
    """What a group of nodes with it is called by."""
    hints: tuple[str, ...] = ()
    """What else the cluster says of the node; some of it may name the card."""
    count: int
    num_free: int | None
    """That no job holds, on a node that takes jobs. None: not known."""

    @property
    def guess(self) -> GpuGuess:
        return guess_gpu(self.kind, self.hints)

    @property
    def name(self) -> str:
        """The catalogue's name, else the cluster's word."""
        gpu = self.guess.gpu
        return gpu.name if gpu is not None else self.kind or "GPU of unknown type"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine of a cluster. None: not known."""

    name: str
    pools: tuple[str, ...]
    """Slurm's partitions, or the one node pool of Kubernetes."""
    devices: tuple[NodeGpus, ...] = ()
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    """That no job has asked for; what processes really use is another matter."""
    num_cores: int | None = None
    """As the scheduler hands them out: hardware threads where it counts those."""
    num_free_cores: int | None = None
    threads_per_core: int = 1
    disk_bytes: int | None = None
    features: tuple[str, ...] = ()
    state: NodeState
    state_word: str
    """The cluster's own word for it."""
    reason: str = ""
    """Why it takes no jobs."""

    @property
    def num_gpus(self) -> int:
        return sum(devices.count for devices in self.devices)

    @property
    def num_free_gpus(self) -> int | None:
        return sum_known([devices.num_free for devices in self.devices])

    @property
    def kind(self) -> str:
        """`2 x A100-SXM4-40GB`, `CPU`: nodes of one partition are counted together by it."""
        return " + ".join(f"{one.count} x {one.name}" for one in self.devices) or "CPU"

    @property
    def is_free(self) -> bool | None:
        """Nothing of it is taken. None: not known."""
        return None if self.state is NodeState.READY else self.state is NodeState.IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """A partition or a node pool."""

    name: str
    max_seconds: float | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All nodes, each once, whichever pools they are in."""

    source: str
    pools: tuple[NodePool, ...]
    nodes: tuple[ClusterNode, ...]
    warnings: tuple[str, ...] = ()

    def only(self, pool: str) -> Inventory:
        """One pool with its nodes."""
        return Inventory(
            source=f"{self.source}:{pool}",
            pools=tuple(found for found in self.pools if found.name == pool),
            nodes=tuple(node for node in self.nodes if pool in node.pools),
            warnings=self.warnings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryTotals:
    """Of some nodes, each counted once. What a node has counts even while it is down; what is free
    does not."""

    num_nodes: int
    num_free_nodes: int | None
    num_gpus: int
    num_free_gpus: int | None
    num_cores: int
    num_free_cores: int | None
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryRow(InventoryTotals):
    """Nodes of one kind in one pool."""

    pool: NodePool
    kind: str
    nodes: tuple[ClusterNode, ...]

    @property
    def states(self) -> dict[NodeState, int]:
        counted = Counter(node.state for node in self.nodes)
        return {state: counted[state] for state in NodeState if counted[state]}


def list_inventory_rows(inventory: Inventory) -> list[InventoryRow]:
    """By pool and kind of node; those with GPUs first. A node of two pools is in the rows of both.

    Memory and cores may differ within a row: `plannable_cluster` goes by the smallest.
    """
    pools = {pool.name: pool for pool in inventory.pools}
    found: dict[tuple[str, str], list[ClusterNode]] = defaultdict(list)
    for node in inventory.nodes:
        for pool in pools.keys() & set(node.pools):
            found[(pool, node.kind)].append(node)
    rows = [
        # A closed partition starts nothing, whatever is free in it.
        InventoryRow(
            pool=pools[name],
            kind=kind,
            nodes=tuple(nodes),
            **_count(nodes, nodes if pools[name].is_open else ()),
        )
        for (name, kind), nodes in found.items()
    ]
    return sorted(rows, key=lambda row: (row.pool.name, row.num_gpus == 0, row.kind))


def count_totals(inventory: Inventory) -> InventoryTotals:
    """Of all nodes. Closed pools have nothing free, unless the node is in an open one too."""
    opened = {pool.name for pool in inventory.pools if pool.is_open}
    usable = [node for node in inventory.nodes if opened.intersection(node.pools)]
    return InventoryTotals(**_count(inventory.nodes, usable))


def _count(nodes: Sequence[ClusterNode], usable: Sequence[ClusterNode]) -> dict[str, Any]:
    return {
        "num_nodes": len(nodes),
        "num_free_nodes": sum_known([node.is_free for node in usable]),
        "num_gpus": sum(node.num_gpus for node in nodes),
        "num_free_gpus": sum_known([node.num_free_gpus for node in usable]),
        "num_cores": sum(node.num_cores or 0 for node in nodes),
        "num_free_cores": sum_known([free_cores(node) for node in usable]),
        "memory_bytes": sum(node.memory_bytes or 0 for node in nodes),
    }


def free_cores(node: ClusterNode) -> int | None:
    """Cores a job could have now: none where the node takes no jobs."""
    return node.num_free_cores if node.state.takes_jobs else 0


def sum_known(amounts: Sequence[int | None]) -> int | None:
    """Their sum; None where one of them is not known."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def list_assumptions(inventory: Inventory) -> list[str]:
    """How the cluster's words for its GPUs were read, where it was not plain."""
    devices = [devices for node in inventory.nodes for devices in node.devices]
    return list(dict.fromkeys(note for one in devices for note in one.guess.warnings))


# The part of an inventory that can be planned for: groups of equal nodes that take jobs.

_Usable = Sequence[tuple[str, ClusterNode]]
"""Nodes that take jobs, each with one of its open pools."""
_Key = tuple[str, str, int, str]
"""Pool, the cluster's word for the GPU, GPUs per node, the GPU: one word may mean several."""
_Member = tuple[ClusterNode, NodeGpus]


def plannable_cluster(inventory: Inventory) -> Cluster:
    """Groups by pool, GPU type and count; memory, cores and disk are a group's smallest.

    CPUs are planned for only where no node has a GPU: whoever has both means the GPUs, and
    says `--on slurm:cpu` otherwise.
    """
    pools = {pool.name: pool for pool in inventory.pools}
    has_gpus = any(node.devices for node in inventory.nodes)
    warnings = [*inventory.warnings, *_left_out(inventory)]
    usable = [
        (pool, node)
        for node in inventory.nodes
        for pool in node.pools
        if pool in pools and pools[pool].is_open and node.state.takes_jobs
    ]
    if has_gpus:
        groups = _gpu_groups(usable, pools, warnings)
        warnings += _cpus_left_out(inventory)
    else:
        groups = _cpu_groups(usable, pools, warnings)
    if not groups:
        system, _, partition = inventory.source.partition(":")
        where = f"Partition {partition}" if partition else f"The cluster ({system})"
        detail = f" {' '.join(warnings[:3])}" if warnings else ""
        raise SetupError(
            f"{where} has no {'GPU node' if has_gpus else 'node'} that can be planned for.{detail}",
            remedy=f"tightfit hardware --on {system} --each    (every node and its state)",
        )
    planned = [node for node in inventory.nodes if bool(node.devices) == has_gpus]
    shared = {tuple(pool for pool in node.pools if pool in pools) for node in planned}
    for names in sorted(names for names in shared if len(names) > 1):
        warnings.append(f"Partitions {' and '.join(names)} share nodes; they are listed in each.")
    return Cluster(
        groups=tuple(groups), source=inventory.source, warnings=tuple(dict.fromkeys(warnings))
    )


def _gpu_groups(
    usable: _Usable, pools: dict[str, NodePool], warnings: list[str]
) -> list[NodeGroup]:
    members: dict[_Key, list[_Member]] = defaultdict(list)
    for pool, node in usable:
        for devices in node.devices:
            # A job uses one slice of a card, however many the node has.
            count = 1 if devices.guess.is_slice else devices.count
            members[(pool, devices.label, count, devices.name)].append((node, devices))
    groups = []
    for key, inside in sorted(members.items()):
        guess = inside[0][1].guess
        warnings += guess.warnings
        if guess.gpu is not None:
            name, limit = _name_group(key, list(members)), pools[key[0]].max_seconds
            groups.append(_gpu_group(name, guess.gpu, inside, count=key[2], max_seconds=limit))
    return groups


def _name_group(key: _Key, keys: Sequence[_Key]) -> str:
    """The pool's name, with what distinguishes the group from others of the pool."""
    pool, label, count, gpu = key
    if pool and [other[0] for other in keys].count(pool) == 1:
        return pool
    is_unique = [other[:3] for other in keys].count(key[:3]) == 1
    return f"{pool}/{count}x{label if is_unique else gpu}".lstrip("/")


def _gpu_group(
    name: str, gpu: Gpu, members: Sequence[_Member], *, count: int, max_seconds: float | None
) -> NodeGroup:
    nodes, free = [node for node, _ in members], [devices.num_free for _, devices in members]
    says_nvlink = any("nvlink" in feature.casefold() for feature in nodes[0].features)
    return NodeGroup(
        name=name,
        node=Node(
            gpu=gpu,
            num_gpus=count,
            host_memory_bytes=_smallest([node.memory_bytes for node in nodes]),
            num_cores=_smallest([node.num_cores for node in nodes]),
            disk_bytes=_smallest([node.disk_bytes for node in nodes]),
            has_nvlink=True if says_nvlink and gpu.nvlink_bytes_per_second else None,
        ),
        num_nodes=len(nodes),
        num_free_nodes=sum_known([None if one is None else one >= count for one in free]),
        max_seconds=max_seconds,
        num_free_gpus=sum_known(free),
    )


def _cpu_groups(
    usable: _Usable, pools: dict[str, NodePool], warnings: list[str]
) -> list[NodeGroup]:
    """By pool, cores and about the same memory (steps of 1.4)."""
    members: dict[tuple[str, int, int], list[ClusterNode]] = defaultdict(list)
    unknown = []
    for pool, node in usable:
        if not node.num_cores or not node.memory_bytes:
            unknown.append(node.name)
            continue
        step = round(2 * math.log2(max(1.0, node.memory_bytes / GIB)))
        members[(pool, node.num_cores, step)].append(node)
    if unknown:
        warnings.append(
            f"{list_some(unknown)}: the cluster states no cores or no memory; left out."
        )
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
    notes = dict.fromkeys(group.node.gpu.notes for group in groups)
    warnings += [f"CPU nodes, {note}." for note in notes]
    return groups


def _cpu_group(name: str, nodes: Sequence[ClusterNode], *, max_seconds: float | None) -> NodeGroup:
    memory = min(node.memory_bytes or 1 for node in nodes)
    cores = min(node.num_cores or 1 for node in nodes)
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
        num_free_nodes=sum_known([node.is_free for node in nodes]),
        max_seconds=max_seconds,
    )


def _smallest(amounts: Sequence[int | None]) -> int | None:
    """None where one is not known."""
    reported = [amount for amount in amounts if amount]
    return min(reported) if len(reported) == len(amounts) else None


def _left_out(inventory: Inventory) -> Iterator[str]:
    """Closed partitions, and nodes that take no jobs with the reason of each."""
    for pool in inventory.pools:
        if not pool.is_open:
            yield f"Partition {pool.name} takes no jobs at present; left out."
    broken = [
        f"{node.name} ({node.state_word}{f': {node.reason}' if node.reason else ''})"
        for node in inventory.nodes
        if not node.state.takes_jobs
    ]
    if broken:
        yield f"Left out, for taking no jobs: {list_some(broken)}."


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
