"""`submit --on k8s`: a plan over the cluster's nodes, and a Job that is applied or written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tightfit.api.options.choices import read_word
from tightfit.api.options.clusters import KUBERNETES_KINDS
from tightfit.cli.flags.clusters import SubmitFlags
from tightfit.cli.network import state_network
from tightfit.cli.submitting.follow import report_finished
from tightfit.cli.submitting.kubernetes_follow import follow_pods
from tightfit.cli.submitting.prepare import (
    PreparedRun,
    find_base,
    find_submitted,
    list_inputs,
    prepare_run,
    write_prepared_run,
)
from tightfit.cli.submitting.render import show_applied, show_kubernetes_draft
from tightfit.cli.terminal.output import announce, show_json
from tightfit.cli.training.request import RunRecipe, read_saved_plans
from tightfit.cli.training.run_folder import RunLocation, RunStage
from tightfit.clusters.kubernetes.client import (
    KubernetesApi,
    apply_objects,
    check_claims,
    connect,
    find_job_object,
    is_over,
)
from tightfit.clusters.kubernetes.names import check_site_names, name_job
from tightfit.clusters.kubernetes.nodes import find_selector
from tightfit.clusters.kubernetes.objects import write_manifest
from tightfit.clusters.kubernetes.pod import CONFIG_PATH, Document, User, require_image
from tightfit.clusters.kubernetes.training import PLAN_FILE, TrainingJob, choose_builder
from tightfit.clusters.kubernetes.volumes import find_volume, require_volume
from tightfit.clusters.site import Site, read_site
from tightfit.core.errors import NotFoundError, SetupError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.text import shorten
from tightfit.core.units import parse_time_limit
from tightfit.hardware.inventory import plannable_cluster
from tightfit.hardware.kubernetes import RUNNING, build_inventory
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster as Hardware
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder

# The nodes that a job on Kubernetes is planned for, and the label that keeps it on them.

_NODES = "/api/v1/nodes"
_PODS = "/api/v1/pods"
_EXAMPLE = "--on 'k8s:2n x 4xA100-40GB'"


def find_nodes(flags: SubmitFlags, on: str | None, cluster: KubernetesApi | None) -> Hardware:
    """`k8s`, `k8s:POOL` by what the cluster says; `k8s:4xA100-40GB` by what the words say."""
    said = (flags.on or on or "").partition(":")[2].strip()
    found = _from_words(said) if cluster is None else _from_cluster(said, cluster)
    return state_network(found, flags.network)


def _from_words(said: str) -> Hardware:
    if not said:
        raise UsageError("No cluster is asked, so the nodes have to be named.", remedy=_EXAMPLE)
    return resolve_hardware(said)


def _from_cluster(said: str, cluster: KubernetesApi) -> Hardware:
    try:
        nodes = _list(cluster, _NODES)
    except SetupError as fault:
        if said:
            return _from_words(said)
        raise SetupError(fault.problem, remedy=f"say what the nodes have: {_EXAMPLE}") from fault
    try:
        pods: list[Document] | None = _list(cluster, _PODS, field_selector=RUNNING)
    except SetupError:
        pods = None  # often forbidden to plain users
    try:
        return plannable_cluster(build_inventory(nodes, pods, pool=said or None))
    except NotFoundError as fault:
        try:
            return resolve_hardware(said)
        except UserError:
            raise NotFoundError(
                f"`{shorten(said)}` is neither a node pool nor hardware. {fault.problem}",
                remedy=fault.remedy,
            ) from fault


def _list(cluster: KubernetesApi, path: str, **query: str) -> list[Document]:
    found = cluster.get_path(path, **query) or {}
    return [item for item in found.get("items") or [] if isinstance(item, dict)]


def find_place_label(
    plan: Plan, site: Site, cluster: KubernetesApi | None
) -> tuple[dict[str, str], list[str]]:
    """Labels for the pods, and a note where the plan's GPU cannot be pinned down."""
    gpu = plan.hardware.node.gpu
    if gpu.is_cpu or site.kubernetes.node_selector:
        return {}, []
    found: dict[str, str] | None = None
    if cluster is not None:
        try:
            resource = site.kubernetes.gpu_resource
            nodes = _list(cluster, _NODES)
            found = find_selector(nodes, gpu_name=gpu.name, gpu_resource=resource)
        except SetupError:
            found = None
    if found is not None:
        return found, []
    return {}, [
        f"no node label is known that keeps the pods on {gpu.name}; where the cluster has other "
        "GPUs too, set kubernetes.node_selector in site.yaml"
    ]


# A saved plan for a run folder that only pods see: the plan travels with the job.


def draft_with_plan(
    flags: SubmitFlags, site: Site, *, seconds: int | None
) -> tuple[TrainingJob, list[str]] | None:
    """The job, where `--output` names a folder of a volume that has no `local` path.

    Pods then encode the data themselves, the first one for all, and run the plan as it is.
    """
    folder = None if flags.output is None else str(flags.output)
    if folder is None or not _is_only_there(site, folder):
        return None
    if flags.stage:
        raise UsageError(
            f"`--stage` asks for the model's size, and {folder} is seen by pods alone.",
            remedy="leave out --stage, or give the volume a `local` path in site.yaml",
        )
    plan = _name_for_pods(_read_plan(flags), site)
    data = flags.data or _data_of(plan)
    if data is None:
        raise UsageError("No data to train on was named.", remedy="--data /data/train.jsonl")
    require_volume(site.kubernetes, str(data), "The data")
    words = ["tightfit", "train", str(PurePosixPath(CONFIG_PATH) / PLAN_FILE)]
    words += ["--data", str(data), "--output", folder, *_pass_on(flags)]
    job = TrainingJob(
        plan=plan,
        run=folder,
        argv=tuple(words),
        carries_plan=True,
        seconds=seconds,
        can_restart=flags.requeue,
    )
    return job, [f"{folder} is seen by the pods alone: steps and report are in it, not here"]


def _is_only_there(site: Site, folder: str) -> bool:
    volume = find_volume(site.kubernetes, folder)
    return volume is not None and volume.local is None and not Path(folder).exists()


def _read_plan(flags: SubmitFlags) -> Plan:
    saved = read_saved_plans(flags.job)
    if saved is None:
        raise UsageError(
            f"{flags.output} is seen by pods alone, so nothing can be prepared in it from here.",
            remedy="submit a plan (tightfit plan RECIPE --save plan.json), or give the volume a "
            "`local` path in site.yaml",
        )
    if flags.plan > len(saved.plans):
        raise UsageError(
            f"`--plan {flags.plan}`: {flags.job} holds {len(saved.plans)} plans.",
            remedy=f"--plan {len(saved.plans)}",
        )
    plan = saved.plans[flags.plan - 1]
    if flags.nodes not in (None, plan.strategy.num_nodes):
        raise UsageError(
            f"The plan in {flags.job} is for {plan.strategy.num_nodes} nodes.",
            remedy="leave out --nodes, or plan it anew",
        )
    return plan


def _name_for_pods(plan: Plan, site: Site) -> Plan:
    """The plan with its model by a path that pods see too, where it was made for local files."""
    local = _find_local_model(plan)
    if local is None:
        return plan  # a hub id, which pods look for in HF_HOME
    if find_volume(site.kubernetes, local) is None:
        raise NotFoundError(
            f"No pod would see {local}, the model of {plan.model.name}'s plan: no volume of "
            "site.yaml holds it.",
            remedy="add its folder to kubernetes.volumes in site.yaml, or plan the model by its "
            "hub name",
        )
    if plan.training is None:
        return plan.model_copy(update={"model": plan.model.model_copy(update={"name": local})})
    training = plan.training.model_copy(update={"model_path": local})
    return plan.model_copy(update={"training": training})


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


def _data_of(plan: Plan) -> Path | None:
    held = plan.training.data if plan.training is not None else ()
    return Path(held[0].path) if held else None


def _pass_on(flags: SubmitFlags) -> list[str]:
    """What is learnt and how, as it was typed here."""
    given = {
        "--eval": flags.eval, "--epochs": flags.epochs, "--max-steps": flags.max_steps,
        "--lr": flags.lr, "--template": flags.template, "--seed": flags.seed,
        "--log-to": flags.log_to,
    }  # fmt: skip
    words = [word for name, value in given.items() if value is not None
             for word in (name, str(value))]  # fmt: skip
    return words + (["--fresh"] if flags.fresh else [])


MANIFEST_FILE = "job.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesDraft:
    """All that would be applied."""

    plan: Plan
    run: RunFolder | None
    """None where the folder is only seen by pods."""
    objects: list[Document]
    manifest: str
    notes: tuple[str, ...]


def submit_kubernetes(flags: SubmitFlags) -> None:
    """Follow the job that there is, or make one."""
    _refuse_options_of_slurm(flags)
    if flags.dry_run and flags.write is not None:
        raise UsageError(
            "`--dry-run` writes nothing, and `--write` is to write a file.",
            remedy="--write alone applies nothing either",
        )
    seconds = _read_time_limit(flags)
    _read_kind(flags)
    site = read_site()
    cluster = None if _is_offline(flags) else _connect(site, flags)
    site = _in_namespace(site, flags.namespace if cluster is None else cluster.namespace)
    require_image(site)  # faults of the site come before any work
    check_site_names(site.kubernetes)
    carried = draft_with_plan(flags, site, seconds=seconds)
    if carried is not None:
        job, notes = carried
        _finish(_draft(job, site, cluster, flags, notes=notes), cluster, flags)
        return
    found = find_submitted(flags, runs=site.runs)
    wanted, _, place = found
    if place.stage is RunStage.FINISHED and not flags.dry_run:
        report_finished(place.run, as_json=flags.as_json)
        return
    leader = _find_active(cluster, place)
    if cluster is not None and leader is not None and not flags.dry_run:
        follow_pods(cluster, leader, run=place.run, as_json=flags.as_json)
        return
    _check_paths(site, wanted, place)
    nodes = find_nodes(flags, wanted.recipe.on, cluster)
    with prepare_run(flags, nodes, found=found, runs=site.runs) as prepared:
        job = _make_job(prepared, flags, seconds=seconds)
        notes = list(nodes.warnings)
        draft = _draft(job, site, cluster, flags, notes=notes, run=prepared.run)
        if not flags.dry_run:
            write_prepared_run(prepared)
    _finish(draft, cluster, flags)


def _refuse_options_of_slurm(flags: SubmitFlags) -> None:
    given = {"--account": flags.account, "--qos": flags.qos, "--constraint": flags.constraint,
             "--reservation": flags.reservation}  # fmt: skip
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"`{option}` is for Slurm.",
            remedy="leave it out; queue, priority_class and node_selector are in site.yaml",
        )


def _read_kind(flags: SubmitFlags) -> str | None:
    return None if flags.kind is None else read_word(flags.kind, KUBERNETES_KINDS, option="--as")


def _read_time_limit(flags: SubmitFlags) -> int | None:
    limit = None if flags.time_limit is None else parse_time_limit(flags.time_limit)
    return None if limit is None else int(limit)


def _is_offline(flags: SubmitFlags) -> bool:
    """Whether nothing needs to be asked: the nodes are told in words, and nothing is applied."""
    said = (flags.on or "").partition(":")[2].strip()
    is_plan = flags.job.lower().endswith(".json")
    return bool(flags.dry_run or flags.write) and (bool(said) or is_plan)


def _connect(site: Site, flags: SubmitFlags) -> KubernetesApi:
    return connect(site.kubernetes, context=flags.context, namespace=flags.namespace)


def _in_namespace(site: Site, namespace: str | None) -> Site:
    if namespace is None:
        return site
    ours = site.kubernetes.model_copy(update={"namespace": namespace})
    return site.model_copy(update={"kubernetes": ours})


def _find_active(cluster: KubernetesApi | None, place: RunLocation) -> Document | None:
    """The run's Job or TrainJob, where it is there and not over."""
    if cluster is None or place.folder is None:
        return None
    folder = place.run.path.absolute()
    name = name_job(folder.name, place=str(folder))
    for kind in ("Job", "TrainJob"):
        held = cluster.get(kind, name)
        if held is not None and not is_over(held):
            return {**held, "kind": kind}
    return None


def _check_paths(site: Site, wanted: RunRecipe, place: RunLocation) -> None:
    """Before the data is encoded: what the pods will read and write lies on volumes."""
    home = place.folder or find_base(site.runs) / "run"
    for what, path in {"The run folder": home, **list_inputs(wanted.recipe)}.items():
        require_volume(site.kubernetes, str(path.absolute()), what)


def _make_job(prepared: PreparedRun, flags: SubmitFlags, *, seconds: int | None) -> TrainingJob:
    from tightfit.runtime.staged import read_source

    training = prepared.plan.training
    staged_bytes = 0
    if flags.stage and training is not None:
        staged_bytes = read_source(Path(training.model_path), block_bytes=1).num_bytes
    return TrainingJob(
        plan=prepared.plan,
        run=str(prepared.run.path),
        staged_bytes=staged_bytes,
        user=_find_user(prepared.run.path),
        seconds=seconds,
        can_restart=flags.requeue,
    )


def _find_user(folder: Path) -> User:
    """Who owns the folder, or will: pods write in it."""
    try:
        owner = folder.stat()
    except FileNotFoundError:
        return User(uid=os.getuid(), gid=os.getgid())
    return User(uid=owner.st_uid, gid=owner.st_gid)


def _draft(
    job: TrainingJob,
    site: Site,
    cluster: KubernetesApi | None,
    flags: SubmitFlags,
    *,
    notes: list[str],
    run: RunFolder | None = None,
) -> KubernetesDraft:
    label, told = find_place_label(job.plan, site, cluster)
    notes += told
    if job.user is not None and job.user.uid == 0:
        notes.append("the run folder belongs to root, so the pods run as root")
    from dataclasses import replace

    job = replace(job, node_selector=label)
    build, why = choose_builder(job, site, cluster, asked=_read_kind(flags))
    notes += [why] if why else []
    objects = build(job, site)
    if cluster is not None:
        notes += check_claims(cluster, objects, num_pods=job.num_pods)
    comment = "Written by `tightfit submit`; by hand: kubectl apply --server-side -f FILE"
    return KubernetesDraft(
        plan=job.plan,
        run=run,
        objects=objects,
        manifest=write_manifest(objects, comment=comment),
        notes=tuple(dict.fromkeys(notes)),
    )


def _finish(draft: KubernetesDraft, cluster: KubernetesApi | None, flags: SubmitFlags) -> None:
    """Show, write or apply."""
    if flags.dry_run:
        if flags.as_json:
            show_json(_describe(draft))
        else:
            show_kubernetes_draft(
                draft.plan, run=draft.run, manifest=draft.manifest, notes=draft.notes
            )
        return
    if draft.run is not None:
        write_atomic(draft.run.path / MANIFEST_FILE, draft.manifest)
    target = flags.write
    if target is not None:
        write_atomic(target, draft.manifest)
        announce(target)
        if flags.as_json:
            show_json({**_describe(draft), "wrote": str(target)})
        return
    if cluster is None:
        raise AssertionError("a job is applied to a cluster")
    apply_objects(cluster, draft.objects)
    leader = find_job_object(draft.objects)
    if not flags.as_json:
        show_applied(draft.plan, run=draft.run, leader=leader, notes=draft.notes)
    elif flags.follow is False:
        show_json(_describe(draft))
    if flags.follow is not False:
        follow_pods(cluster, leader, run=draft.run, as_json=flags.as_json)


def _describe(draft: KubernetesDraft) -> dict[str, object]:
    leader = find_job_object(draft.objects)
    return {
        "run": None if draft.run is None else str(draft.run.path),
        "job": leader["metadata"]["name"],
        "kind": leader["kind"],
        "namespace": leader["metadata"]["namespace"],
        "plan": draft.plan.model_dump(mode="json"),
        "objects": draft.objects,
        "notes": list(draft.notes),
    }
