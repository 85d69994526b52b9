"""Workers as pods: one Indexed Job for the GPUs of a cluster and one for its other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.units import GIB, MIB
from tightfit.farm.crew import StartedJob
from tightfit.farm.places import KUBERNETES, Place, PlaceKind, count_types
from tightfit.farm.start_local import WORKER_WORDS
from tightfit.hardware.inventory import ClusterNode, Inventory
from tightfit.hardware.kubernetes import probe_kubernetes_inventory
from tightfit.launch.kubernetes.apply import apply_objects, cancel_job, find_leader
from tightfit.launch.kubernetes.connect import Cluster, connect
from tightfit.launch.kubernetes.follow import read_view
from tightfit.launch.kubernetes.names import name_job
from tightfit.launch.kubernetes.pod import Document, User
from tightfit.launch.kubernetes.resources import CORES_PER_GPU, NODE_SHARE, PodResources
from tightfit.launch.kubernetes.volumes import require_volume
from tightfit.launch.kubernetes.workers import WorkerOptions, worker_job
from tightfit.launch.site import Site
from tightfit.models.resolve import measure_weights

PYTHON = "python3"
"""Of the image."""
MEMORY_FACTOR = 1.5
"""Of the weights, for a CPU worker; a GPU worker passes them through host memory once."""
SPARE_BYTES = 4 * GIB
"""The interpreter with torch, tokens and answers."""
_ENDED = ("Succeeded", "Failed")


def find_pods(*, num_workers: int | None) -> tuple[Place, ...]:
    """One pod for each GPU, and one for each node without."""
    return choose_pods(probe_kubernetes_inventory(), most=num_workers)


def choose_pods(inventory: Inventory, *, most: int | None) -> tuple[Place, ...]:
    nodes = [node for node in inventory.nodes if node.state.takes_jobs]
    with_gpus = [node for node in nodes if node.num_gpus]
    without = [node for node in nodes if not node.num_gpus]
    places = []
    if with_gpus:
        count = sum(node.num_gpus for node in with_gpus)
        places.append(_place("gpu", with_gpus, count, most))
    if without:
        places.append(_place("cpu", without, len(without), most))
    if not places:
        raise EnvironmentFaultError(
            "No node of the Kubernetes cluster takes pods.",
            remedy="tightfit hardware --on k8s",
        )
    return tuple(places)


def _place(kind: str, nodes: Sequence[ClusterNode], count: int, most: int | None) -> Place:
    is_gpu = kind == "gpu"
    cores = min((node.num_cores or CORES_PER_GPU) // max(1, node.num_gpus) for node in nodes)
    wanted = min(CORES_PER_GPU, cores) if is_gpu else int(cores * NODE_SHARE)
    return Place(
        name=f"{KUBERNETES}-{kind}",
        kind=PlaceKind.KUBERNETES,
        num_workers=count if most is None else min(most, count),
        gpus_per_worker=1 if is_gpu else 0,
        cores_per_worker=max(1, wanted),
        types=count_types(nodes),
    )


class KubernetesStarter:
    """A Job for what is missing; its pods see the farm's folder under the same path as we do."""

    def __init__(
        self,
        folder: Path,
        site: Site,
        *,
        words: Sequence[str] = WORKER_WORDS,
        mounts: Sequence[str] = (),
        open_cluster: Callable[[], Cluster] | None = None,
    ) -> None:
        self._folder = folder
        self._site = site
        self._words = words
        self._mounts = mounts
        self._open = open_cluster or (lambda: connect(site.kubernetes))
        self._cluster: Cluster | None = None
        self._num_started = 0

    def start(self, place: Place, count: int) -> StartedJob:
        objects = self.write_objects(place, count)
        apply_objects(self._connected(), objects)
        name = str(find_leader(objects)["metadata"]["name"])
        return _started(place, name, count)

    def write_objects(self, place: Place, count: int) -> list[Document]:
        """The Job as it is applied."""
        for path in (str(self._folder), *self._mounts):
            require_volume(self._site.kubernetes, path, "The folder")
        facts = self._folder.stat()
        name = name_job(f"{self._prefix(place)}-{self._next_number(place)}")
        words = [PYTHON, *self._words, str(self._folder), "--partition", place.name]
        return worker_job(
            name,
            words,
            num_workers=count,
            resources=self._resources(place),
            site=self._site,
            options=WorkerOptions(
                written=(str(self._folder),), user=User(uid=facts.st_uid, gid=facts.st_gid)
            ),
        )

    def count_alive(self, jobs: Sequence[StartedJob]) -> int:
        alive = 0
        for job in jobs:
            for name in job.names:
                try:
                    view = read_view(self._connected(), _leader(name))
                except EnvironmentFaultError:
                    alive += job.num_workers  # a busy server: ask again later
                    continue
                if not view.phase.is_over:
                    ended = sum(pod.phase in _ENDED for pod in view.pods)
                    alive += max(0, job.num_workers - ended)
        return alive

    def find_lost(self, place: Place, known: Sequence[StartedJob]) -> list[StartedJob]:
        """By its name: Jobs are numbered in the order of their starts."""
        noted = {name for job in known for name in job.names}
        found = []
        for thing in self._connected().list("Job"):
            name = str(thing["metadata"]["name"])
            if name.startswith(f"{self._prefix(place)}-") and name not in noted:
                count = int((thing.get("spec") or {}).get("completions") or 1)
                found.append(_started(place, name, count))
        return found

    def stop(self, jobs: Sequence[StartedJob]) -> None:
        for job in jobs:
            for name in job.names:
                cancel_job(self._connected(), _leader(name))

    def _connected(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._open()
        return self._cluster

    def _prefix(self, place: Place) -> str:
        """Known again by a submitter that comes later."""
        return name_job(f"farm-{place.name}", place=str(self._folder))

    def _next_number(self, place: Place) -> int:
        held = [
            thing["metadata"]["name"]
            for thing in self._connected().list("Job")
            if str(thing["metadata"]["name"]).startswith(f"{self._prefix(place)}-")
        ]
        numbers = [int(name.rpartition("-")[2]) for name in held if name[-1:].isdigit()]
        self._num_started = max([self._num_started, *numbers]) + 1
        return self._num_started

    def _resources(self, place: Place) -> PodResources:
        weights = sum(_weigh(Path(path)) for path in dict.fromkeys(self._mounts))
        factor = 1.0 if place.gpus_per_worker else MEMORY_FACTOR
        needed = int(weights * factor) + SPARE_BYTES
        return PodResources(
            num_gpus=place.gpus_per_worker,
            num_cores=place.cores_per_worker or 1,
            memory_bytes=-(-needed // (256 * MIB)) * 256 * MIB,
        )


def _weigh(path: Path) -> int:
    return path.stat().st_size if path.is_file() else measure_weights(path) or 0


def _leader(name: str) -> Document:
    return {"kind": "Job", "metadata": {"name": name}}


def _started(place: Place, name: str, count: int) -> StartedJob:
    return StartedJob(place=place.name, kind=PlaceKind.KUBERNETES, names=(name,), num_workers=count)
