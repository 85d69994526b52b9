"""Service, Job and ConfigMap around the pods; a Job of independent workers; objects as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from tightfit.clusters.kubernetes.names import escape, label_job, name_job
from tightfit.clusters.kubernetes.pod import (
    Document,
    Model,
    PodResources,
    Task,
    User,
    build_pod_template,
    load_client,
    to_document,
)
from tightfit.clusters.kubernetes.volumes import choose_mounts
from tightfit.clusters.rendezvous import DEFAULT_PORT
from tightfit.clusters.requirements import MIN_RESTARTS
from tightfit.clusters.site import Site
from tightfit.core.errors import (
    CheckFailedError,
    DivergedError,
    DoesNotFitError,
    InvalidInputError,
    NotFoundError,
    SetupError,
)
from tightfit.core.units import MIB, render_bytes

JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KEEP_SECONDS = 86_400
"""How long a Job that is over can be looked at."""
MAX_CONFIG_BYTES = MIB
"""Of a ConfigMap's data. Source: kubernetes.io/docs/concepts/configuration/configmap."""

FINAL_CODES = tuple(
    sorted(
        kind.exit_code
        for kind in (
            NotFoundError,
            InvalidInputError,
            DoesNotFitError,
            SetupError,
            DivergedError,
            CheckFailedError,
        )
    )
)
"""Exit codes that no restart cures. Not 2, with which a pod ends that finds the run folder locked
by one before it."""


def build_service(name: str, *, namespace: str, port: int = DEFAULT_PORT) -> Document:
    """Headless, so that each pod has a name of its own, and has it before it is ready."""
    k8s = load_client()
    service = k8s.V1Service(
        api_version="v1",
        kind="Service",
        metadata=k8s.V1ObjectMeta(name=name, namespace=namespace, labels=label_job(name)),
        spec=k8s.V1ServiceSpec(
            cluster_ip="None",
            publish_not_ready_addresses=True,
            selector={JOB_NAME_LABEL: name},
            ports=[k8s.V1ServicePort(name="rendezvous", port=port)],
        ),
    )
    return to_document(service)


def build_job(
    task: Task,
    site: Site,
    *,
    num_pods: int,
    is_group: bool,
    num_restarts: int,
    annotations: Mapping[str, str],
) -> Document:
    """An Indexed Job: each pod has a number that outlives it.

    `is_group`: the pods are one job, found by name, which is lost with any of them. Otherwise
    they are independent, and the others go on where one has failed for good. `num_restarts` of
    each number, with pauses of 10 s, 20 s, 40 s and so on: longer than a file server keeps a dead
    pod's lock.
    """
    k8s, ours = load_client(), site.kubernetes
    labels = label_job(task.name)
    if ours.queue is not None:
        labels[QUEUE_LABEL] = ours.queue
    is_meeting = is_group and num_pods > 1
    spec = k8s.V1JobSpec(
        completion_mode="Indexed",
        completions=num_pods,
        parallelism=num_pods,
        backoff_limit_per_index=num_restarts,
        max_failed_indexes=0 if is_group else None,
        pod_failure_policy=_failure_policy(is_group=is_group) if num_restarts else None,
        pod_replacement_policy="Failed",  # two pods of one number would undo each other's work
        ttl_seconds_after_finished=KEEP_SECONDS,
        template=build_pod_template(task, site, subdomain=task.name if is_meeting else None),
    )
    job = k8s.V1Job(
        api_version="batch/v1",
        kind="Job",
        metadata=k8s.V1ObjectMeta(
            name=task.name,
            namespace=ours.namespace,
            labels=labels,
            annotations=dict(annotations) or None,
        ),
        spec=spec,
    )
    return to_document(job)


def _failure_policy(*, is_group: bool) -> Model:
    """A pod that the cluster preempted, evicted or drained is no failure, however often.

    All else counts against the restarts, also a pod that saved and stopped: at its deadline
    nobody else bounds it, and it looks no different where it follows a preempted neighbour. A
    error of the job's own ends it at once; of independent workers only the one that has it,
    whose node may be why.
    """
    k8s = load_client()

    def on_codes(action: str, codes: Sequence[int]) -> Model:
        values = k8s.V1PodFailurePolicyOnExitCodesRequirement(operator="In", values=list(codes))
        return k8s.V1PodFailurePolicyRule(action=action, on_exit_codes=values)

    disrupted = k8s.V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
    return k8s.V1PodFailurePolicy(
        rules=[
            k8s.V1PodFailurePolicyRule(action="Ignore", on_pod_conditions=[disrupted]),
            on_codes("FailJob" if is_group else "FailIndex", FINAL_CODES),
        ]
    )


def build_config_map(name: str, files: dict[str, str], *, namespace: str) -> Document:
    """Small files that travel with the job."""
    size = sum(len(key.encode()) + len(text.encode()) for key, text in files.items())
    if size > MAX_CONFIG_BYTES:
        raise InvalidInputError(
            f"The plan has {render_bytes(size)}; a ConfigMap holds {render_bytes(MIB)}.",
            remedy="keep the run folder on a volume that this machine sees: `local:` in site.yaml",
        )
    k8s = load_client()
    config = k8s.V1ConfigMap(
        api_version="v1",
        kind="ConfigMap",
        metadata=k8s.V1ObjectMeta(name=name, namespace=namespace, labels=label_job(name)),
        data=dict(files),
    )
    return to_document(config)


# A Job of independent workers: each pod runs the same command until it has nothing more to do.

WORKER_NUMBER = "$(JOB_COMPLETION_INDEX)"
"""A word of `argv` that becomes the pod's number, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a farm may say beside command, number and size."""

    written: tuple[str, ...] = ()
    """Paths that the workers write to; volumes that hold none of them are read-only."""
    environment: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    seconds: int | None = None
    """After which a pod is told to stop."""
    user: User | None = None
    """Who owns the folder that is written to. None: user 1000, as in our images."""


def worker_job(
    name: str,
    argv: Sequence[str],
    *,
    num_workers: int,
    resources: PodResources,
    site: Site,
    options: WorkerOptions | None = None,
) -> list[Document]:
    """The objects to write or apply: one Indexed Job of `num_workers` pods.

    `argv` is plain words; a word that is `WORKER_NUMBER` becomes the pod's number, and nothing
    else is expanded. A pod that is preempted or drained comes back and is not counted; one that
    fails or stops comes back up to ten times; an error that no restart cures ends that worker
    alone. The Job is complete when all have ended with 0.
    """
    chosen = options or WorkerOptions()
    task = Task(
        name=name_job(name),
        argv=tuple(word if word == WORKER_NUMBER else escape(word) for word in argv),
        resources=resources,
        mounts=choose_mounts(site.kubernetes, written=chosen.written),
        environment=chosen.environment,
        seconds=chosen.seconds,
        user=chosen.user,
        node_selector=chosen.node_selector,
    )
    return [
        build_job(
            task,
            site,
            num_pods=num_workers,
            is_group=False,
            num_restarts=MIN_RESTARTS,
            annotations=chosen.annotations,
        )
    ]


# Objects as a YAML file for kubectl.

_FIRST = ("apiVersion", "kind", "metadata", "spec", "name")


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key, and no aliases for what is said twice."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def write_manifest(objects: Sequence[Document], *, comment: str = "") -> str:
    """One document per object, in the order in which they are applied."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    documents = (
        yaml.dump(_in_order(one), Dumper=_Dumper, sort_keys=False, width=1000) for one in objects
    )
    return head + "---\n".join(documents)


def _in_order(thing: object) -> object:
    """What a thing is comes before what is in it."""
    if isinstance(thing, dict):
        keys = [key for key in _FIRST if key in thing]
        keys += [key for key in thing if key not in _FIRST]
        return {key: _in_order(thing[key]) for key in keys}
    return [_in_order(item) for item in thing] if isinstance(thing, list) else thing
