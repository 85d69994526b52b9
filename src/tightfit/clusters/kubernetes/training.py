"""A plan as the objects that train it: a plain Job, or a TrainJob of Kubeflow Trainer v2.

Pure functions of plan, run folder and site; `choose_builder` asks the cluster which of the two.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tightfit.clusters.kubernetes.client import KubernetesApi
from tightfit.clusters.kubernetes.names import FIELD_MANAGER, escape, label_job, name_job
from tightfit.clusters.kubernetes.objects import (
    QUEUE_LABEL,
    build_config_map,
    build_job,
    build_service,
)
from tightfit.clusters.kubernetes.pod import (
    GRACE_SECONDS,
    SHM_PATH,
    Document,
    Task,
    User,
    build_container_security,
    build_environment,
    build_pod_security,
    build_resources,
    build_tolerations,
    build_volume_mounts,
    build_volumes,
    read_resources,
    require_image,
    select_nodes,
    to_document,
)
from tightfit.clusters.kubernetes.volumes import choose_mounts
from tightfit.clusters.rendezvous import DEFAULT_PORT
from tightfit.clusters.requirements import (
    count_restarts,
    count_slices,
    estimate_run_seconds,
    round_limit,
)
from tightfit.clusters.site import Site
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.units import render_seconds
from tightfit.planning.plan import Plan
from tightfit.planning.request import name_method
from tightfit.runtime.staged import VARIABLE

PULL_SECONDS = 900
"""For an image of several GiB: a pod's time counts from before it is there."""
RUN_ANNOTATION = "tightfit-run"
PLAN_ANNOTATION = "tightfit-plan"
PLAN_FILE = "plan.json"
STAGED_PATH = f"{SHM_PATH}/staged"
"""A folder of the pod's own: the kubelet makes RAM disks writable for all and not sticky (mode
0777, pkg/volume/emptydir), and in such a place `tightfit stage` puts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One run on a cluster."""

    plan: Plan
    run: str
    """The run's folder as the pods see it."""
    argv: tuple[str, ...] | None = None
    """In place of `tightfit train RUN --as-planned`; the place to meet is added."""
    carries_plan: bool = False
    """The plan travels in a ConfigMap, for a run folder that this machine does not see."""
    staged_bytes: int = 0
    """Of the model, which each pod first copies to its RAM disk; 0: it is read from its volume."""
    user: User | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    seconds: int | None = None
    """How long a pod may run; None: by the prediction."""
    can_restart: bool = True

    @property
    def name(self) -> str:
        return name_job(self.run.rstrip("/").rpartition("/")[2], place=self.run)

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
    made = build_job(
        task,
        site,
        num_pods=job.num_pods,
        is_group=True,
        num_restarts=_count_restarts(job),
        annotations=describe_job(job),
    )
    return [*found, made]


def build_plan_config_map(job: TrainingJob, site: Site) -> list[Document]:
    """The plan as a ConfigMap, where it travels with the job."""
    if not job.carries_plan:
        return []
    files = {PLAN_FILE: job.plan.model_dump_json() + "\n"}
    return [build_config_map(job.name, files, namespace=site.kubernetes.namespace)]


def make_task(job: TrainingJob, site: Site, *, meeting: str) -> Task:
    """What each pod does. `meeting` may hold variables of the pod."""
    words = job.argv or ("tightfit", "train", job.run, "--as-planned")
    argv = tuple(escape(word) for word in words)
    if job.num_pods > 1:
        argv += (
            *("--nodes", str(job.num_pods), "--rendezvous", meeting),
            *("--node-rank", "$(JOB_COMPLETION_INDEX)", "--local-addr", "$(POD_IP)"),
            *("--interface", escape(site.kubernetes.interface)),
        )
    return Task(
        name=job.name,
        argv=argv,
        first_argv=_stage(job),
        resources=read_resources(job.plan, staged_bytes=job.staged_bytes),
        mounts=choose_mounts(site.kubernetes, written=(job.run,)),
        environment={VARIABLE: STAGED_PATH} if job.staged_bytes else {},
        seconds=job.seconds or predict_seconds(job.plan),
        user=job.user,
        config_map=job.name if job.carries_plan else None,
        node_selector=job.node_selector,
    )


def _stage(job: TrainingJob) -> tuple[str, ...] | None:
    """Copied by a container that ends before training starts; the copy stays in the RAM disk."""
    training = job.plan.training
    if not job.staged_bytes or training is None:
        return None
    words = shlex.join(["tightfit", "stage", training.model_path, "--to", STAGED_PATH])
    return ("sh", "-c", escape(f"mkdir -p -m 700 {STAGED_PATH} && exec {words}"))


def describe_job(job: TrainingJob) -> dict[str, str]:
    """For people who look at the Job: where its files are, and what was predicted."""
    plan, strategy = job.plan, job.plan.strategy
    method = name_method(strategy)
    what = f"{plan.model.name}, {method}, {job.num_pods} x {strategy.gpus_per_node}"
    gpu = plan.hardware.node.gpu.name
    seconds = plan.estimate.time.seconds_per_step * (plan.num_steps or 0)
    reported = f", about {render_seconds(seconds)}" if seconds else ""
    return {RUN_ANNOTATION: job.run, PLAN_ANNOTATION: f"{what} {gpu}{reported}"}


def predict_seconds(plan: Plan) -> int | None:
    """How long a pod may run; None where the run's length is not known.

    Counted from the pod's start on a node: a Job's own deadline would count the hours in which
    it waits for GPUs too.
    """
    seconds = estimate_run_seconds(plan)
    return None if seconds is None else int(round_limit(seconds + PULL_SECONDS))


def _count_restarts(job: TrainingJob) -> int:
    """Enough for the slices that a short time limit cuts the run into."""
    if not job.can_restart:
        return 0
    return count_restarts(count_slices(estimate_run_seconds(job.plan), limit=job.seconds))


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
    """What this job needs and a TrainJob cannot say; None where it can be one."""
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
            "image": require_image(site),
            "command": [task.argv[0]],
            "args": list(task.argv[1:]),
            "env": to_document(build_environment(task, site)),
            "numNodes": job.num_pods,
            "numProcPerNode": job.plan.strategy.gpus_per_node,
            "resourcesPerNode": to_document(build_resources(task.resources, site)),
        },
        "runtimePatches": [_patch(task, site)],
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


def _patch(task: Task, site: Site) -> Document:
    """What a TrainJob may change in its runtime's pods."""
    ours = site.kubernetes
    pod: Document = {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": to_document(build_pod_security(task)),
        "volumes": to_document(build_volumes(task)),
        "containers": [
            {
                "name": _NODE,
                "securityContext": to_document(build_container_security()),
                "volumeMounts": to_document(build_volume_mounts(task)),
            }
        ],
    }
    if ours.service_account is not None:
        pod["serviceAccountName"] = ours.service_account
    if ours.image_pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": ours.image_pull_secret}]
    if selector := select_nodes(task, site):
        pod["nodeSelector"] = selector
    if tolerations := build_tolerations(task, site):
        pod["tolerations"] = to_document(tolerations)
    node = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
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

    A TrainJob where Kubeflow Trainer is installed, unless it cannot say what the job needs.
    """
    if asked == "job" or (asked is None and cluster is None):
        return build_training, ""
    if asked is None and (why_no_train_job(job, site) or not job.can_restart):
        return build_training, ""
    if cluster is not None:
        error = _why_not_installed(cluster)
        if error is not None and asked is None:
            return build_training, ""
        if error is not None:
            raise error
    reported = "Kubeflow Trainer is installed: this is a TrainJob (--as job for a plain one)"
    return build_train_job, reported if asked is None else ""


def _why_not_installed(cluster: KubernetesApi) -> NotFoundError | None:
    home = f"/apis/{API_VERSION}"
    if cluster.get_path(home) is None:
        return NotFoundError(
            "This cluster knows no TrainJob: Kubeflow Trainer v2 is not installed.",
            remedy="--as job    (a plain Job needs nothing installed)",
        )
    if cluster.get_path(f"{home}/clustertrainingruntimes/{RUNTIME}") is None:
        return NotFoundError(
            f"Kubeflow Trainer is installed, but has no runtime `{RUNTIME}`.",
            remedy="--as job, or have its runtimes installed    (kubectl get "
            "clustertrainingruntimes)",
        )
    return None
