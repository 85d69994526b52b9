"""A plan as the objects that train it: pure functions of plan, run folder and site."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from tightfit.core.units import render_seconds
from tightfit.launch.kubernetes.names import escape, name_job
from tightfit.launch.kubernetes.objects import build_config_map, build_job, build_service
from tightfit.launch.kubernetes.pod import SHM_PATH, Document, Task, User
from tightfit.launch.kubernetes.resources import read_resources
from tightfit.launch.kubernetes.volumes import choose_mounts
from tightfit.launch.margins import (
    count_restarts,
    count_slices,
    estimate_run_seconds,
    round_limit,
)
from tightfit.launch.rendezvous import DEFAULT_PORT
from tightfit.launch.site import Site
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
    found = build_companions(job, site)
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


def build_companions(job: TrainingJob, site: Site) -> list[Document]:
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
    told = f", about {render_seconds(seconds)}" if seconds else ""
    return {RUN_ANNOTATION: job.run, PLAN_ANNOTATION: f"{what} {gpu}{told}"}


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
