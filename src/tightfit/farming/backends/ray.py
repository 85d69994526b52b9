"""Workers as detached actors of an existing Ray cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.core.errors import SetupError
from tightfit.farming.worker_pool import (
    RAY,
    NodeType,
    StartedWorkers,
    WorkerBackend,
    WorkerGroup,
    farm_prefix,
)

NAMESPACE = "tightfit-farm"
ADDRESS_VARIABLE = "RAY_ADDRESS"
END_SECONDS = 20.0
"""For a worker to return its leases, before it is killed."""
POLL_SECONDS = 0.2


def find_ray_groups(*, most: int | None) -> tuple[WorkerGroup, ...]:
    """One actor for each GPU, and one for each node without."""
    ray = connect_ray()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = sum(int(held.get("GPU", 0)) for held in nodes)
    without = [held for held in nodes if not held.get("GPU") and held.get("CPU", 0) >= 1]
    found = []
    if num_gpus:
        found.append(("gpu", num_gpus, 1))
    if without:
        found.append(("cpu", len(without), int(min(held["CPU"] for held in without))))
    if not found:
        raise SetupError("The Ray cluster has no free node with a CPU.", remedy="ray status")
    return tuple(
        WorkerGroup(
            name=f"{RAY}-{kind}",
            kind=WorkerBackend.RAY,
            num_workers=count if most is None else min(most, count),
            gpus_per_worker=1 if kind == "gpu" else 0,
            cores_per_worker=cores,
            types=(NodeType(name=kind.upper(), gpu=None, num_workers=count, num_cores=cores),),
        )
        for kind, count, cores in found
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
            job_config=_make_job_config(),
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


class _NoFolders(list[str]):
    """Ray adds the current folder to it, for its workers to import from."""

    def extend(self, _: Iterable[str]) -> None:
        pass


def _make_job_config() -> Any:
    """Workers import what is installed on their node, and nothing from a folder of ours."""
    config = import_module("ray.job_config").JobConfig()
    config._py_driver_sys_path = _NoFolders()
    return config


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
        from tightfit.farming.worker import describe_failure, run_worker

        try:
            run_worker(Path(folder), partition=partition, hand_stop=self._stops.append)
        except Exception as error:
            # Where the workers that schedulers start have their logs.
            name = f"{partition}-{socket.gethostname()}-{os.getpid()}.log"
            with contextlib.suppress(OSError):  # the farm was removed
                (Path(folder) / "logs" / name).write_text(f"{describe_failure(error)}\n", "utf-8")
        import_module("ray").actor.exit_actor()

    def stop(self) -> None:
        """Give everything back. Before the folder was read there is nothing to give."""
        for stop in self._stops:
            stop()


class RayStarter:
    """Detached actors: they outlive the submitter, and the next one finds them by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ray = connect_ray()

    def start(self, group: WorkerGroup, count: int) -> tuple[str, ...]:
        prefix = farm_prefix(self._folder, group)
        names = tuple(f"{prefix}-{secrets.token_hex(4)}" for _ in range(count))
        make = self._ray.remote(
            num_cpus=group.cores_per_worker or 1, num_gpus=group.gpus_per_worker, max_restarts=0
        )(FarmActor)
        for name in names:
            actor = make.options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_concurrency=2,  # `work`, and `stop` while it lasts
                scheduling_strategy="SPREAD",  # not two on a large node while a small one has none
            ).remote()
            actor.work.remote(str(self._folder), group.name)
        return names

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        """Those that wait for a place too. One whose loop is over, or that was killed, is gone."""
        named = set(self._named())
        return sum(name in named for job in jobs for name in job.names)

    def find(self, group: WorkerGroup) -> dict[str, int]:
        prefix = f"{farm_prefix(self._folder, group)}-"
        return {name: 1 for name in self._named() if name.startswith(prefix)}

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

    def name_cancel_command(self, jobs: Sequence[StartedWorkers]) -> str:  # noqa: ARG002
        return ""  # Ray has no command for an actor; Ctrl-C in the same farm ends them

    def _ask_to_stop(self, name: str) -> Any:
        """Ray's note of the request, which it drops where nobody holds it."""
        with contextlib.suppress(ValueError):  # gone just now
            return self._ray.get_actor(name, namespace=NAMESPACE).stop.remote()
        return None

    def _named(self) -> list[str]:
        return [str(name) for name in self._ray.util.list_named_actors(all_namespaces=False)]
