"""A plain Job or a TrainJob."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.core.errors import NotFoundError
from tightfit.launch.kubernetes.connect import Cluster
from tightfit.launch.kubernetes.pod import Document
from tightfit.launch.kubernetes.training import TrainingJob, build_training
from tightfit.launch.kubernetes.trainjob import (
    API_VERSION,
    RUNTIME,
    build_train_job,
    why_no_train_job,
)
from tightfit.launch.site import Site

Builder = Callable[[TrainingJob, Site], list[Document]]


def choose_builder(
    job: TrainingJob, site: Site, cluster: Cluster | None, *, asked: str | None
) -> tuple[Builder, str]:
    """How the objects are made, and a sentence where that was not asked for.

    A TrainJob where Kubeflow Trainer is installed, unless it cannot say what the job needs.
    """
    if asked == "job" or (asked is None and cluster is None):
        return build_training, ""
    if asked is None and (why_no_train_job(job, site) or not job.can_restart):
        return build_training, ""
    if cluster is not None:
        fault = _why_not_installed(cluster)
        if fault is not None and asked is None:
            return build_training, ""
        if fault is not None:
            raise fault
    told = "Kubeflow Trainer is installed: this is a TrainJob (--as job for a plain one)"
    return build_train_job, told if asked is None else ""


def _why_not_installed(cluster: Cluster) -> NotFoundError | None:
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
