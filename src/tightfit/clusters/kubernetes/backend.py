"""Kubernetes behind the cluster protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tightfit.clusters.kubernetes.client import (
    JOB_KINDS,
    KubernetesApi,
    apply_objects,
    cancel_job,
    check_claims,
    connect,
    find_job_object,
    is_over,
)
from tightfit.clusters.kubernetes.follow import (
    JobPhase,
    JobSnapshot,
    KubernetesFollower,
    describe_pod,
)
from tightfit.clusters.kubernetes.names import check_site_names, name_job
from tightfit.clusters.kubernetes.nodes import find_nodes, select_plan_nodes
from tightfit.clusters.kubernetes.objects import write_manifest
from tightfit.clusters.kubernetes.pod import Document, User, require_image
from tightfit.clusters.kubernetes.training import TrainingJob, choose_builder
from tightfit.clusters.kubernetes.volumes import find_volume, require_volume
from tightfit.clusters.local.outcome import read_state, run_error
from tightfit.clusters.protocol import (
    ClusterOptions,
    Draft,
    Job,
    JobEnd,
    JobSpec,
    RunObserver,
)
from tightfit.clusters.site import Site
from tightfit.core.errors import NotFoundError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.text import shorten
from tightfit.core.units import parse_time_limit
from tightfit.hardware.types import Cluster
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

KINDS = ("job", "trainjob")
MANIFEST_FILE = "job.yaml"
_COMMENT = "Written by `tightfit submit`; by hand: kubectl apply --server-side -f FILE"


class KubernetesBackend:
    """A plan as a Job or TrainJob in one namespace of the cluster that a kubeconfig names."""

    title = "Kubernetes"
    takes = frozenset({"kind", "context", "namespace", "stage", "write"})
    other_options = "leave it out; queue, priority_class and node_selector are in site.yaml"

    def __init__(self, options: ClusterOptions, site: Site) -> None:
        limit = None if options.time_limit is None else parse_time_limit(options.time_limit)
        self._limit_seconds = None if limit is None else int(limit)
        self._kind = None if options.kind is None else _read_kind(options.kind)
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

    def find_last_job(self, run: RunFolder) -> Job | None:  # noqa: ARG002
        return None  # the run folder itself says how its last job ended

    def draft(self, spec: JobSpec) -> Draft:
        selector, notes = select_plan_nodes(spec.plan, self._site, self._api)
        user = None if spec.carries_plan else _find_user(spec.run)
        if user is not None and user.uid == 0:
            notes.append("the run folder belongs to root, so the pods run as root")
        job = TrainingJob(
            plan=spec.plan,
            run=str(spec.run),
            argv=spec.argv,
            carries_plan=spec.carries_plan,
            staged_bytes=self._measure_staged(spec.plan),
            user=user,
            node_selector=selector,
            seconds=self._limit_seconds,
            can_restart=spec.can_requeue,
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

    def _measure_staged(self, plan: Plan) -> int:
        if not self._options.stage or plan.training is None:
            return 0
        from tightfit.runtime.staged import read_source

        return read_source(Path(plan.training.model_path), block_bytes=1).num_bytes

    def check(self, draft: Draft) -> str | None:  # noqa: ARG002
        return None

    def submit(self, draft: Draft) -> Job:
        run = None if draft.spec.carries_plan else RunFolder(path=draft.spec.run)
        if run is not None:
            write_atomic(run.path / MANIFEST_FILE, draft.text)
        objects: list[Document] = draft.details["objects"]
        apply_objects(self._connected, objects)
        plan = draft.spec.plan.model_dump(mode="json")
        return _make_job(find_job_object(objects), run, {**draft.details, "plan": plan})

    def follow(self, job: Job, observer: RunObserver) -> JobEnd:
        leader = _leader_of(job)
        last = KubernetesFollower(self._connected, leader, observer, run=job.run).wait()
        state = None if job.run is None else read_state(job.run)
        error = explain_end(leader, last, state)
        return JobEnd(
            state=last.phase.value,
            exit_code=0 if error is None else error.exit_code,
            error=error,
            details={"job": job.job_id},
        )

    def cancel(self, job: Job) -> None:
        cancel_job(self._connected, _leader_of(job))


def _read_kind(text: str) -> str:
    kind = text.strip().lower()
    if kind not in KINDS:
        raise UsageError(f"`--as {shorten(text)}` is not known.", remedy=f"--as {'|'.join(KINDS)}")
    return kind


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


def _find_user(folder: Path) -> User:
    """Who owns the folder, or will: pods write in it."""
    try:
        owner = folder.stat()
    except FileNotFoundError:
        return User(uid=os.getuid(), gid=os.getgid())
    return User(uid=owner.st_uid, gid=owner.st_gid)


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
            f"{log_command(leader)}    (what its pods say)",
            f"{delete}    (ends it; it saves first)",
        ),
        cancel_command=delete,
        details=details or {"job": name, "kind": kind, "namespace": namespace},
    )


def _leader_of(job: Job) -> Document:
    names = {"name": job.job_id, "namespace": job.details["namespace"]}
    return {"kind": job.details["kind"], "metadata": names}


def log_command(leader: Document) -> str:
    meta = leader["metadata"]
    label = f"app.kubernetes.io/instance={meta['name']}"
    if leader["kind"] == "TrainJob":
        label = f"jobset.sigs.k8s.io/jobset-name={meta['name']}"
    return f"kubectl logs -f --prefix -l {label} -n {meta['namespace']}"


def explain_end(leader: Document, last: JobSnapshot, state: RunState | None) -> UserError | None:
    """Why the job failed: the run's own error, else that of its pods, else the cluster's reason."""
    if last.phase is JobPhase.COMPLETE:
        return None
    if state is not None and state.status is RunStatus.FINISHED:
        return None
    if state is not None and state.status is RunStatus.FAILED and state.problem:
        return run_error(state, remedy=log_command(leader))
    label = f"{leader['kind']} {leader['metadata']['name']}"
    if last.phase is JobPhase.GONE:
        return UserError(
            f"{label} was deleted before it was over.",
            remedy="start the same command again    (it goes on from the last checkpoint)",
        )
    ended = [pod for pod in last.pods if pod.phase == "Failed"]
    pod_text = f" {describe_pod(ended[-1])}" if ended else ""
    error = UserError(f"{label} failed ({last.why}).{pod_text}", remedy=log_command(leader))
    codes = [pod.exit_code for pod in ended if pod.exit_code]
    error.exit_code = codes[-1] if codes and codes[-1] < 9 else UserError.exit_code
    return error
