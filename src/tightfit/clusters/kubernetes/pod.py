"""The pod that every job starts, and the resources it requests.

Built with the official client's models, whose constructors refuse a field that does not exist.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any

from tightfit.clusters.requirements import estimate_memory_request
from tightfit.clusters.site import KubernetesSite, Site, Volume
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError
from tightfit.core.units import GIB, MIB
from tightfit.planning.plan import Plan

# Names and labels as Kubernetes accepts them; the volumes of site.yaml and their mounts.

MAX_NAME = 40
"""Of the 63 characters of a host name; the rest is for `-node-0-` and a pod's number."""
_DIGEST = 6

JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
FIELD_MANAGER = "tightfit"
"""Under which the API server remembers which fields are ours."""
MANAGER_LABEL = "app.kubernetes.io/managed-by"


def name_job(text: str, *, place: str = "") -> str:
    """A label that a Job, a Service and a host can all be called by.

    `place` (a run's folder) distinguishes two jobs of the same name: a namespace is shared.
    """
    word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not word[:1].isalpha():  # a Service's name begins with a letter
        word = f"run-{word}".rstrip("-")
    digest = hashlib.sha256((place or text).encode()).hexdigest()[:_DIGEST]
    if not place and len(word) <= MAX_NAME:
        return word
    return f"{word[: MAX_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


def escape(text: str) -> str:
    """Text that the kubelet passes on as it is: it would expand `$(NAME)` and shorten `$$`."""
    return text.replace("$", "$$")


def label_job(name: str) -> dict[str, str]:
    """By which people and `tightfit` find what belongs together."""
    return {
        "app.kubernetes.io/name": "tightfit",
        "app.kubernetes.io/instance": name,
        MANAGER_LABEL: FIELD_MANAGER,
    }


# Names in site.yaml that no API server would accept, refused before a job is built from them.

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PART = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_PART}(\.{_PART})*")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(
    rf"((?=[^/]{{1,253}}/){_PART}(\.{_PART})*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
)
"""A label's or resource's name: `gpu`, `nvidia.com/gpu`."""
_IMAGE = re.compile(r"\S*")
_PATH = re.compile(r"[^:]*")
_LABEL_RULE = "up to 63 lower-case letters, digits and `-`, as RFC 1123 has it"
_SUBDOMAIN_RULE = "lower-case letters, digits, `-` and `.`, as RFC 1123 has it"
_VALUE_RULE = "up to 63 letters, digits, `-`, `_` and `.`"
_KEY_RULE = f"{_VALUE_RULE}, after an optional domain and `/`"


def check_site_names(site: KubernetesSite) -> None:
    """Refuse the first name that the API server would refuse; whether it exists is not asked.

    Source: kubernetes.io/docs/concepts/overview/working-with-objects/names and /labels.
    """
    subdomains = [
        ("image_pull_secret", site.image_pull_secret),
        ("service_account", site.service_account),
        ("priority_class", site.priority_class),
        ("queue", site.queue),
        *(("secrets", secret) for secret in site.secrets),
        *(("volumes.claim", volume.claim) for volume in site.volumes),
    ]
    paths = [
        *(("volumes.mount", volume.mount) for volume in site.volumes),
        *(("volumes.local", volume.local) for volume in site.volumes),
    ]
    rows: list[tuple[str, str | None, re.Pattern[str], str]] = [
        ("namespace", site.namespace, _LABEL, _LABEL_RULE),
        ("image", site.image, _IMAGE, "no spaces, like registry.example.org/tightfit:0.1-cuda"),
        *((key, value, _SUBDOMAIN, _SUBDOMAIN_RULE) for key, value in subdomains),
        *((key, path, _PATH, "a path without `:`") for key, path in paths),
        ("gpu_resource", site.gpu_resource, _KEY, _KEY_RULE),
        *(("node_selector", key, _KEY, _KEY_RULE) for key in site.node_selector),
        *(("node_selector", value, _VALUE, _VALUE_RULE) for value in site.node_selector.values()),
    ]
    for key, value, pattern, rule in rows:
        if value is not None and not pattern.fullmatch(value):
            raise InvalidInputError(
                f"`{value[:80]}` cannot be `kubernetes.{key}`.", remedy=f"{key}: {rule}"
            )


# Which folder of this machine a pod sees, and under which path. A volume that has a `local` path is
# mounted under that path too, so that the paths in plan, recipe and checkpoints hold here and in
# the pods, and none is ever rewritten.

_SYSTEM = re.compile(
    "/|/(bin|boot|dev|dev/shm|etc|etc/tightfit|lib|lib64|opt|proc|run|sbin|sys|tmp|usr|var)"
    "|/usr/(bin|lib|local|local/bin|local/lib|share)"
)
"""Where a volume would hide what the container itself needs."""
OWN_VOLUMES = ("shm", "scratch", "config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One volume under one path of the container."""

    volume: Volume
    path: str
    is_read_only: bool


def choose_mounts(site: KubernetesSite, *, written: Sequence[str] = ()) -> tuple[Mount, ...]:
    """Every volume of the site; only those that hold a `written` path can be written to.

    Of two nested ones that is the inner alone.
    """
    names = [volume.name for volume in site.volumes]
    for name in names:
        if not _LABEL.fullmatch(name) or name in OWN_VOLUMES:
            raise InvalidInputError(
                f"`{name}` cannot be the name of a volume in site.yaml.",
                remedy=f"lower-case letters, digits and `-`, but not {', '.join(OWN_VOLUMES)}",
            )
        if names.count(name) > 1:
            raise InvalidInputError(
                f"site.yaml has two volumes called `{name}`.", remedy="give each its own `name`"
            )
    holders = [find_volume(site, path) for path in written]
    mounts: dict[str, Mount] = {}
    for volume in site.volumes:
        is_written = volume in holders
        for path in _paths_of(volume):
            if _SYSTEM.fullmatch(path):
                raise InvalidInputError(
                    f"Volume `{volume.name}` would hide {path} of the container.",
                    remedy="mount it elsewhere in site.yaml, like `mount: /data`",
                )
            if path in mounts:
                raise InvalidInputError(
                    f"Volumes `{mounts[path].volume.name}` and `{volume.name}` are both {path}.",
                    remedy="give each volume of site.yaml its own `mount` and `local`",
                )
            mounts[path] = Mount(volume=volume, path=path, is_read_only=not is_written)
    return tuple(mounts.values())


def find_volume(site: KubernetesSite, path: str) -> Volume | None:
    """The volume through which pods see a path; of two nested ones the inner."""
    found = [
        (len(PurePosixPath(root).parts), volume)
        for volume in site.volumes
        for root in _paths_of(volume)
        if PurePosixPath(path).is_relative_to(root)
    ]
    return max(found, key=lambda item: item[0])[1] if found else None


def require_volume(site: KubernetesSite, path: str, what: str) -> None:
    """Refuse a path that no volume holds."""
    if find_volume(site, path) is not None:
        return
    real = os.path.realpath(path)
    if real != path and find_volume(site, real) is not None:
        raise NotFoundError(
            f"{what} {path} is a link to {real}; pods see only the latter.",
            remedy=f"name it as pods see it: {real}",
        )
    seen = ", ".join(root for one in site.volumes for root in _paths_of(one)) or "none"
    raise NotFoundError(
        f"No pod would see {what.lower()} {path}: the volumes of site.yaml are {seen}.",
        remedy=f"add one to kubernetes.volumes with `local: {Path(path).parent}`, or move "
        "it into one of them",
    )


def _paths_of(volume: Volume) -> tuple[str, ...]:
    paths = [str(PurePosixPath(volume.mount))]
    if volume.local is not None:
        paths.append(str(Path(volume.local).expanduser()))
    return tuple(dict.fromkeys(paths))


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
    node, ranks = plan.hardware.node, plan.strategy.gpus_per_node
    if node.gpu.is_cpu:
        cores = max(int((node.num_cores or DEFAULT_CORES) * NODE_SHARE), ranks, 1)
    else:
        cores = ranks * CORES_PER_GPU
        if node.num_cores is not None:
            share = int(node.num_cores * NODE_SHARE * ranks / node.num_gpus)
            cores = max(min(cores, share), 1)
    stated = node.host_memory_bytes
    most = None if stated is None else int(stated * NODE_SHARE)
    return PodResources(
        num_gpus=0 if node.gpu.is_cpu else ranks,
        num_cores=cores,
        memory_bytes=round_up_memory(estimate_memory_request(plan, most_bytes=most)),
        shm_bytes=round_up_memory(ranks * SHM_BYTES_PER_RANK + int(staged_bytes * STAGED_FACTOR)),
    )


def round_up_memory(num_bytes: int) -> int:
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
"""From the request to stop to the kill: a checkpoint is written meanwhile."""
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
    """After which a pod is asked to save and stop, counted from its start on a node."""
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
    user = task.user or User(uid=IMAGE_USER, gid=IMAGE_USER)
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
        # The site's own labels win over those that were found.
        node_selector={**task.node_selector, **ours.node_selector} or None,
        tolerations=_tolerations(task, site) or None,
        security_context=k8s.V1PodSecurityContext(
            run_as_user=user.uid,
            run_as_group=user.gid,
            run_as_non_root=True if user.uid else None,
            # Changing the owner of a whole file system takes hours: only an empty one is changed.
            fs_group=user.gid or None,
            fs_group_change_policy="OnRootMismatch" if user.gid else None,
            seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
        ),
        init_containers=first or None,
        containers=[_container(task, site, CONTAINER, task.argv)],
        volumes=_volumes(task),
    )
    return k8s.V1PodTemplateSpec(metadata=k8s.V1ObjectMeta(labels=label_job(task.name)), spec=spec)


def _container(task: Task, site: Site, name: str, argv: Sequence[str]) -> Model:
    k8s = load_client()
    secrets = [
        k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name=secret))
        for secret in site.kubernetes.secrets
    ]
    # Requests and limits are one: the pod gets what the plan counts on, and no less.
    amounts = {
        "cpu": str(task.resources.num_cores),
        "memory": write_quantity(task.resources.total_memory_bytes),
    }
    if task.resources.num_gpus:
        amounts[site.kubernetes.gpu_resource] = str(task.resources.num_gpus)
    return k8s.V1Container(
        name=name,
        image=require_image(site),
        command=list(argv[:1]),
        args=list(argv[1:]),
        env=_environment(task, site),
        env_from=secrets or None,
        resources=k8s.V1ResourceRequirements(requests=amounts, limits=dict(amounts)),
        security_context=k8s.V1SecurityContext(
            allow_privilege_escalation=False, capabilities=k8s.V1Capabilities(drop=["ALL"])
        ),
        volume_mounts=_volume_mounts(task),
        termination_message_policy="FallbackToLogsOnError",
    )


def _environment(task: Task, site: Site) -> list[Model]:
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


def _volumes(task: Task) -> list[Model]:
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


def _volume_mounts(task: Task) -> list[Model]:
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


def _tolerations(task: Task, site: Site) -> list[Model]:
    """The site's, and the customary one of GPU nodes, which not every cluster adds by itself."""
    k8s, ours = load_client(), site.kubernetes
    found = []
    for entry in ours.tolerations:
        unknown = next((key for key in entry if key not in _TOLERATION_KEYS), None)
        if unknown is not None:
            raise InvalidInputError(
                f"`{unknown}` is not a key of a toleration in site.yaml.",
                remedy=f"its keys are {', '.join(_TOLERATION_KEYS)}",
            )
        found.append(
            k8s.V1Toleration(**{_TOLERATION_KEYS[key]: value for key, value in entry.items()})
        )
    if task.resources.num_gpus and not any(one.key == ours.gpu_resource for one in found):
        found.append(
            k8s.V1Toleration(key=ours.gpu_resource, operator="Exists", effect="NoSchedule")
        )
    return found
