"""Where workers can run: this machine, partitions of a Slurm cluster, pods of a Kubernetes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UsageError
from tightfit.core.suggest import did_you_mean
from tightfit.hardware.inventory import ClusterNode, Inventory
from tightfit.hardware.types import Gpu

LOCAL, KUBERNETES, ALL, RAY = "local", "k8s", "all", "ray"
MAX_WORKERS = 100_000


class PlaceKind(str, Enum):
    """Who starts the workers."""

    LOCAL = "local"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Workers of one kind in a place."""

    name: str
    gpu: Gpu | None
    """None: a CPU, or a card that nobody knows."""
    num_workers: int
    num_cores: int | None = None
    num_devices: int | None = None
    """What they share, where a worker has none of its own: this machine, or its cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One array of equal workers."""

    name: str
    kind: PlaceKind
    num_workers: int
    partition: str | None = None
    gpus_per_worker: int = 0
    cores_per_worker: int | None = None
    excluded: tuple[str, ...] = ()
    """Nodes of the partition that belong to another place."""
    types: tuple[NodeType, ...] = ()


def read_partitions(text: str | None) -> tuple[str, ...]:
    """`all`, `gpu,cpu`, `local`, `k8s` as words."""
    words = tuple(dict.fromkeys(word.strip() for word in (text or LOCAL).split(",")))
    if not all(words):
        raise UsageError(f"`--partitions {text}` names nothing.", remedy="--partitions all")
    alone = {LOCAL, KUBERNETES, ALL}
    if len(words) > 1 and alone.intersection(words):
        word = next(word for word in words if word in alone)
        raise UsageError(
            f"`--partitions`: `{word}` stands alone.", remedy=f"--partitions {word}, or gpu,cpu"
        )
    return words


def choose_slurm_places(
    inventory: Inventory, words: Sequence[str], *, most: int | None
) -> tuple[Place, ...]:
    """One place for the GPUs and one for the CPU nodes of each partition, each node once."""
    pools = {pool.name: pool for pool in inventory.pools}
    unknown = next((word for word in words if word != ALL and word not in pools), None)
    if unknown is not None:
        raise NotFoundError(
            f"Slurm has no partition `{unknown[:60]}`.{did_you_mean(unknown[:60], list(pools))}",
            remedy=f"choose of: {', '.join(sorted(pools)[:20])}, all, local, k8s",
        )
    names = list(words) if tuple(words) != (ALL,) else _smallest_first(inventory)
    seen: set[str] = set()
    places: list[Place] = []
    for name in names:
        inside = [node for node in inventory.nodes if name in node.pools]
        nodes = [node for node in inside if node.state.takes_jobs and node.name not in seen]
        seen.update(node.name for node in nodes)
        if pools[name].is_open:
            places += _places_of(name, nodes, inside)
    if not places:
        raise EnvironmentFaultError(
            f"No node of {', '.join(words)} takes jobs.", remedy="tightfit hardware --on slurm"
        )
    return tuple(
        place if most is None else replace(place, num_workers=min(most, place.num_workers))
        for place in places
    )


def _smallest_first(inventory: Inventory) -> list[str]:
    """Of partitions that share nodes, the particular one before the one that has them all."""

    def size(name: str) -> int:
        return sum(name in node.pools for node in inventory.nodes)

    names = [pool.name for pool in inventory.pools if pool.is_open]
    return sorted(names, key=lambda name: (size(name), name))


def _places_of(
    name: str, nodes: Sequence[ClusterNode], inside: Sequence[ClusterNode]
) -> list[Place]:
    with_gpus = [node for node in nodes if node.num_gpus]
    without = [node for node in nodes if not node.num_gpus]
    places = []
    if with_gpus:
        cores = [(node.num_cores or 1) // node.num_gpus for node in with_gpus]
        places.append(
            Place(
                name=name if not without else f"{name}-gpu",
                kind=PlaceKind.SLURM,
                num_workers=sum(node.num_gpus for node in with_gpus),
                partition=name,
                gpus_per_worker=1,
                cores_per_worker=max(1, min(cores)),
                types=count_types(with_gpus),
            )
        )
    if without:
        others = {node.name for node in inside} - {node.name for node in without}
        places.append(
            Place(
                name=name if not with_gpus else f"{name}-cpu",
                kind=PlaceKind.SLURM,
                num_workers=len(without),
                partition=name,
                cores_per_worker=max(1, min(node.num_cores or 1 for node in without)),
                excluded=tuple(sorted(others)),
                types=count_types(without),
            )
        )
    return places


def count_types(nodes: Sequence[ClusterNode]) -> tuple[NodeType, ...]:
    found: dict[str, NodeType] = {}
    for node in nodes:
        devices = node.devices[0] if node.devices else None
        name = "CPU" if devices is None else devices.name
        gpu = None if devices is None else devices.guess.gpu
        added = node.num_gpus or 1
        before = found[name].num_workers if name in found else 0
        found[name] = NodeType(
            name=name, gpu=gpu, num_workers=before + added, num_cores=node.num_cores
        )
    return tuple(found.values())


def local_place(*, num_gpus: int, num_workers: int | None, gpu: Gpu | None) -> Place:
    """One worker for each GPU, or one in all."""
    count = num_workers or max(1, num_gpus)
    kind = NodeType(
        name="CPU" if gpu is None else gpu.name,
        gpu=gpu,
        num_workers=count,
        num_devices=max(1, num_gpus),
    )
    return Place(
        name=LOCAL,
        kind=PlaceKind.LOCAL,
        num_workers=count,
        gpus_per_worker=1 if num_gpus else 0,
        types=(kind,),
    )
