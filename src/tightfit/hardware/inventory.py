"""A cluster's nodes as they are now: what each has, what of it is free, why some take no jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from tightfit.hardware.gpu_hints import Guess, guess_gpu


class NodeState(str, Enum):
    """A node in one word, whatever its cluster calls it."""

    IDLE = "idle"
    MIXED = "mixed"
    """Some of it is taken, some is not."""
    ALLOCATED = "allocated"
    READY = "ready"
    """Takes jobs; how many it has is not told."""
    RESERVED = "reserved"
    """Kept for other jobs, or in maintenance: ours may wait for it."""
    DRAINED = "drained"
    DOWN = "down"

    @property
    def takes_jobs(self) -> bool:
        """Now or once the present ones end."""
        return self not in (NodeState.DRAINED, NodeState.DOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """GPUs of one type on one node."""

    kind: str | None
    """The cluster's own word for the type: a GRES type, a product label."""
    label: str
    """What a group of nodes with it is called by."""
    hints: tuple[str, ...] = ()
    """What else the cluster says of the node; some of it may name the card."""
    count: int
    num_free: int | None
    """That no job holds, on a node that takes jobs. None: not told."""

    @property
    def guess(self) -> Guess:
        return _guess(self.kind, self.hints)

    @property
    def name(self) -> str:
        """The catalogue's name, else the cluster's word."""
        gpu = self.guess.gpu
        return gpu.name if gpu is not None else self.kind or "GPU of unknown type"


@lru_cache(maxsize=1024)
def _guess(kind: str | None, hints: tuple[str, ...]) -> Guess:
    return guess_gpu(kind, hints)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine of a cluster. A None was not told."""

    name: str
    pools: tuple[str, ...]
    """Slurm's partitions, or the one node pool of Kubernetes."""
    devices: tuple[Devices, ...] = ()
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
        return total_of([devices.num_free for devices in self.devices])

    @property
    def kind(self) -> str:
        """`2 x A100-SXM4-40GB`, `CPU`: nodes of one partition are counted together by it."""
        if not self.devices:
            return "CPU"
        return " + ".join(f"{devices.count} x {devices.name}" for devices in self.devices)

    @property
    def is_free(self) -> bool | None:
        """Nothing of it is taken. None: not told."""
        if self.state is NodeState.READY:
            return None
        return self.state is NodeState.IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A partition or a node pool."""

    name: str
    max_seconds: float | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All nodes, each once, whichever pools they are in."""

    source: str
    pools: tuple[Pool, ...]
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
class InventoryRow:
    """Nodes of one kind in one pool."""

    pool: Pool
    kind: str
    nodes: tuple[ClusterNode, ...]

    @property
    def states(self) -> dict[NodeState, int]:
        counted = Counter(node.state for node in self.nodes)
        return {state: counted[state] for state in NodeState if counted[state]}

    @property
    def num_gpus(self) -> int:
        return sum(node.num_gpus for node in self.nodes)

    @property
    def num_free_gpus(self) -> int | None:
        return self._free([node.num_free_gpus for node in self.nodes])

    @property
    def num_free_nodes(self) -> int | None:
        frees = [node.is_free for node in self.nodes]
        return self._free([None if free is None else int(free) for free in frees])

    @property
    def num_free_cores(self) -> int | None:
        return self._free([free_cores(node) for node in self.nodes])

    def _free(self, amounts: Sequence[int | None]) -> int | None:
        """A closed partition starts nothing, whatever is free in it."""
        return total_of(amounts) if self.pool.is_open else 0


def free_cores(node: ClusterNode) -> int | None:
    """Cores a job could have now: none where the node takes no jobs."""
    return node.num_free_cores if node.state.takes_jobs else 0


def list_rows(inventory: Inventory) -> list[InventoryRow]:
    """By pool and kind of node; those with GPUs first. A node of two pools is in the rows of both.

    Memory and cores may differ within a row: `plannable.py` goes by the smallest.
    """
    pools = {pool.name: pool for pool in inventory.pools}
    found: dict[tuple[str, str], list[ClusterNode]] = defaultdict(list)
    for node in inventory.nodes:
        for pool in pools.keys() & set(node.pools):
            found[(pool, node.kind)].append(node)
    rows = [
        InventoryRow(pool=pools[name], kind=kind, nodes=tuple(nodes))
        for (name, kind), nodes in found.items()
    ]
    return sorted(rows, key=lambda row: (row.pool.name, row.num_gpus == 0, row.kind))


def total_of(amounts: Sequence[int | None]) -> int | None:
    """Their sum; None where one of them was not told."""
    total = 0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of all nodes, each counted once."""

    num_nodes: int
    num_free_nodes: int | None
    num_gpus: int
    num_free_gpus: int | None
    num_cores: int
    num_free_cores: int | None
    memory_bytes: int


def count_totals(inventory: Inventory) -> Totals:
    """What a node has counts even while it is down; what is free does not. Closed pools have
    nothing free, unless the node is in an open one too."""
    opened = {pool.name for pool in inventory.pools if pool.is_open}
    nodes = inventory.nodes
    usable = [node for node in nodes if opened.intersection(node.pools)]
    frees = [node.is_free for node in usable]
    return Totals(
        num_nodes=len(nodes),
        num_free_nodes=total_of([None if free is None else int(free) for free in frees]),
        num_gpus=sum(node.num_gpus for node in nodes),
        num_free_gpus=total_of([node.num_free_gpus for node in usable]),
        num_cores=sum(node.num_cores or 0 for node in nodes),
        num_free_cores=total_of([free_cores(node) for node in usable]),
        memory_bytes=sum(node.memory_bytes or 0 for node in nodes),
    )


def list_assumptions(inventory: Inventory) -> list[str]:
    """How the cluster's words for its GPUs were read, where it was not plain."""
    devices = [devices for node in inventory.nodes for devices in node.devices]
    return list(dict.fromkeys(note for one in devices for note in one.guess.warnings))
