"""The same pods as a TrainJob of Kubeflow Trainer v2, which makes Job and Service itself."""

from __future__ import annotations

from tightfit.core.errors import UsageError
from tightfit.launch.kubernetes.names import FIELD_MANAGER, label_job
from tightfit.launch.kubernetes.objects import QUEUE_LABEL
from tightfit.launch.kubernetes.pod import (
    GRACE_SECONDS,
    Document,
    Task,
    build_container_security,
    build_environment,
    build_pod_security,
    build_resources,
    build_tolerations,
    build_volume_mounts,
    build_volumes,
    require_image,
    select_nodes,
    to_document,
)
from tightfit.launch.kubernetes.training import (
    TrainingJob,
    build_companions,
    describe_job,
    make_task,
)
from tightfit.launch.site import Site

API_VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIME = "torch-distributed"
"""The runtime that comes with the Trainer; any other with a torch policy does too."""
DEADLINE_FACTOR = 2
"""On a pod's time: a TrainJob's deadline ends it for good, where a pod saves and comes back."""
_NODE = "node"
"""What the Trainer calls both its job and the container in it."""
_MEETING = "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
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
    task = make_task(job, site, meeting=_MEETING)
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
    return [*build_companions(job, site), train_job]


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
