"""Groups of workers (local, Slurm, Kubernetes, Ray) and the pool that starts and stops them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from pydantic import PositiveInt, TypeAdapter, ValidationError

from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.suggest import did_you_mean
from tightfit.hardware.inventory import ClusterNode, Inventory
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

    def size(name: str) -> int:
        return sum(name in node.pools for node in inventory.nodes)

    names = [pool.name for pool in inventory.pools if pool.is_open]
    return sorted(names, key=lambda name: (size(name), name))


def _groups_of_partition(
    name: str, nodes: Sequence[ClusterNode], inside: Sequence[ClusterNode]
) -> list[WorkerGroup]:
    with_gpus = [node for node in nodes if node.num_gpus]
    without = [node for node in nodes if not node.num_gpus]
    groups = []
    if with_gpus:
        cores = [(node.num_cores or 1) // node.num_gpus for node in with_gpus]
        groups.append(
            WorkerGroup(
                name=name if not without else f"{name}-gpu",
                kind=WorkerBackend.SLURM,
                num_workers=sum(node.num_gpus for node in with_gpus),
                partition=name,
                gpus_per_worker=1,
                cores_per_worker=max(1, min(cores)),
                types=count_node_types(with_gpus),
            )
        )
    if without:
        others = {node.name for node in inside} - {node.name for node in without}
        groups.append(
            WorkerGroup(
                name=name if not with_gpus else f"{name}-cpu",
                kind=WorkerBackend.SLURM,
                num_workers=len(without),
                partition=name,
                cores_per_worker=max(1, min(node.num_cores or 1 for node in without)),
                excluded=tuple(sorted(others)),
                types=count_node_types(without),
            )
        )
    return groups


def count_node_types(nodes: Sequence[ClusterNode]) -> tuple[NodeType, ...]:
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
    """One way to start workers."""

    def start(self, group: WorkerGroup, count: int) -> StartedWorkers: ...

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        """Workers that run or will run."""

    def find_lost(
        self, group: WorkerGroup, known: Sequence[StartedWorkers]
    ) -> list[StartedWorkers]:
        """Those that were started just before a submitter died, and never noted."""

    def stop(self, jobs: Sequence[StartedWorkers]) -> None: ...


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
        self._num_in_vain: dict[str, int] = {}
        for group in groups:
            self.jobs += starters[group.kind].find_lost(group, self.jobs)

    def top_up(self, *, num_left: int, report: Callable[[str], None]) -> int:
        """Start what is missing, at most one worker for each chunk that is left; how many."""
        started = 0
        for group in self._groups:
            wanted = min(group.num_workers, num_left)
            missing = wanted - self.count_alive(group)
            if missing <= 0:
                continue
            self._refuse_in_vain(group, missing)
            job = self._starters[group.kind].start(group, missing)
            self.jobs.append(job)
            self._write()
            started += missing
            report(f"{group.name}: started {missing} ({', '.join(job.names[:4])})")
        return started

    def count_alive(self, group: WorkerGroup) -> int:
        mine = [job for job in self.jobs if job.group == group.name and job.kind is group.kind]
        return self._starters[group.kind].count_alive(mine) if mine else 0

    def note_progress(self) -> None:
        self._num_in_vain.clear()

    def stop(self) -> None:
        """Tell every worker to give back what it has and end."""
        for kind, starter in self._starters.items():
            jobs = [job for job in self.jobs if job.kind is kind]
            if jobs:
                starter.stop(jobs)

    def _refuse_in_vain(self, group: WorkerGroup, missing: int) -> None:
        """Before the same start fails again and again."""
        count = self._num_in_vain.get(group.name, 0)
        if count >= EXTRA_STARTS + 2 * group.num_workers:
            last = _last_log_line(self._folder)
            raise SetupError(
                f"Workers in {group.name} end without an answer{f': {last}' if last else ''}.",
                remedy=f"see {self._folder / 'logs'}; the same command goes on",
            )
        self._num_in_vain[group.name] = count + missing

    def _write(self) -> None:
        content = _JOBS.dump_json(tuple(self.jobs), indent=1)
        write_atomic(self._folder / JOBS_FILE, content + b"\n")


def read_jobs_file(folder: Path) -> tuple[StartedWorkers, ...]:
    try:
        return _JOBS.validate_json((folder / JOBS_FILE).read_bytes())
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
