"""`submit --on k8s`: a plan over the cluster's nodes, objects, a Job that is applied or written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tightfit.cli.choices import read_word
from tightfit.cli.flags.kubernetes_options import KINDS
from tightfit.cli.flags.submit import SubmitFlags
from tightfit.cli.submitting.follow import tell_finished
from tightfit.cli.submitting.kubernetes_carried import draft_carried
from tightfit.cli.submitting.kubernetes_follow import follow_pods
from tightfit.cli.submitting.kubernetes_hardware import find_nodes, find_place_label
from tightfit.cli.submitting.prepare import (
    Prepared,
    find_base,
    find_read,
    find_submitted,
    prepare_run,
    settle_run,
)
from tightfit.cli.submitting.render_kubernetes import show_applied, show_draft
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce
from tightfit.cli.training.place import Place, Stage
from tightfit.cli.training.recipe import Wish
from tightfit.core.errors import UsageError
from tightfit.core.files import write_atomic
from tightfit.hardware.time_limit import parse_time_limit
from tightfit.launch.kubernetes.apply import apply_objects, check_claims, find_leader, is_over
from tightfit.launch.kubernetes.choose import choose_builder
from tightfit.launch.kubernetes.connect import Cluster, connect
from tightfit.launch.kubernetes.manifest import write_manifest
from tightfit.launch.kubernetes.names import name_job
from tightfit.launch.kubernetes.pod import Document, User, require_image
from tightfit.launch.kubernetes.site_names import check_site_names
from tightfit.launch.kubernetes.training import TrainingJob
from tightfit.launch.kubernetes.volumes import require_volume
from tightfit.launch.site import Site, read_site
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan

MANIFEST_FILE = "job.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
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
    carried = draft_carried(flags, site, seconds=seconds)
    if carried is not None:
        job, notes = carried
        _finish(_draft(job, site, cluster, flags, notes=notes), cluster, flags)
        return
    found = find_submitted(flags, runs=site.runs)
    wish, _, place = found
    if place.stage is Stage.FINISHED and not flags.dry_run:
        tell_finished(place.run, as_json=flags.as_json)
        return
    leader = _find_active(cluster, place)
    if cluster is not None and leader is not None and not flags.dry_run:
        follow_pods(cluster, leader, run=place.run, as_json=flags.as_json)
        return
    _check_paths(site, wish, place)
    nodes = find_nodes(flags, wish.recipe.on, cluster)
    with prepare_run(flags, nodes, found=found, runs=site.runs) as prepared:
        job = _make_job(prepared, flags, seconds=seconds)
        notes = list(nodes.warnings)
        draft = _draft(job, site, cluster, flags, notes=notes, run=prepared.run)
        if not flags.dry_run:
            settle_run(prepared)
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
    return None if flags.kind is None else read_word(flags.kind, KINDS, option="--as")


def _read_time_limit(flags: SubmitFlags) -> int | None:
    limit = None if flags.time_limit is None else parse_time_limit(flags.time_limit)
    return None if limit is None else int(limit)


def _is_offline(flags: SubmitFlags) -> bool:
    """Whether nothing needs to be asked: the nodes are told in words, and nothing is applied."""
    said = (flags.on or "").partition(":")[2].strip()
    is_plan = flags.job.lower().endswith(".json")
    return bool(flags.dry_run or flags.write) and (bool(said) or is_plan)


def _connect(site: Site, flags: SubmitFlags) -> Cluster:
    return connect(site.kubernetes, context=flags.context, namespace=flags.namespace)


def _in_namespace(site: Site, namespace: str | None) -> Site:
    if namespace is None:
        return site
    ours = site.kubernetes.model_copy(update={"namespace": namespace})
    return site.model_copy(update={"kubernetes": ours})


def _find_active(cluster: Cluster | None, place: Place) -> Document | None:
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


def _check_paths(site: Site, wish: Wish, place: Place) -> None:
    """Before the data is encoded: what the pods will read and write lies on volumes."""
    home = place.folder or find_base(site.runs) / "run"
    for what, path in {"The run folder": home, **find_read(wish.recipe)}.items():
        require_volume(site.kubernetes, str(path.absolute()), what)


def _make_job(prepared: Prepared, flags: SubmitFlags, *, seconds: int | None) -> TrainingJob:
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
    cluster: Cluster | None,
    flags: SubmitFlags,
    *,
    notes: list[str],
    run: RunFolder | None = None,
) -> Draft:
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
    return Draft(
        plan=job.plan,
        run=run,
        objects=objects,
        manifest=write_manifest(objects, comment=comment),
        notes=tuple(dict.fromkeys(notes)),
    )


def _finish(draft: Draft, cluster: Cluster | None, flags: SubmitFlags) -> None:
    """Show, write or apply."""
    if flags.dry_run:
        if flags.as_json:
            show_json(_describe(draft))
        else:
            show_draft(draft.plan, run=draft.run, manifest=draft.manifest, notes=draft.notes)
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
    leader = find_leader(draft.objects)
    if not flags.as_json:
        show_applied(draft.plan, run=draft.run, leader=leader, notes=draft.notes)
    elif flags.follow is False:
        show_json(_describe(draft))
    if flags.follow is not False:
        follow_pods(cluster, leader, run=draft.run, as_json=flags.as_json)


def _describe(draft: Draft) -> dict[str, object]:
    leader = find_leader(draft.objects)
    return {
        "run": None if draft.run is None else str(draft.run.path),
        "job": leader["metadata"]["name"],
        "kind": leader["kind"],
        "namespace": leader["metadata"]["namespace"],
        "plan": draft.plan.model_dump(mode="json"),
        "objects": draft.objects,
        "notes": list(draft.notes),
    }
