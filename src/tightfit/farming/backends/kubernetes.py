"""Workers as pods: one Indexed Job for GPU nodes and one for CPU nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tightfit.clusters.kubernetes.client import (
    KubernetesApi,
    apply_objects,
    connect,
    find_job_object,
    read_job_snapshot,
)
from tightfit.clusters.kubernetes.objects import worker_job
from tightfit.clusters.kubernetes.pod import (
    CORES_PER_GPU,
    NODE_SHARE,
    Document,
    PodResources,
    Task,
    User,
    choose_mounts,
    name_job,
    require_volume,
    round_up_memory,
)
from tightfit.clusters.site import Site
from tightfit.core.errors import SetupError
from tightfit.core.units import GIB
from tightfit.farming.backends.local import WORKER_COMMAND
from tightfit.farming.worker_pool import (
    KUBERNETES,
    StartedWorkers,
    WorkerBackend,
    WorkerGroup,
    count_node_types,
)
from tightfit.hardware.inventory import Inventory
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
    open_nodes = [node for node in inventory.nodes if node.state.takes_jobs]
    groups = []
    for kind, is_gpu in (("gpu", True), ("cpu", False)):
        nodes = [node for node in open_nodes if bool(node.num_gpus) is is_gpu]
        if not nodes:
            continue
        count = sum(node.num_gpus or 1 for node in nodes)
        cores = min((node.num_cores or CORES_PER_GPU) // max(1, node.num_gpus) for node in nodes)
        wanted = min(CORES_PER_GPU, cores) if is_gpu else int(cores * NODE_SHARE)
        groups.append(
            WorkerGroup(
                name=f"{KUBERNETES}-{kind}",
                kind=WorkerBackend.KUBERNETES,
                num_workers=count if most is None else min(most, count),
                gpus_per_worker=1 if is_gpu else 0,
                cores_per_worker=max(1, wanted),
                types=count_node_types(nodes),
            )
        )
    if not groups:
        raise SetupError(
            "No node of the Kubernetes cluster takes pods.",
            remedy="tightfit hardware --on k8s",
        )
    return tuple(groups)


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

    def start(self, group: WorkerGroup, count: int) -> tuple[str, ...]:
        objects = self.write_objects(group, count)
        apply_objects(self._connected(), objects)
        return (str(find_job_object(objects)["metadata"]["name"]),)

    def write_objects(self, group: WorkerGroup, count: int) -> list[Document]:
        """The Job as it is applied."""
        for path in (str(self._folder), *self._mounts):
            require_volume(self._site.kubernetes, path, "The folder")
        facts = self._folder.stat()
        # Numbered in the order of their starts.
        numbers = [int(name.rpartition("-")[2]) for name in self.find(group) if name[-1:].isdigit()]
        self._num_started = max([self._num_started, *numbers]) + 1
        name = name_job(f"{self._prefix(group)}-{self._num_started}")
        words = [PYTHON, *self._words, str(self._folder), "--partition", group.name]
        task = Task(
            name=name,
            argv=tuple(words),
            resources=self._resources(group),
            mounts=choose_mounts(self._site.kubernetes, written=(str(self._folder),)),
            user=User(uid=facts.st_uid, gid=facts.st_gid),
        )
        return worker_job(task, self._site, num_workers=count)

    def count_alive(self, jobs: Sequence[StartedWorkers]) -> int:
        alive = 0
        for job in jobs:
            for name in job.names:
                try:
                    view = read_job_snapshot(self._connected(), "Job", name)
                except SetupError:
                    alive += job.num_workers  # a busy server: ask again later
                    continue
                if not view.phase.is_over:
                    ended = sum(pod.phase in _ENDED for pod in view.pods)
                    alive += max(0, job.num_workers - ended)
        return alive

    def find(self, group: WorkerGroup) -> dict[str, int]:
        prefix = f"{self._prefix(group)}-"
        return {
            str(job["metadata"]["name"]): int((job.get("spec") or {}).get("completions") or 1)
            for job in self._connected().list("Job")
            if str(job["metadata"]["name"]).startswith(prefix)
        }

    def stop(self, jobs: Sequence[StartedWorkers]) -> None:
        for job in jobs:
            for name in job.names:
                self._connected().delete("Job", name)

    def name_cancel_command(self, jobs: Sequence[StartedWorkers]) -> str:
        names = [name for job in jobs for name in job.names]
        if not names:
            return ""
        return f"kubectl --namespace {self._connected().namespace} delete job {' '.join(names)}"

    def _connected(self) -> KubernetesApi:
        if self._cluster is None:
            self._cluster = self._open()
        return self._cluster

    def _prefix(self, group: WorkerGroup) -> str:
        """Known again by a submitter that comes later."""
        return name_job(f"farm-{group.name}", place=str(self._folder))

    def _resources(self, group: WorkerGroup) -> PodResources:
        weights = sum(measure_weights(Path(path)) or 0 for path in dict.fromkeys(self._mounts))
        factor = 1.0 if group.gpus_per_worker else MEMORY_FACTOR
        needed = int(weights * factor) + SPARE_BYTES
        return PodResources(
            num_gpus=group.gpus_per_worker,
            num_cores=group.cores_per_worker or 1,
            memory_bytes=round_up_memory(needed),
        )
