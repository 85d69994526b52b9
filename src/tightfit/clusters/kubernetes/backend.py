"""Kubernetes behind the cluster protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from tightfit.clusters.kubernetes.client import (
    JOB_KINDS,
    JobPhase,
    JobSnapshot,
    KubernetesApi,
    apply_objects,
    check_claims,
    connect,
    describe_pod,
    find_job_object,
    is_over,
    wait_for_job,
)
from tightfit.clusters.kubernetes.objects import TrainingJob, choose_builder, write_manifest
from tightfit.clusters.kubernetes.options import KINDS, KubernetesOptions
from tightfit.clusters.kubernetes.pod import (
    FIELD_MANAGER,
    MANAGER_LABEL,
    Document,
    User,
    check_site_names,
    find_volume,
    name_job,
    require_image,
    require_volume,
)
from tightfit.clusters.local.outcome import read_state, run_error
from tightfit.clusters.protocol import (
    ClusterBackend,
    ClusterOptions,
    Draft,
    Job,
    JobEnd,
    JobSpec,
    RunObserver,
)
from tightfit.clusters.site import Site
from tightfit.core.errors import NotFoundError, SetupError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.text import shorten
from tightfit.core.units import parse_time_limit
from tightfit.hardware.catalogue import guess_gpu
from tightfit.hardware.inventory import plannable_cluster
from tightfit.hardware.kubernetes import RUNNING, build_inventory, read_labels
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

MANIFEST_FILE = "job.yaml"
_COMMENT = "Written by `tightfit submit`; by hand: kubectl apply --server-side -f FILE"


class KubernetesBackend(ClusterBackend):
    """A plan as a Job or TrainJob in one namespace of the cluster that a kubeconfig names."""

    title = "Kubernetes"
    takes = frozenset(field.name for field in fields(KubernetesOptions))
    other_options = "leave it out; queue, priority_class and node_selector are in site.yaml"

    def __init__(self, options: ClusterOptions, site: Site) -> None:
        limit = None if options.time_limit is None else parse_time_limit(options.time_limit)
        self._limit_seconds = None if limit is None else int(limit)
        self._kind = None if options.kind is None else options.kind.strip().lower()
        if self._kind not in (None, *KINDS):
            raise UsageError(
                f"`--as {shorten(options.kind or '')}` is not known.",
                remedy=f"--as {'|'.join(KINDS)}",
            )
        self._options = options
        self._api: KubernetesApi | None = None
        namespace = options.namespace
        if not options.is_offline:
            self._api = connect(
                site.kubernetes, context=options.context, namespace=options.namespace
            )
            namespace = self._api.namespace
        if namespace is not None:
            ours = site.kubernetes.model_copy(update={"namespace": namespace})
            site = site.model_copy(update={"kubernetes": ours})
        require_image(site)
        check_site_names(site.kubernetes)
        self._site = site

    @property
    def _connected(self) -> KubernetesApi:
        assert self._api is not None, "an offline backend only drafts"
        return self._api

    def inventory(self) -> Cluster:
        return find_nodes(self._options.target, self._api)

    def check_files(self, files: Mapping[str, Path]) -> list[str]:
        for what, path in files.items():
            require_volume(self._site.kubernetes, str(path.absolute()), what)
        return []

    def is_remote(self, folder: Path) -> bool:
        """Whether it lies on a volume that has no `local` path in site.yaml."""
        volume = find_volume(self._site.kubernetes, str(folder))
        return volume is not None and volume.local is None and not folder.exists()

    def translate_plan(self, plan: Plan) -> Plan:
        local = _find_local_model(plan)
        if local is None:
            return plan  # a hub id, which pods look for in HF_HOME
        if find_volume(self._site.kubernetes, local) is None:
            raise NotFoundError(
                f"No pod would see {local}, the model of {plan.model.name}'s plan: no volume of "
                "site.yaml holds it.",
                remedy="add its folder to kubernetes.volumes in site.yaml, or plan the model by "
                "its hub name",
            )
        if plan.training is None:
            return plan.model_copy(update={"model": plan.model.model_copy(update={"name": local})})
        training = plan.training.model_copy(update={"model_path": local})
        return plan.model_copy(update={"training": training})

    def find_job(self, run: RunFolder) -> Job | None:
        folder = run.path.absolute()
        name = name_job(folder.name, place=str(folder))
        for kind in JOB_KINDS if self._api is not None else ():
            held = self._connected.get(kind, name)
            if held is not None and not is_over(held):
                return _make_job({**held, "kind": kind}, run)
        return None

    def find_job_by_id(self, job_id: str) -> Job | None:
        for kind in JOB_KINDS:
            held = self._connected.get(kind, job_id)
            if held is None:
                continue
            if (held["metadata"].get("labels") or {}).get(MANAGER_LABEL) != FIELD_MANAGER:
                raise UsageError(
                    f"{kind} {job_id} was not made by tightfit.",
                    remedy=f"kubectl delete {kind.lower()} {job_id} -n {self._connected.namespace}",
                )
            return None if is_over(held) else _make_job({**held, "kind": kind}, None)
        raise NotFoundError(
            f"Namespace {self._connected.namespace} has no Job {job_id}.",
            remedy=f"kubectl get jobs -n {self._connected.namespace}    (lists them)",
        )

    def draft(self, spec: JobSpec) -> Draft:
        selector, notes = select_plan_nodes(spec.plan, self._site, self._api)
        user = None
        if not spec.carries_plan:  # pods write in the folder as its owner, or who will own it
            owner = spec.run.stat() if spec.run.exists() else None
            uid, gid = (owner.st_uid, owner.st_gid) if owner else (os.getuid(), os.getgid())
            user = User(uid=uid, gid=gid)
        if user is not None and user.uid == 0:
            notes.append("the run folder belongs to root, so the pods run as root")
        staged_bytes = 0
        if self._options.stage and spec.plan.training is not None:
            from tightfit.runtime.staged import read_source

            model = Path(spec.plan.training.model_path)
            staged_bytes = read_source(model, block_bytes=1).num_bytes
        job = TrainingJob(
            **{one.name: getattr(spec, one.name) for one in fields(spec)},
            staged_bytes=staged_bytes,
            user=user,
            node_selector=selector,
            seconds=self._limit_seconds,
        )
        build, why = choose_builder(job, self._site, self._api, asked=self._kind)
        notes += [why] if why else []
        objects = build(job, self._site)
        if self._api is not None:
            notes += check_claims(self._api, objects, num_pods=job.num_pods)
        leader = find_job_object(objects)
        return Draft(
            spec=spec,
            title="Objects",
            text=write_manifest(objects, comment=_COMMENT),
            file_name=MANIFEST_FILE,
            notes=tuple(notes),
            details={
                "job": leader["metadata"]["name"],
                "kind": leader["kind"],
                "namespace": leader["metadata"]["namespace"],
                "objects": objects,
            },
        )

    def submit(self, draft: Draft) -> Job:
        run = None if draft.spec.carries_plan else RunFolder(path=draft.spec.run)
        if run is not None:
            write_atomic(run.path / MANIFEST_FILE, draft.text)
        objects: list[Document] = draft.details["objects"]
        apply_objects(self._connected, objects)
        plan = draft.spec.plan.model_dump(mode="json")
        return _make_job(find_job_object(objects), run, {**draft.details, "plan": plan})

    def follow(self, job: Job, observer: RunObserver) -> JobEnd:
        kind, namespace = job.details["kind"], job.details["namespace"]
        last = wait_for_job(self._connected, kind, job.job_id, observer, run=job.run)
        state = None if job.run is None else read_state(job.run)
        error = explain_end(job.label, last, state, log_command(kind, job.job_id, namespace))
        return JobEnd(
            state=last.phase.value,
            exit_code=0 if error is None else error.exit_code,
            error=error,
            details={"job": job.job_id},
        )

    def cancel(self, job: Job) -> None:
        self._connected.delete(job.details["kind"], job.job_id)


def _find_local_model(plan: Plan) -> str | None:
    """The absolute path of the files that were planned for; None for a model by its hub name."""
    if plan.training is not None:
        path = Path(plan.training.model_path).expanduser()
        is_local = path.is_absolute() or path.exists()
        return str(path.absolute()) if is_local else None
    file = Path(plan.model.source).absolute()
    if file.suffix.lower() == ".gguf":
        return str(file)
    # A cached hub model has a config.json too, but bears the hub's name, not its folder's.
    is_named_so = file.name == "config.json" and file.parent.resolve().name == plan.model.name
    return str(file.parent) if is_named_so else None


def _make_job(
    leader: Document, run: RunFolder | None, details: Mapping[str, object] | None = None
) -> Job:
    kind, meta = leader["kind"], leader["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    delete = f"kubectl delete {kind.lower()} {name} -n {namespace}"
    return Job(
        job_id=name,
        label=f"{kind} {name}",
        run=run,
        title=f"{kind} {name} in namespace {namespace}",
        commands=(
            f"{log_command(kind, name, namespace)}    (the log of its pods)",
            f"{delete}    (ends it; it saves first)",
        ),
        cancel_command=delete,
        details=details or {"job": name, "kind": kind, "namespace": namespace},
    )


def log_command(kind: str, name: str, namespace: str) -> str:
    label = f"app.kubernetes.io/instance={name}"
    if kind == "TrainJob":
        label = f"jobset.sigs.k8s.io/jobset-name={name}"
    return f"kubectl logs -f --prefix -l {label} -n {namespace}"


def explain_end(
    label: str, last: JobSnapshot, state: RunState | None, show_log: str
) -> UserError | None:
    """Why the job failed: the run's own error, else that of its pods, else the cluster's reason."""
    if last.phase is JobPhase.COMPLETE:
        return None
    if state is not None and state.status is RunStatus.FINISHED:
        return None
    if state is not None and state.status is RunStatus.FAILED and state.problem:
        return run_error(state, remedy=show_log)
    if last.phase is JobPhase.GONE:
        return UserError(
            f"{label} was deleted before it was over.",
            remedy="start the same command again    (it goes on from the last checkpoint)",
        )
    ended = [pod for pod in last.pods if pod.phase == "Failed"]
    pod_text = f" {describe_pod(ended[-1])}" if ended else ""
    error = UserError(f"{label} failed ({last.why}).{pod_text}", remedy=show_log)
    codes = [pod.exit_code for pod in ended if pod.exit_code]
    error.exit_code = codes[-1] if codes and codes[-1] < 9 else UserError.exit_code
    return error


# The cluster's nodes: what can be planned for, and which label keeps a job on its GPUs.

_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "accelerator",
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
    "node.kubernetes.io/instance-type",
)
"""Those that name the card first: they hold for nodes that an autoscaler will add too."""


def find_selector(
    nodes: Sequence[Document], *, gpu_name: str, gpu_resource: str
) -> dict[str, str] | None:
    """Labels that all nodes with this GPU have and no others; {} where every GPU node has it.

    None where no label separates the nodes so: the site has to name a label.
    """
    wanted: list[Mapping[str, str]] = []
    others: list[Mapping[str, str]] = []
    for node in nodes:
        held = (node.get("metadata") or {}).get("labels") or {}
        labels = {str(key): str(value) for key, value in held.items()}
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        if str(allocatable.get(gpu_resource, "0")) == "0":
            continue
        words = read_labels(labels)
        guess = guess_gpu(words.product, words.hints)
        is_wanted = guess.gpu is not None and guess.gpu.name == gpu_name
        (wanted if is_wanted else others).append(labels)
    if not wanted:
        return None
    if not others:
        return {}
    for key in _LABELS:
        values = {labels.get(key) for labels in wanted}
        if len(values) == 1 and None not in values:
            (value,) = values
            if value is not None and all(labels.get(key) != value for labels in others):
                return {key: value}
    return None


_NODES = "/api/v1/nodes"
_PODS = "/api/v1/pods"
_EXAMPLE = "--on 'k8s:2n x 4xA100-40GB'"


def find_nodes(stated: str, api: KubernetesApi | None) -> Cluster:
    """The nodes that the API server lists; by `stated` a node pool, or hardware in words."""
    if api is None:
        return _resolve(stated)
    try:
        nodes = _list(api, _NODES)
    except SetupError as error:
        if stated:
            return _resolve(stated)
        raise SetupError(error.problem, remedy=f"say what the nodes have: {_EXAMPLE}") from error
    try:
        pods: list[Document] | None = _list(api, _PODS, field_selector=RUNNING)
    except SetupError:
        pods = None  # often forbidden to plain users
    try:
        return plannable_cluster(build_inventory(nodes, pods, pool=stated or None))
    except NotFoundError as error:
        try:
            return resolve_hardware(stated)
        except UserError:
            raise NotFoundError(
                f"`{shorten(stated)}` is neither a node pool nor hardware. {error.problem}",
                remedy=error.remedy,
            ) from error


def _resolve(stated: str) -> Cluster:
    if not stated:
        raise UsageError("No cluster is asked, so the nodes have to be named.", remedy=_EXAMPLE)
    return resolve_hardware(stated)


def _list(api: KubernetesApi, path: str, **query: str) -> list[Document]:
    found = api.get_path(path, **query) or {}
    return [item for item in found.get("items") or [] if isinstance(item, dict)]


def select_plan_nodes(
    plan: Plan, site: Site, api: KubernetesApi | None
) -> tuple[dict[str, str], list[str]]:
    """Labels for the pods, and a note where none keeps them on the plan's GPU."""
    gpu = plan.hardware.node.gpu
    if gpu.is_cpu or site.kubernetes.node_selector:
        return {}, []
    found: dict[str, str] | None = None
    if api is not None:
        with suppress(SetupError):
            found = find_selector(
                _list(api, _NODES), gpu_name=gpu.name, gpu_resource=site.kubernetes.gpu_resource
            )
    if found is not None:
        return found, []
    return {}, [
        f"no node label is known that keeps the pods on {gpu.name}; where the cluster has other "
        "GPUs too, set kubernetes.node_selector in site.yaml"
    ]
