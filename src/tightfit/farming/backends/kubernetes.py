"""Workers as pods: one Indexed Job for GPU nodes and one for CPU nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tightfit.clusters.kubernetes.client import (
    KubernetesApi,
    apply_objects,
    cancel_job,
    connect,
    find_job_object,
)
from tightfit.clusters.kubernetes.follow import read_job_snapshot
from tightfit.clusters.kubernetes.names import name_job
from tightfit.clusters.kubernetes.objects import WorkerOptions, worker_job
from tightfit.clusters.kubernetes.pod import CORES_PER_GPU, NODE_SHARE, Document, PodResources, User
from tightfit.clusters.kubernetes.volumes import require_volume
from tightfit.clusters.site import Site
from tightfit.core.errors import SetupError
from tightfit.core.units import GIB, MIB
from tightfit.farming.backends.local import WORKER_COMMAND
from tightfit.farming.worker_pool import (
    KUBERNETES,
    StartedWorkers,
    WorkerBackend,
    WorkerGroup,
    count_node_types,
)
from tightfit.hardware.inventory import ClusterNode, Inventory
from tightfit.hardware.kubernetes import probe_kubernetes_inventory
from tightfit.models.resolve import measure_weights

PYTHON = "python3"
"""Of the image."""
MEMORY_FACTOR = 1.5
"""Of the weights, for a CPU worker; a GPU worker passes them through host memory once."""
SPARE_BYTES = 4 * GIB
"""The interpreter with torch, tokens and answers."""
_ENDED = ("Succeeded", "Failed")


def find_pod_groups(*, num_workers: int | None) -> tuple[WorkerGroup, ...]:
    """One pod for each GPU, and one for each node without."""
    return choose_pod_groups(probe_kubernetes_inventory(), most=num_workers)


def choose_pod_groups(inventory: Inventory, *, most: int | None) -> tuple[WorkerGroup, ...]:
    nodes = [node for node in inventory.nodes if node.state.takes_jobs]
    with_gpus = [node for node in nodes if node.num_gpus]
    without = [node for node in nodes if not node.num_gpus]
    groups = []
    if with_gpus:
        count = sum(node.num_gpus for node in with_gpus)
        groups.append(_make_group("gpu", with_gpus, count, most))
    if without:
        groups.append(_make_group("cpu", without, len(without), most))
    if not groups:
        raise SetupError(
            "No node of the Kubernetes cluster takes pods.",
            remedy="tightfit hardware --on k8s",
        )
    return tuple(groups)


def _make_group(
    kind: str, nodes: Sequence[ClusterNode], count: int, most: int | None
) -> WorkerGroup:
    is_gpu = kind == "gpu"
    cores = min((node.num_cores or CORES_PER_GPU) // max(1, node.num_gpus) for node in nodes)
    wanted = min(CORES_PER_GPU, cores) if is_gpu else int(cores * NODE_SHARE)
    return WorkerGroup(
        name=f"{KUBERNETES}-{kind}",
        kind=WorkerBackend.KUBERNETES,
        num_workers=count if most is None else min(most, count),
        gpus_per_worker=1 if is_gpu else 0,
        cores_per_worker=max(1, wanted),
        types=count_node_types(nodes),
    )


class KubernetesStarter:
    """A Job for what is missing; its pods see the farm's folder under the same path as we do."""

    def __init__(
        self,
        folder: Path,
        site: Site,
        *,
        words: Sequence[str] = WORKER_COMMAND,
        mounts: Sequence[str] = (),
        open_cluster: Callable[[], KubernetesApi] | None = None,
    ) -> None:
        self._folder = folder
        self._site = site
        self._words = words
        self._mounts = mounts
        self._open = open_cluster or (lambda: connect(site.kubernetes))
        self._cluster: KubernetesApi | None = None
        self._num_started = 0

    def start(self, group: WorkerGroup, count: int) -> StartedWorkers:
        objects = self.write_objects(group, count)
        apply_objects(self._connected(), objects)
        name = str(find_job_object(objects)["metadata"]["name"])
        return _started(group, name, count)

    def write_objects(self, group: WorkerGroup, count: int) -> list[Document]:
        """The Job as it is applied."""
        for path in (str(self._folder), *self._mounts):
            require_volume(self._site.kubernetes, path, "The folder")
        facts = self._folder.stat()
        name = name_job(f"{self._prefix(group)}-{self._next_number(group)}")
        words = [PYTHON, *self._words, str(self._folder), "--partition", group.name]
        return worker_job(
            name,
            words,
            num_workers=count,
            resources=self._resources(group),
            site=self._site,
            options=WorkerOptions(
                written=(str(self._folder),), user=User(uid=facts.st_uid, gid=facts.st_gid)
            ),
        )

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        alive = 0
        for job in jobs:
            for name in job.names:
                try:
                    view = read_job_snapshot(self._connected(), _leader(name))
                except SetupError:
                    alive += job.num_workers  # a busy server: ask again later
                    continue
                if not view.phase.is_over:
                    ended = sum(pod.phase in _ENDED for pod in view.pods)
                    alive += max(0, job.num_workers - ended)
        return alive

    def find_lost(
        self, group: WorkerGroup, known: Sequence[StartedWorkers]
    ) -> list[StartedWorkers]:
        """By its name: Jobs are numbered in the order of their starts."""
        noted = {name for job in known for name in job.names}
        found = []
        for thing in self._connected().list("Job"):
            name = str(thing["metadata"]["name"])
            if name.startswith(f"{self._prefix(group)}-") and name not in noted:
                count = int((thing.get("spec") or {}).get("completions") or 1)
                found.append(_started(group, name, count))
        return found

    def stop(self, jobs: Sequence[StartedWorkers]) -> None:
        for job in jobs:
            for name in job.names:
                cancel_job(self._connected(), _leader(name))

    def _connected(self) -> KubernetesApi:
        if self._cluster is None:
            self._cluster = self._open()
        return self._cluster

    def _prefix(self, group: WorkerGroup) -> str:
        """Known again by a submitter that comes later."""
        return name_job(f"farm-{group.name}", place=str(self._folder))

    def _next_number(self, group: WorkerGroup) -> int:
        held = [
            thing["metadata"]["name"]
            for thing in self._connected().list("Job")
            if str(thing["metadata"]["name"]).startswith(f"{self._prefix(group)}-")
        ]
        numbers = [int(name.rpartition("-")[2]) for name in held if name[-1:].isdigit()]
        self._num_started = max([self._num_started, *numbers]) + 1
        return self._num_started

    def _resources(self, group: WorkerGroup) -> PodResources:
        weights = sum(_weight_bytes(Path(path)) for path in dict.fromkeys(self._mounts))
        factor = 1.0 if group.gpus_per_worker else MEMORY_FACTOR
        needed = int(weights * factor) + SPARE_BYTES
        return PodResources(
            num_gpus=group.gpus_per_worker,
            num_cores=group.cores_per_worker or 1,
            memory_bytes=-(-needed // (256 * MIB)) * 256 * MIB,
        )


def _weight_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else measure_weights(path) or 0


def _leader(name: str) -> Document:
    return {"kind": "Job", "metadata": {"name": name}}


def _started(group: WorkerGroup, name: str, count: int) -> StartedWorkers:
    return StartedWorkers(
        group=group.name, kind=WorkerBackend.KUBERNETES, names=(name,), num_workers=count
    )
