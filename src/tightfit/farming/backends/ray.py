"""Workers as detached actors of an existing Ray cluster."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.core.errors import SetupError, UserError
from tightfit.farming.worker_pool import RAY, NodeType, StartedWorkers, WorkerBackend, WorkerGroup

NAMESPACE = "tightfit-farm"
ADDRESS_VARIABLE = "RAY_ADDRESS"
END_SECONDS = 20.0
"""What a worker gets to give its leases back in, before it is ended."""
POLL_SECONDS = 0.2


def find_ray_groups(*, most: int | None) -> tuple[WorkerGroup, ...]:
    """One actor for each GPU, and one for each node without."""
    ray = connect_ray()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = sum(int(held.get("GPU", 0)) for held in nodes)
    without = [held for held in nodes if not held.get("GPU") and held.get("CPU", 0) >= 1]
    groups = []
    if num_gpus:
        groups.append(_make_group("gpu", num_gpus, gpus=1, cores=1, most=most))
    if without:
        cores = int(min(held["CPU"] for held in without))
        groups.append(_make_group("cpu", len(without), gpus=0, cores=cores, most=most))
    if not groups:
        raise SetupError("The Ray cluster has no free node with a CPU.", remedy="ray status")
    return tuple(groups)


def _make_group(kind: str, count: int, *, gpus: int, cores: int, most: int | None) -> WorkerGroup:
    name = "CPU" if kind == "cpu" else "GPU"
    return WorkerGroup(
        name=f"{RAY}-{kind}",
        kind=WorkerBackend.RAY,
        num_workers=count if most is None else min(most, count),
        gpus_per_worker=gpus,
        cores_per_worker=cores,
        types=(NodeType(name=name, gpu=None, num_workers=count, num_cores=cores),),
    )


def connect_ray() -> Any:
    """The ray module, connected to the cluster of RAY_ADDRESS."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise SetupError(
            "`--engine ray` needs the package ray, which is not installed here.",
            remedy="pip install 'tightfit[ray]', or leave --engine out: --partitions all needs "
            "nothing but Slurm",
        ) from error
    if ray.is_initialized():
        return ray
    address = os.environ.get(ADDRESS_VARIABLE, "auto")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SetupError(
            f"No Ray cluster answers at `{address}`, or it does not let us in.",
            remedy=f"ray start --head, or set {ADDRESS_VARIABLE} to the address of one, and "
            "RAY_AUTH_TOKEN_PATH where it asks for a token",
        ) from error
    return ray


def disconnect_ray() -> None:
    """Disconnect from the cluster; detached actors go on."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


class FarmActor:
    """One worker in a Ray process. `work` runs until the end; `stop` may be called meanwhile."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []

    def work(self, folder: str, partition: str) -> None:
        """The loop of every worker; then the process ends, and the cluster has its place back."""
        from tightfit.farming.worker import run_worker

        try:
            run_worker(Path(folder), partition=partition, hand_stop=self._stops.append)
        except Exception as error:
            write_failure_log(Path(folder), partition, error)
        import_module("ray").actor.exit_actor()

    def stop(self) -> None:
        """Give everything back. Before the folder was read there is nothing to give."""
        for stop in self._stops:
            stop()


def write_failure_log(folder: Path, partition: str, error: Exception) -> None:
    """Where the workers that schedulers start have their logs, and in their words."""
    text = f"broken: {type(error).__name__}: {error}"
    if isinstance(error, UserError):
        text = f"error: {error.problem}\n  try: {error.remedy}"
    log = folder / "logs" / f"{partition}-{socket.gethostname()}-{os.getpid()}.log"
    with contextlib.suppress(OSError):  # the farm was taken away
        log.write_text(f"{text}\n", "utf-8")


class RayStarter:
    """Detached actors: they outlive the submitter, and the next one finds them by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ray = connect_ray()

    def start(self, group: WorkerGroup, count: int) -> StartedWorkers:
        names = [f"{self._prefix(group)}-{secrets.token_hex(4)}" for _ in range(count)]
        for name in names:
            self._start_one(group, name)
        return StartedWorkers(
            group=group.name, kind=WorkerBackend.RAY, names=tuple(names), num_workers=count
        )

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        """Those that wait for a place too. One whose loop is over, or that was killed, is gone."""
        named = set(self._named())
        return sum(name in named for job in jobs for name in job.names)

    def find_lost(
        self, group: WorkerGroup, known: Sequence[StartedWorkers]
    ) -> list[StartedWorkers]:
        noted = {name for job in known for name in job.names}
        mine = f"{self._prefix(group)}-"
        lost = tuple(n for n in self._named() if n.startswith(mine) and n not in noted)
        if not lost:
            return []
        return [
            StartedWorkers(
                group=group.name, kind=WorkerBackend.RAY, names=lost, num_workers=len(lost)
            )
        ]

    def stop(self, jobs: Sequence[StartedWorkers]) -> None:
        """Asked first, so that leases are given back; ended where that takes too long."""
        wanted = {name for job in jobs for name in job.names}
        asked = {name: self._ask_to_stop(name) for name in wanted.intersection(self._named())}
        until_s = time.monotonic() + END_SECONDS
        while (left := asked.keys() & set(self._named())) and time.monotonic() < until_s:
            time.sleep(POLL_SECONDS)
        for name in left:
            with contextlib.suppress(ValueError):  # gone just now
                self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE))

    def _ask_to_stop(self, name: str) -> Any:
        """Ray's note of the request, which it drops where nobody holds it."""
        with contextlib.suppress(ValueError):  # gone just now
            return self._ray.get_actor(name, namespace=NAMESPACE).stop.remote()
        return None

    def _start_one(self, group: WorkerGroup, name: str) -> None:
        make = self._ray.remote(
            num_cpus=group.cores_per_worker or 1, num_gpus=group.gpus_per_worker, max_restarts=0
        )(FarmActor)
        actor = make.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_concurrency=2,  # `work`, and `stop` while it lasts
            scheduling_strategy="SPREAD",  # not two on a large node while a small one has none
        ).remote()
        actor.work.remote(str(self._folder), group.name)

    def _named(self) -> list[str]:
        return [str(name) for name in self._ray.util.list_named_actors(all_namespaces=False)]

    def _prefix(self, group: WorkerGroup) -> str:
        mark = hashlib.blake2b(str(self._folder).encode(), digest_size=4).hexdigest()
        return f"farm-{mark}-{group.name}"
