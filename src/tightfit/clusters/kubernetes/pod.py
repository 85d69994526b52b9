"""The pod that every job starts, and the resources it requests.

Built with the official client's models, whose constructors refuse a field that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from tightfit.clusters.kubernetes.names import escape, label_job
from tightfit.clusters.kubernetes.volumes import Mount
from tightfit.clusters.requirements import estimate_memory_request
from tightfit.clusters.site import Site
from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.units import GIB, MIB
from tightfit.planning.plan import Plan

CORES_PER_GPU = 4
"""One that feeds the GPU, the others for data, checkpoints and the network."""
DEFAULT_CORES = 4
"""Of a CPU job on a node whose cores nobody stated."""
NODE_SHARE = 0.9
"""Of a node's cores and memory; the rest is for the cluster's own pods on it."""
SHM_BYTES_PER_RANK = GIB
"""RAM disk for NCCL and gloo inside a pod; a container's own has 64 MiB."""
STAGED_FACTOR = 1.05
"""Files of a staged model beside its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """Requests of one pod, which are its limits too: such pods are evicted last."""

    num_gpus: int = 0
    num_cores: int
    memory_bytes: int
    """Of the processes."""
    shm_bytes: int = 0
    """RAM disk at /dev/shm; the kernel counts it as the pod's memory."""

    @property
    def total_memory_bytes(self) -> int:
        return self.memory_bytes + self.shm_bytes

    @property
    def num_threads(self) -> int:
        """Per process: a container sees all cores of its node, whatever it asked for."""
        return max(self.num_cores // max(self.num_gpus, 1), 1)


def read_resources(plan: Plan, *, staged_bytes: int = 0) -> PodResources:
    """One pod is one node of the plan. `staged_bytes` of a model go to the RAM disk."""
    strategy = plan.strategy
    is_cpu = plan.hardware.node.gpu.is_cpu
    ranks = strategy.gpus_per_node
    return PodResources(
        num_gpus=0 if is_cpu else ranks,
        num_cores=_count_cores(plan),
        memory_bytes=_round_up(_count_memory(plan)),
        shm_bytes=_round_up(ranks * SHM_BYTES_PER_RANK + int(staged_bytes * STAGED_FACTOR)),
    )


def _count_cores(plan: Plan) -> int:
    node, ranks = plan.hardware.node, plan.strategy.gpus_per_node
    stated = node.num_cores
    if node.gpu.is_cpu:
        return max(int((stated or DEFAULT_CORES) * NODE_SHARE), ranks, 1)
    wanted = ranks * CORES_PER_GPU
    if stated is None:
        return wanted
    share = int(stated * NODE_SHARE * ranks / node.num_gpus)
    return max(min(wanted, share), 1)


def _count_memory(plan: Plan) -> int:
    stated = plan.hardware.node.host_memory_bytes
    most = None if stated is None else int(stated * NODE_SHARE)
    return estimate_memory_request(plan, most_bytes=most)


def _round_up(num_bytes: int) -> int:
    """To 256 MiB: figures that people can read."""
    return ceil(num_bytes / (256 * MIB)) * 256 * MIB


def write_quantity(num_bytes: int) -> str:
    """Bytes as a quantity, without a rounding."""
    for factor, suffix in ((GIB, "Gi"), (MIB, "Mi")):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{suffix}"
    return str(num_bytes)


# The pod that every job of ours starts, whatever wraps it.

Document = dict[str, Any]
"""An object as the API server takes it."""
Model = Any
"""One of the official client's; older releases of it have no types."""

CONTAINER = "work"
SHM_PATH = "/dev/shm"
SHM_VOLUME = "shm"
SCRATCH_PATH = "/tmp"
SCRATCH_VOLUME = "scratch"
CONFIG_PATH = "/etc/tightfit"
CONFIG_VOLUME = "config"
GRACE_SECONDS = 120
"""From the wish to stop to the kill: a checkpoint is written meanwhile."""
IMAGE_USER = 1000
"""Of docker/Dockerfile.*; a number, so that the kubelet sees that it is not root."""
_TOLERATION_KEYS = {
    "key": "key",
    "operator": "operator",
    "value": "value",
    "effect": "effect",
    "tolerationSeconds": "toleration_seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Whose files the pods write: the run folder's owner."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What each pod of a job runs, and what it needs for that."""

    name: str
    argv: tuple[str, ...]
    """Words for the kubelet: `$(NAME)` is a variable, other dollars are doubled."""
    resources: PodResources
    first_argv: tuple[str, ...] | None = None
    """Run to its end before `argv`, with the same resources but for GPUs."""
    mounts: tuple[Mount, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of the site's."""
    seconds: int | None = None
    """After which a pod is told to save and stop, counted from its start on a node."""
    user: User | None = None
    """None: the image's."""
    config_map: str | None = None
    """Seen in the pod as /etc/tightfit."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """On top of the site's."""


def load_client() -> Any:
    """The official client's module of models and APIs; it takes a moment to load."""
    try:
        from kubernetes import client
    except ImportError as error:
        raise SetupError(
            "Kubernetes objects are built with the package kubernetes, which is not installed.",
            remedy="pip install 'tightfit[cluster]'",
        ) from error
    return client


def to_document(thing: Any) -> Document:
    """A model as the client itself would send it."""
    found: Document = load_client().ApiClient().sanitize_for_serialization(thing)
    return found


def require_image(site: Site) -> str:
    """The site's image; there is no public one to fall back on."""
    image = site.kubernetes.image
    if image is None:
        raise InvalidInputError(
            "Pods need a container image, and site.yaml names none.",
            remedy="build docker/Dockerfile.cuda, push it, and set kubernetes.image in site.yaml",
        )
    return image


def build_pod_template(task: Task, site: Site, *, subdomain: str | None) -> Model:
    """Never restarted in place: the Job makes a new pod, perhaps on a better node."""
    k8s, ours = load_client(), site.kubernetes
    # GPUs are for the container that comes after it.
    small = replace(task, resources=replace(task.resources, num_gpus=0))
    first = [] if task.first_argv is None else [_container(small, site, "first", task.first_argv)]
    pull = [] if ours.image_pull_secret is None else [ours.image_pull_secret]
    spec = k8s.V1PodSpec(
        restart_policy="Never",
        subdomain=subdomain,
        active_deadline_seconds=task.seconds,
        termination_grace_period_seconds=GRACE_SECONDS,
        service_account_name=ours.service_account,
        automount_service_account_token=False,
        enable_service_links=False,
        share_process_namespace=True,  # the pause process then reaps what torchrun leaves behind
        priority_class_name=ours.priority_class,
        image_pull_secrets=[k8s.V1LocalObjectReference(name=name) for name in pull] or None,
        node_selector=select_nodes(task, site) or None,
        tolerations=build_tolerations(task, site) or None,
        security_context=build_pod_security(task),
        init_containers=first or None,
        containers=[_container(task, site, CONTAINER, task.argv)],
        volumes=build_volumes(task),
    )
    return k8s.V1PodTemplateSpec(metadata=k8s.V1ObjectMeta(labels=label_job(task.name)), spec=spec)


def _container(task: Task, site: Site, name: str, argv: Sequence[str]) -> Model:
    k8s = load_client()
    secrets = [
        k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name=secret))
        for secret in site.kubernetes.secrets
    ]
    return k8s.V1Container(
        name=name,
        image=require_image(site),
        command=list(argv[:1]),
        args=list(argv[1:]),
        env=build_environment(task, site),
        env_from=secrets or None,
        resources=build_resources(task.resources, site),
        security_context=build_container_security(),
        volume_mounts=build_volume_mounts(task),
        termination_message_policy="FallbackToLogsOnError",
    )


def build_resources(resources: PodResources, site: Site) -> Model:
    """Requests and limits are one: the pod gets what the plan counts on, and no less."""
    amounts = {
        "cpu": str(resources.num_cores),
        "memory": write_quantity(resources.total_memory_bytes),
    }
    if resources.num_gpus:
        amounts[site.kubernetes.gpu_resource] = str(resources.num_gpus)
    return load_client().V1ResourceRequirements(requests=amounts, limits=dict(amounts))


def build_environment(task: Task, site: Site) -> list[Model]:
    """Variables in order: a `$(NAME)` reaches only those before it."""
    k8s = load_client()
    plain = {
        "HOME": SCRATCH_PATH,  # of a user that the image may not know
        "USER": "tightfit",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(task.resources.num_threads),
    }
    if not task.resources.num_gpus:
        plain["NVIDIA_VISIBLE_DEVICES"] = "void"  # CUDA images ask for all cards of a node
    plain |= {**site.environment, **task.environment}
    address = k8s.V1EnvVarSource(field_ref=k8s.V1ObjectFieldSelector(field_path="status.podIP"))
    return [
        k8s.V1EnvVar(name="POD_IP", value_from=address),
        *(k8s.V1EnvVar(name=name, value=escape(value)) for name, value in plain.items()),
    ]


def build_volumes(task: Task) -> list[Model]:
    """The RAM disk, a scratch folder, the site's volumes, and the plan where it travels along."""
    k8s = load_client()
    shm = k8s.V1EmptyDirVolumeSource(
        medium="Memory", size_limit=write_quantity(task.resources.shm_bytes)
    )
    found = [
        k8s.V1Volume(name=SHM_VOLUME, empty_dir=shm),
        k8s.V1Volume(name=SCRATCH_VOLUME, empty_dir=k8s.V1EmptyDirVolumeSource()),
    ]
    if task.config_map is not None:
        source = k8s.V1ConfigMapVolumeSource(name=task.config_map)
        found.append(k8s.V1Volume(name=CONFIG_VOLUME, config_map=source))
    volumes = {mount.volume.name: mount.volume for mount in task.mounts}
    for name, volume in volumes.items():
        claim = host = None
        if volume.claim is not None:
            claim = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=volume.claim)
        else:
            host = k8s.V1HostPathVolumeSource(path=volume.host_path, type="Directory")
        found.append(k8s.V1Volume(name=name, persistent_volume_claim=claim, host_path=host))
    return found


def build_volume_mounts(task: Task) -> list[Model]:
    k8s = load_client()
    found = [
        k8s.V1VolumeMount(name=SHM_VOLUME, mount_path=SHM_PATH),
        k8s.V1VolumeMount(name=SCRATCH_VOLUME, mount_path=SCRATCH_PATH),
    ]
    if task.config_map is not None:
        found.append(k8s.V1VolumeMount(name=CONFIG_VOLUME, mount_path=CONFIG_PATH, read_only=True))
    return found + [
        k8s.V1VolumeMount(
            name=mount.volume.name, mount_path=mount.path, read_only=mount.is_read_only or None
        )
        for mount in task.mounts
    ]


def build_pod_security(task: Task) -> Model:
    """As the owner of the run folder; root only where that is root's."""
    k8s = load_client()
    user = task.user or User(uid=IMAGE_USER, gid=IMAGE_USER)
    return k8s.V1PodSecurityContext(
        run_as_user=user.uid,
        run_as_group=user.gid,
        run_as_non_root=True if user.uid else None,
        # Changing the owner of a whole file system takes hours: only an empty one is changed.
        fs_group=user.gid or None,
        fs_group_change_policy="OnRootMismatch" if user.gid else None,
        seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
    )


def build_container_security() -> Model:
    k8s = load_client()
    return k8s.V1SecurityContext(
        allow_privilege_escalation=False, capabilities=k8s.V1Capabilities(drop=["ALL"])
    )


def select_nodes(task: Task, site: Site) -> dict[str, str]:
    """The site's own labels win over those that were found."""
    return {**task.node_selector, **site.kubernetes.node_selector}


def build_tolerations(task: Task, site: Site) -> list[Model]:
    """The site's, and the customary one of GPU nodes, which not every cluster adds by itself."""
    k8s, ours = load_client(), site.kubernetes
    found = [_toleration(entry) for entry in ours.tolerations]
    if task.resources.num_gpus and not any(one.key == ours.gpu_resource for one in found):
        found.append(
            k8s.V1Toleration(key=ours.gpu_resource, operator="Exists", effect="NoSchedule")
        )
    return found


def _toleration(entry: Mapping[str, str | int]) -> Model:
    unknown = next((key for key in entry if key not in _TOLERATION_KEYS), None)
    if unknown is not None:
        raise InvalidInputError(
            f"`{unknown}` is not a key of a toleration in site.yaml.",
            remedy=f"its keys are {', '.join(_TOLERATION_KEYS)}",
        )
    return load_client().V1Toleration(
        **{_TOLERATION_KEYS[key]: value for key, value in entry.items()}
    )
