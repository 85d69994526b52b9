"""Groups of workers (local, Slurm, Kubernetes, Ray) and the pool that starts and stops them."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from pydantic import PositiveInt, TypeAdapter, ValidationError

from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.reading import read_bytes
from tightfit.core.text import did_you_mean
from tightfit.hardware.inventory import ClusterNode, Inventory
from tightfit.hardware.machine import read_machine
from tightfit.hardware.types import Gpu

LOCAL, KUBERNETES, ALL, RAY = "local", "k8s", "all", "ray"
MAX_WORKERS = 100_000


class WorkerBackend(str, Enum):
    """Who starts the workers."""

    LOCAL = "local"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Workers on nodes of one type in a group."""

    name: str
    gpu: Gpu | None
    """None: a CPU, or a card that nobody knows."""
    num_workers: int
    num_cores: int | None = None
    num_devices: int | None = None
    """What they share, where a worker has none of its own: this machine, or its cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """One array of equal workers."""

    name: str
    kind: WorkerBackend
    num_workers: int
    partition: str | None = None
    gpus_per_worker: int = 0
    cores_per_worker: int | None = None
    excluded: tuple[str, ...] = ()
    """Nodes of the partition that belong to another group."""
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


def choose_slurm_groups(
    inventory: Inventory, words: Sequence[str], *, most: int | None
) -> tuple[WorkerGroup, ...]:
    """One group for the GPUs and one for the CPU nodes of each partition, each node once."""
    pools = {pool.name: pool for pool in inventory.pools}
    unknown = next((word for word in words if word != ALL and word not in pools), None)
    if unknown is not None:
        raise NotFoundError(
            f"Slurm has no partition `{unknown[:60]}`.{did_you_mean(unknown[:60], list(pools))}",
            remedy=f"choose of: {', '.join(sorted(pools)[:20])}, all, local, k8s",
        )
    names = list(words) if tuple(words) != (ALL,) else _smallest_first(inventory)
    seen: set[str] = set()
    groups: list[WorkerGroup] = []
    for name in names:
        inside = [node for node in inventory.nodes if name in node.pools]
        nodes = [node for node in inside if node.state.takes_jobs and node.name not in seen]
        seen.update(node.name for node in nodes)
        if pools[name].is_open:
            groups += _groups_of_partition(name, nodes, inside)
    if not groups:
        raise SetupError(
            f"No node of {', '.join(words)} takes jobs.", remedy="tightfit hardware --on slurm"
        )
    return tuple(
        group if most is None else replace(group, num_workers=min(most, group.num_workers))
        for group in groups
    )


def _smallest_first(inventory: Inventory) -> list[str]:
    """Of partitions that share nodes, the particular one before the one that has them all."""
    sizes = Counter(pool for node in inventory.nodes for pool in node.pools)
    names = [pool.name for pool in inventory.pools if pool.is_open]
    return sorted(names, key=lambda name: (sizes[name], name))


def _groups_of_partition(
    name: str, nodes: Sequence[ClusterNode], inside: Sequence[ClusterNode]
) -> list[WorkerGroup]:
    """One worker for each GPU; one for each node without, in an array that excludes the others."""
    gpu_nodes = [node for node in nodes if node.num_gpus]
    cpu_nodes = [node for node in nodes if not node.num_gpus]
    groups = []
    for suffix, mine in (("gpu", gpu_nodes), ("cpu", cpu_nodes)):
        if not mine:
            continue
        excluded = {node.name for node in inside} - {node.name for node in mine}
        cores = min((node.num_cores or 1) // max(1, node.num_gpus) for node in mine)
        groups.append(
            WorkerGroup(
                name=f"{name}-{suffix}" if gpu_nodes and cpu_nodes else name,
                kind=WorkerBackend.SLURM,
                num_workers=sum(node.num_gpus or 1 for node in mine),
                partition=name,
                gpus_per_worker=1 if suffix == "gpu" else 0,
                cores_per_worker=max(1, cores),
                # Slurm keeps workers with a GPU off nodes that have none by itself.
                excluded=tuple(sorted(excluded)) if suffix == "cpu" else (),
                types=count_node_types(mine),
            )
        )
    return groups


def count_node_types(nodes: Sequence[ClusterNode]) -> tuple[NodeType, ...]:
    """The workers on these nodes, by type of node."""
    found: dict[str, NodeType] = {}
    for node in nodes:
        devices = node.devices[0] if node.devices else None
        name = "CPU" if devices is None else devices.name
        found[name] = NodeType(
            name=name,
            gpu=None if devices is None else devices.guess.gpu,
            num_workers=(found[name].num_workers if name in found else 0) + (node.num_gpus or 1),
            num_cores=node.num_cores,
        )
    return tuple(found.values())


def make_local_group(*, num_gpus: int, num_workers: int | None, gpu: Gpu | None) -> WorkerGroup:
    """One worker for each GPU, or one in all."""
    count = num_workers or max(1, num_gpus)
    kind = NodeType(
        name="CPU" if gpu is None else gpu.name,
        gpu=gpu,
        num_workers=count,
        num_devices=max(1, num_gpus),
    )
    return WorkerGroup(
        name=LOCAL,
        kind=WorkerBackend.LOCAL,
        num_workers=count,
        gpus_per_worker=1 if num_gpus else 0,
        types=(kind,),
    )


THREADS_VARIABLE = "OMP_NUM_THREADS"


def share_threads(group: WorkerGroup) -> int | None:
    """Threads of each of several workers on this machine's CPU; None: as their libraries choose.

    Two workers with as many threads as there are cores wait for each other at every product.
    """
    is_shared = group.kind is WorkerBackend.LOCAL and group.num_workers > 1
    if not is_shared or group.gpus_per_worker or THREADS_VARIABLE in os.environ:
        return None
    return max(1, read_machine().num_usable_cores // group.num_workers)


# The pool of started workers: recorded on disk, counted, topped up and stopped.

JOBS_FILE = "jobs.json"
EXTRA_STARTS = 8
"""Starts without a single answer, beside two for each worker, after which something is wrong."""


class StartedWorkers(Frozen):
    """One start: processes here, an array, a Job."""

    group: str
    kind: WorkerBackend
    names: tuple[str, ...]
    """Process ids with their start times, an array's number, a Job's name."""
    num_workers: PositiveInt
    host: str | None = None


class WorkerStarter(Protocol):
    """Starts and stops workers on one backend."""

    def start(self, group: WorkerGroup, count: int) -> tuple[str, ...]:
        """Start workers; the names to find them by."""

    def find(self, group: WorkerGroup) -> Mapping[str, int]:
        """The names of this farm's workers in the group, and how many each stands for."""

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        """Workers that run or will run."""

    def stop(self, jobs: Sequence[StartedWorkers]) -> None: ...

    def name_cancel_command(self, jobs: Sequence[StartedWorkers]) -> str:
        """What ends these workers from a shell; empty where nothing runs or no command does."""


def farm_prefix(folder: Path, group: WorkerGroup) -> str:
    """Begins the name of every job of a farm, so that a later submitter finds it."""
    mark = hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()
    return f"farm-{mark}-{group.name}"


_JOBS = TypeAdapter(tuple[StartedWorkers, ...])


class WorkerPool:
    """All workers of one farm."""

    def __init__(
        self,
        folder: Path,
        groups: Sequence[WorkerGroup],
        starters: Mapping[WorkerBackend, WorkerStarter],
    ) -> None:
        self.jobs: list[StartedWorkers] = list(read_jobs_file(folder))
        self._folder = folder
        self._groups = groups
        self._starters = starters
        self._num_futile_starts: dict[str, int] = {}
        # Those that were started just before a submitter died, and never recorded.
        recorded = {name for job in self.jobs for name in job.names}
        for group in groups:
            for name, count in starters[group.kind].find(group).items():
                if name not in recorded:
                    self.jobs.append(_record(group, (name,), count))

    def top_up(self, *, num_left: int, report: Callable[[str], None]) -> None:
        """Start missing workers, at most one for each chunk that is left."""
        for group in self._groups:
            wanted = min(group.num_workers, num_left)
            missing = wanted - self.count_alive(group)
            if missing <= 0:
                continue
            self._check_starts(group, missing)
            names = self._starters[group.kind].start(group, missing)
            self.jobs.append(_record(group, names, missing))
            content = _JOBS.dump_json(tuple(self.jobs), indent=1)
            write_atomic(self._folder / JOBS_FILE, content + b"\n")
            report(f"{group.name}: started {missing} ({', '.join(names[:4])})")

    def count_alive(self, group: WorkerGroup) -> int:
        mine = [job for job in self.jobs if job.group == group.name and job.kind is group.kind]
        return self._starters[group.kind].count_alive(mine) if mine else 0

    def note_progress(self) -> None:
        """Answers came: the workers that were started so far were not started for nothing."""
        self._num_futile_starts.clear()

    def stop(self) -> None:
        """Tell every worker to give back what it has and end."""
        for kind, starter in self._starters.items():
            jobs = [job for job in self.jobs if job.kind is kind]
            if jobs:
                starter.stop(jobs)

    def list_cancel_commands(self) -> tuple[str, ...]:
        """What ends the workers from a shell, one command for each backend."""
        commands = (
            starter.name_cancel_command([job for job in self.jobs if job.kind is kind])
            for kind, starter in self._starters.items()
        )
        return tuple(filter(None, commands))

    def _check_starts(self, group: WorkerGroup, missing: int) -> None:
        """Before the same start fails again and again."""
        count = self._num_futile_starts.get(group.name, 0)
        if count >= EXTRA_STARTS + 2 * group.num_workers:
            last = _last_log_line(self._folder)
            raise SetupError(
                f"Workers in {group.name} end without an answer{f': {last}' if last else ''}.",
                remedy=f"see {self._folder / 'logs'}; the same command goes on",
            )
        self._num_futile_starts[group.name] = count + missing


def _record(group: WorkerGroup, names: tuple[str, ...], count: int) -> StartedWorkers:
    is_local = group.kind is WorkerBackend.LOCAL
    return StartedWorkers(
        group=group.name,
        kind=group.kind,
        names=names,
        num_workers=count,
        host=socket.gethostname() if is_local else None,
    )


def read_jobs_file(folder: Path) -> tuple[StartedWorkers, ...]:
    try:
        return _JOBS.validate_json(read_bytes(folder / JOBS_FILE))
    except (FileNotFoundError, ValidationError):
        return ()


def _last_log_line(folder: Path) -> str:
    """The last line of the newest log, without its end mark."""
    logs = sorted((folder / "logs").glob("*"), key=lambda path: path.stat().st_mtime)
    for path in reversed(logs):
        lines = path.read_bytes()[-4000:].decode("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if line.startswith(("error: ", "broken: "))] or lines
        if errors:
            return errors[-1].removeprefix("error: ").removeprefix("broken: ").rstrip(".")[:300]
    return ""
