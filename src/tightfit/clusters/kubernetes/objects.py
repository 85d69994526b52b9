"""The objects of a job: Service, Job, ConfigMap, TrainJob; pure functions of plan, run and site."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import yaml

from tightfit.clusters.kubernetes.client import KubernetesApi, unknown_kind
from tightfit.clusters.kubernetes.pod import (
    FIELD_MANAGER,
    JOB_NAME_LABEL,
    SHM_PATH,
    Document,
    Model,
    Task,
    User,
    build_pod_template,
    choose_mounts,
    escape,
    label_job,
    load_client,
    name_job,
    read_resources,
    to_document,
)
from tightfit.clusters.nodes import DEFAULT_PORT
from tightfit.clusters.protocol import JobSpec
from tightfit.clusters.requirements import (
    MIN_RESTARTS,
    count_restarts,
    count_slices,
    estimate_run_seconds,
    round_limit,
)
from tightfit.clusters.site import Site
from tightfit.core.errors import (
    CheckFailedError,
    DivergedError,
    DoesNotFitError,
    InvalidInputError,
    NotFoundError,
    SetupError,
    UsageError,
)
from tightfit.core.units import MIB, render_bytes, render_seconds
from tightfit.planning.describe import name_method
from tightfit.planning.plan import Plan
from tightfit.runtime.staged import VARIABLE

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
    nobody else bounds it, and it looks no different where it follows a preempted neighbour. An
    error of the job's own ends it at once; of independent workers only the one that has it,
    whose node may be why.
    """
    k8s = load_client()
    disrupted = k8s.V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
    final = k8s.V1PodFailurePolicyOnExitCodesRequirement(operator="In", values=list(FINAL_CODES))
    action = "FailJob" if is_group else "FailIndex"
    return k8s.V1PodFailurePolicy(
        rules=[
            k8s.V1PodFailurePolicyRule(action="Ignore", on_pod_conditions=[disrupted]),
            k8s.V1PodFailurePolicyRule(action=action, on_exit_codes=final),
        ]
    )


# The objects that train a plan: a plain Job, or a TrainJob of Kubeflow Trainer v2.

PULL_SECONDS = 900
"""For an image of several GiB: a pod's time counts from before it is there."""
RUN_ANNOTATION = "tightfit-run"
PLAN_ANNOTATION = "tightfit-plan"
PLAN_FILE = "plan.json"
STAGED_PATH = f"{SHM_PATH}/staged"
"""A folder of the pod's own: the kubelet makes RAM disks writable for all and not sticky (mode
0777, pkg/volume/emptydir), and in such a place `tightfit stage` puts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(JobSpec):
    """One run on a cluster; `run` is its folder as the pods see it."""

    staged_bytes: int = 0
    """Of the model, which each pod first copies to its RAM disk; 0: it is read from its volume."""
    user: User | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    seconds: int | None = None
    """How long a pod may run; None: by the prediction."""

    @property
    def name(self) -> str:
        return name_job(self.run.name, place=str(self.run))

    @property
    def num_pods(self) -> int:
        return self.plan.strategy.num_nodes


def build_training(job: TrainingJob, site: Site) -> list[Document]:
    """A Job; with a Service where pods have to find each other, and a ConfigMap for a plan."""
    namespace = site.kubernetes.namespace
    meeting = f"{job.name}-0.{job.name}.{namespace}.svc:{DEFAULT_PORT}"
    task = make_task(job, site, meeting=meeting)
    found = build_plan_config_map(job, site)
    if job.num_pods > 1:
        found.append(build_service(job.name, namespace=namespace))
    num_restarts = 0
    if job.can_requeue:  # enough for the slices that a short time limit cuts the run into
        num_slices = count_slices(estimate_run_seconds(job.plan), limit=job.seconds)
        num_restarts = count_restarts(num_slices)
    made = build_job(
        task,
        site,
        num_pods=job.num_pods,
        is_group=True,
        num_restarts=num_restarts,
        annotations=describe_job(job),
    )
    return [*found, made]


def build_plan_config_map(job: TrainingJob, site: Site) -> list[Document]:
    """The plan as a ConfigMap, where it travels with the job."""
    if not job.carries_plan:
        return []
    text = job.plan.model_dump_json() + "\n"
    size = len(PLAN_FILE) + len(text.encode())
    if size > MAX_CONFIG_BYTES:
        raise InvalidInputError(
            f"The plan has {render_bytes(size)}; a ConfigMap holds {render_bytes(MIB)}.",
            remedy="keep the run folder on a volume that this machine sees: `local:` in site.yaml",
        )
    k8s = load_client()
    meta = k8s.V1ObjectMeta(
        name=job.name, namespace=site.kubernetes.namespace, labels=label_job(job.name)
    )
    config = k8s.V1ConfigMap(
        api_version="v1", kind="ConfigMap", metadata=meta, data={PLAN_FILE: text}
    )
    return [to_document(config)]


def make_task(job: TrainingJob, site: Site, *, meeting: str) -> Task:
    """What each pod does. `meeting`, the rendezvous, may hold variables of the pod."""
    words = job.argv or ("tightfit", "train", str(job.run), "--as-planned")
    argv = tuple(escape(word) for word in words)
    if job.num_pods > 1:
        argv += (
            *("--nodes", str(job.num_pods), "--rendezvous", meeting),
            *("--node-rank", "$(JOB_COMPLETION_INDEX)", "--local-addr", "$(POD_IP)"),
            *("--interface", escape(site.kubernetes.interface)),
        )
    first_argv = None
    if job.staged_bytes and job.plan.training is not None:
        # Copied by a container that ends before training starts; the copy stays in the RAM disk.
        stage = ["tightfit", "stage", job.plan.training.model_path, "--to", STAGED_PATH]
        line = f"mkdir -p -m 700 {STAGED_PATH} && exec {shlex.join(stage)}"
        first_argv = ("sh", "-c", escape(line))
    return Task(
        name=job.name,
        argv=argv,
        first_argv=first_argv,
        resources=read_resources(job.plan, staged_bytes=job.staged_bytes),
        mounts=choose_mounts(site.kubernetes, written=(str(job.run),)),
        environment={VARIABLE: STAGED_PATH} if job.staged_bytes else {},
        seconds=job.seconds or predict_seconds(job.plan),
        user=job.user,
        config_map=job.name if job.carries_plan else None,
        node_selector=job.node_selector,
    )


def describe_job(job: TrainingJob) -> dict[str, str]:
    """For people who look at the Job: where its files are, and what was predicted."""
    plan, strategy = job.plan, job.plan.strategy
    method = name_method(strategy)
    what = f"{plan.model.name}, {method}, {job.num_pods} x {strategy.gpus_per_node}"
    gpu = plan.hardware.node.gpu.name
    seconds = plan.estimate.time.seconds_per_step * (plan.num_steps or 0)
    reported = f", about {render_seconds(seconds)}" if seconds else ""
    return {RUN_ANNOTATION: str(job.run), PLAN_ANNOTATION: f"{what} {gpu}{reported}"}


def predict_seconds(plan: Plan) -> int | None:
    """How long a pod may run; None where the run's length is not known.

    Counted from the pod's start on a node: a Job's own deadline would count the hours in which
    it waits for GPUs too.
    """
    seconds = estimate_run_seconds(plan)
    return None if seconds is None else int(round_limit(seconds + PULL_SECONDS))


# The same pods as a TrainJob of Kubeflow Trainer v2, which makes Job and Service itself.

API_VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIME = "torch-distributed"
"""The runtime that comes with the Trainer; any other with a torch policy does too."""
DEADLINE_FACTOR = 2
"""On a pod's time: a TrainJob's deadline ends it for good, where a pod saves and comes back."""
_NODE = "node"
"""What the Trainer calls both its job and the container in it."""
_RENDEZVOUS = "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
"""Variables that the Trainer gives every pod of a torch runtime."""


def why_no_train_job(job: TrainingJob, site: Site) -> str | None:
    """What this job needs and a TrainJob lacks; None where it can be one."""
    ours = site.kubernetes
    if ours.secrets:
        return "takes no whole Secrets as variables"
    if ours.priority_class is not None:
        return "has no priority class"
    if job.staged_bytes:
        return "cannot stage a model before it starts"
    return None


def build_train_job(job: TrainingJob, site: Site, *, runtime: str = RUNTIME) -> list[Document]:
    """Retries and the failure policy are the runtime's own."""
    why = why_no_train_job(job, site)
    if why is not None:
        raise UsageError(f"A TrainJob {why}.", remedy="--as job    (a plain Job can)")
    task = make_task(job, site, meeting=_RENDEZVOUS)
    pod = to_document(build_pod_template(task, site, subdomain=None))["spec"]
    (container,) = pod["containers"]
    labels = label_job(job.name)
    if site.kubernetes.queue is not None:
        labels[QUEUE_LABEL] = site.kubernetes.queue
    spec: Document = {
        "runtimeRef": {
            "apiGroup": API_VERSION.partition("/")[0],
            "kind": "ClusterTrainingRuntime",
            "name": runtime,
        },
        "trainer": {
            **{key: container[key] for key in ("image", "command", "args", "env")},
            "numNodes": job.num_pods,
            "numProcPerNode": job.plan.strategy.gpus_per_node,
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [_patch(pod, container)],
    }
    if site.kubernetes.queue is not None and task.seconds is not None:
        # Counted from when Kueue lets the job go; without a queue it would count the waiting too.
        spec["activeDeadlineSeconds"] = job.seconds or DEADLINE_FACTOR * task.seconds
    train_job = {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": {
            "name": job.name,
            "namespace": site.kubernetes.namespace,
            "labels": labels,
            "annotations": describe_job(job),
        },
        "spec": spec,
    }
    return [*build_plan_config_map(job, site), train_job]


_PATCHED = ("terminationGracePeriodSeconds", "securityContext", "volumes", "containers",
            "serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations")  # fmt: skip
"""What a TrainJob may change in its runtime's pods."""


def _patch(pod: Document, container: Document) -> Document:
    kept = {key: container[key] for key in ("securityContext", "volumeMounts")}
    patched = {**pod, "containers": [{"name": _NODE, **kept}]}
    spec = {key: patched[key] for key in _PATCHED if key in patched}
    node = {"name": _NODE, "template": {"spec": {"template": {"spec": spec}}}}
    return {
        "manager": FIELD_MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }


# A plain Job or a TrainJob.

Builder = Callable[[TrainingJob, Site], list[Document]]


def choose_builder(
    job: TrainingJob, site: Site, cluster: KubernetesApi | None, *, asked: str | None
) -> tuple[Builder, str]:
    """How the objects are made, and a sentence where that was not asked for.

    A TrainJob where Kubeflow Trainer is installed, unless it lacks what the job needs.
    """
    if asked == "job":
        return build_training, ""
    if asked is None and (cluster is None or why_no_train_job(job, site) or not job.can_requeue):
        return build_training, ""
    home = f"/apis/{API_VERSION}"
    if cluster is not None:
        if cluster.get_path(home) is None:
            error = unknown_kind("TrainJob", site.kubernetes.namespace)
        elif cluster.get_path(f"{home}/clustertrainingruntimes/{RUNTIME}") is None:
            error = NotFoundError(
                f"Kubeflow Trainer is installed, but has no runtime `{RUNTIME}`.",
                remedy="--as job, or have its runtimes installed    (kubectl get "
                "clustertrainingruntimes)",
            )
        else:
            error = None
        if error is not None and asked is None:
            return build_training, ""
        if error is not None:
            raise error
    note = "Kubeflow Trainer is installed: this is a TrainJob (--as job for a plain one)"
    return build_train_job, note if asked is None else ""


# A Job of independent workers: each pod runs the same command until it has nothing more to do.

WORKER_NUMBER = "$(JOB_COMPLETION_INDEX)"
"""A word of `argv` that becomes the pod's number, from 0."""


def worker_job(task: Task, site: Site, *, num_workers: int) -> list[Document]:
    """The objects to write or apply: one Indexed Job of `num_workers` pods.

    The task's `argv` is plain words; one that is `WORKER_NUMBER` becomes the pod's number, and
    nothing else is expanded. A pod that is preempted or drained comes back and is not counted; one
    that fails or stops comes back up to ten times; an error that no restart cures ends that worker
    alone. The Job is complete when all have ended with 0.
    """
    argv = tuple(word if word == WORKER_NUMBER else escape(word) for word in task.argv)
    job = build_job(
        replace(task, name=name_job(task.name), argv=argv),
        site,
        num_pods=num_workers,
        is_group=False,
        num_restarts=MIN_RESTARTS,
        annotations={},
    )
    return [job]


# Objects as a YAML file for kubectl.

_FIRST = ("apiVersion", "kind", "metadata", "spec", "name")


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key, and no aliases for repeated values."""

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
