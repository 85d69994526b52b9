"""Workers as actors of a Ray cluster that is there already; answers are committed as everywhere."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.core.errors import EnvironmentFaultError
from tightfit.farm.crew import StartedJob
from tightfit.farm.places import RAY, NodeType, Place, PlaceKind

NAMESPACE = "tightfit-farm"
ADDRESS_VARIABLE = "RAY_ADDRESS"


def find_ray_places(*, most: int | None) -> tuple[Place, ...]:
    """One actor for each GPU, and one for each node without."""
    ray = connect_ray()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = sum(int(held.get("GPU", 0)) for held in nodes)
    without = [held for held in nodes if not held.get("GPU") and held.get("CPU", 0) >= 1]
    places = []
    if num_gpus:
        places.append(_place("gpu", num_gpus, gpus=1, cores=1, most=most))
    if without:
        cores = int(min(held["CPU"] for held in without))
        places.append(_place("cpu", len(without), gpus=0, cores=cores, most=most))
    if not places:
        raise EnvironmentFaultError(
            "The Ray cluster has no free node with a CPU.", remedy="ray status"
        )
    return tuple(places)


def _place(kind: str, count: int, *, gpus: int, cores: int, most: int | None) -> Place:
    name = "CPU" if kind == "cpu" else "GPU"
    return Place(
        name=f"{RAY}-{kind}",
        kind=PlaceKind.RAY,
        num_workers=count if most is None else min(most, count),
        gpus_per_worker=gpus,
        cores_per_worker=cores,
        types=(NodeType(name=name, gpu=None, num_workers=count, num_cores=cores),),
    )


def connect_ray() -> Any:
    """The ray module, connected to the cluster of RAY_ADDRESS."""
    try:
        ray = import_module("ray")
    except ImportError as fault:
        raise EnvironmentFaultError(
            "`--engine ray` needs the package ray, which is not installed here.",
            remedy="pip install 'ray[default]', or leave --engine out: --partitions all needs "
            "nothing but Slurm",
        ) from fault
    if ray.is_initialized():
        return ray
    try:
        ray.init(
            address=os.environ.get(ADDRESS_VARIABLE, "auto"),
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as fault:
        raise EnvironmentFaultError(
            "No Ray cluster answers here.",
            remedy=f"ray start --head, or set {ADDRESS_VARIABLE} to the address of one",
        ) from fault
    return ray


class FarmActor:
    """One worker in a Ray process."""

    def work(self, folder: str, partition: str, module: str | None) -> int:
        """The loop of every worker. `module`: one with an `open_engine` of its own, in tests."""
        from tightfit.farm.worker import run_worker

        opener = None if module is None else import_module(module).open_engine
        return run_worker(Path(folder), partition=partition, open_engine=opener)


class RayStarter:
    """Detached actors: they outlive the submitter, and the next one finds them by name."""

    def __init__(self, folder: Path, *, module: str | None = None) -> None:
        self._folder = folder
        self._module = module
        self._ray = connect_ray()
        self._results: dict[str, Any] = {}

    def start(self, place: Place, count: int) -> StartedJob:
        names: list[str] = []
        used = set(self._list_names(place))
        number = 0
        while len(names) < count:
            name = f"{self._prefix(place)}-{number}"
            number += 1
            if name not in used and name not in self._results:
                self._start_one(place, name)
                names.append(name)
        return StartedJob(
            place=place.name, kind=PlaceKind.RAY, names=tuple(names), num_workers=count
        )

    def count_alive(self, jobs: Sequence[StartedJob]) -> int:
        """Actors whose loop has ended are taken away, for the cluster to have their place."""
        for name, result in list(self._results.items()):
            if self._ray.wait([result], timeout=0)[0]:
                self._kill(name)
        named = set(self._named())
        return sum(name in named for job in jobs for name in job.names)

    def find_lost(self, place: Place, known: Sequence[StartedJob]) -> list[StartedJob]:
        noted = {name for job in known for name in job.names}
        lost = tuple(name for name in self._list_names(place) if name not in noted)
        if not lost:
            return []
        return [StartedJob(place=place.name, kind=PlaceKind.RAY, names=lost, num_workers=len(lost))]

    def stop(self, jobs: Sequence[StartedJob]) -> None:
        named = set(self._named())
        for job in jobs:
            for name in named.intersection(job.names):
                self._kill(name)

    def _start_one(self, place: Place, name: str) -> None:
        make = self._ray.remote(
            num_cpus=place.cores_per_worker or 1, num_gpus=place.gpus_per_worker, max_restarts=0
        )(FarmActor)
        actor = make.options(name=name, namespace=NAMESPACE, lifetime="detached").remote()
        self._results[name] = actor.work.remote(str(self._folder), place.name, self._module)

    def _kill(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # gone already
            self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE))
        self._results.pop(name, None)

    def _named(self) -> list[str]:
        return [str(name) for name in self._ray.util.list_named_actors(all_namespaces=False)]

    def _list_names(self, place: Place) -> list[str]:
        return [name for name in self._named() if name.startswith(f"{self._prefix(place)}-")]

    def _prefix(self, place: Place) -> str:
        mark = hashlib.blake2b(str(self._folder).encode(), digest_size=4).hexdigest()
        return f"farm-{mark}-{place.name}"
