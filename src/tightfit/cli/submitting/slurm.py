"""`submit --on slurm`: a plan over what Slurm has, a batch script in the run folder, a job."""

from __future__ import annotations

import re
import shlex
import tempfile
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from tightfit.cli.flags.clusters import SubmitFlags
from tightfit.cli.network import state_network
from tightfit.cli.submitting.follow import follow_job, is_active, report_finished
from tightfit.cli.submitting.prepare import (
    PreparedRun,
    find_base,
    find_submitted,
    list_inputs,
    prepare_run,
    write_prepared_run,
)
from tightfit.cli.terminal.output import show_json
from tightfit.cli.training.request import RunRecipe
from tightfit.cli.training.run_folder import RunLocation, RunStage
from tightfit.clusters.site import Site, read_site
from tightfit.clusters.slurm.queue import (
    SubmittedJob,
    check_script,
    find_queued,
    lock_submission,
    read_job_file,
    submit_script,
    write_job_file,
)
from tightfit.clusters.slurm.resources import (
    GpuRequest,
    JobResources,
    filter_nodes,
    find_gpu_request,
    find_resources,
)
from tightfit.clusters.slurm.script import SCRIPT_FILE, TrainingJob, make_batch_job, write_script
from tightfit.clusters.slurm.shared_files import check_shared, is_this_machine
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import write_atomic
from tightfit.core.text import shorten
from tightfit.core.units import parse_time_limit, render_seconds
from tightfit.hardware.inventory import Inventory, plannable_cluster
from tightfit.hardware.slurm import probe_slurm_inventory
from tightfit.planning.plan import Plan
from tightfit.runs.find import find_run
from tightfit.runs.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmDraft:
    """All that would be submitted."""

    prepared: PreparedRun
    partition: str
    resources: JobResources
    script: str
    notes: tuple[str, ...]


def submit_slurm(flags: SubmitFlags) -> None:
    """Follow the job that there is, or submit one."""
    limit = _read_time_limit(flags)  # faults of the command line come before any work
    if _follow_again(flags):
        return
    site = _apply_flags(read_site(), flags)
    found = find_submitted(flags, runs=site.runs)
    wanted, _, place = found
    if place.stage is RunStage.FINISHED and not flags.dry_run:
        report_finished(place.run, as_json=flags.as_json)
        return
    if not flags.dry_run and (queued := _find_queued_of(place)) is not None:
        _refuse_second(place.run, flags)
        follow_job(place.run, queued, as_json=flags.as_json)
        return
    _refuse_running(place, flags)
    partition = _read_partition(flags, wanted, site)
    inventory = filter_nodes(probe_slurm_inventory(partition), site.slurm.constraint)
    notes = _check_files(inventory, site, wanted, place)
    cluster = state_network(plannable_cluster(inventory), flags.network)
    with prepare_run(flags, cluster, found=found, runs=site.runs) as prepared:
        draft = _draft(flags, site, inventory, prepared, limit=limit)
        draft = replace(draft, notes=(*notes, *cluster.warnings, *draft.notes))
        if flags.dry_run:
            _show_draft(draft, flags)
            return
        write_prepared_run(prepared)
    job_id = _submit(draft)
    _show_submitted(draft, job_id, flags)
    if flags.follow is not False:
        follow_job(draft.prepared.run, job_id, as_json=flags.as_json)


def _follow_again(flags: SubmitFlags) -> bool:
    """Whether the run's job was followed: it is in the queue, or --follow asks how it ended."""
    run = find_run(flags.job)
    if run is None or flags.dry_run or flags.fresh or flags.again:
        return False
    job_id = _find_active(run)
    if job_id is None and flags.follow is True:
        job = read_job_file(run)
        job_id = None if job is None else job.job_id
    if job_id is None:
        return False
    if flags.follow is False:
        raise UsageError(
            f"{flags.job} is job {job_id}, which is queued or running.",
            remedy=f"tightfit submit {shlex.quote(flags.job)}    (follows it; scancel {job_id} "
            "ends it)",
        )
    follow_job(run, job_id, as_json=flags.as_json)
    return True


def _find_active(run: RunFolder) -> str | None:
    """The run's job in the queue, also one of `sbatch job.sbatch`, or one whose submitter died."""
    job = read_job_file(run)
    if job is not None and is_active(job.job_id):
        return job.job_id
    script = run.path / SCRIPT_FILE
    found = find_queued(script) if script.exists() else None
    if found is None:
        return None
    _note(run, *found)
    return found[0]


def _note(run: RunFolder, job_id: str, partition: str) -> None:
    now = datetime.now(timezone.utc).isoformat()
    write_job_file(run, SubmittedJob(job_id=job_id, partition=partition, submitted_at=now))


def _find_queued_of(place: RunLocation) -> str | None:
    if place.folder is None or place.stage is not RunStage.BEGUN:
        return None
    return _find_active(place.run)


def _refuse_second(run: RunFolder, flags: SubmitFlags) -> None:
    """Who does not want to follow wants a job of their own."""
    if flags.follow is False:
        raise _is_there_already(run)


def _refuse_running(place: RunLocation, flags: SubmitFlags) -> None:
    """--fresh moves the old run away, which a job that writes in it must not see."""
    if not flags.fresh or flags.dry_run or place.folder is None or not place.run.is_run():
        return
    job_id = _find_active(place.run)
    if job_id is not None:
        raise UsageError(
            f"The run in {place.run.path} is job {job_id}, which is queued or running.",
            remedy=f"scancel {job_id}    (it saves first), then the same again",
        )


def _is_there_already(run: RunFolder) -> UsageError:
    return UsageError(
        f"The same recipe is queued or running already, in {run.path}.",
        remedy=f"tightfit submit {shlex.quote(str(run.path))}    (follows it)",
    )


def _apply_flags(site: Site, flags: SubmitFlags) -> Site:
    """Options win over site.yaml."""
    given = {name: getattr(flags, name) for name in ("account", "qos", "constraint", "reservation")}
    stated = {name: value for name, value in given.items() if value is not None}
    wrong = next((name for name, value in stated.items() if not _is_plain(name, value)), None)
    if wrong is not None:
        raise UsageError(
            f"`--{wrong} {shorten(stated[wrong])}` is more than one word.",
            remedy=f"--{wrong} NAME, without spaces, quotes or line breaks",
        )
    return site.model_copy(update={"slurm": site.slurm.model_copy(update=stated)})


def _is_plain(name: str, value: str) -> bool:
    """As site.yaml is held to; only features may hold spaces."""
    return value.isprintable() and (name == "constraint" or not re.search(r"[\s'\"#]", value))


def _read_time_limit(flags: SubmitFlags) -> float | None:
    if flags.time_limit is None:
        return None
    limit = parse_time_limit(flags.time_limit)
    if limit is None:
        raise UsageError(
            f"`--time-limit {flags.time_limit}` is no limit.", remedy="--time-limit 12:00:00"
        )
    return limit


def _read_partition(flags: SubmitFlags, wanted: RunRecipe, site: Site) -> str | None:
    said = flags.on or wanted.recipe.on or ""
    named = said.partition(":")[2].strip() if said.casefold().startswith("slurm") else ""
    return named or site.slurm.partition


def _check_files(
    inventory: Inventory, site: Site, wanted: RunRecipe, place: RunLocation
) -> list[str]:
    """Before the data is encoded: the nodes will see what they read and write."""
    if is_this_machine(node.name for node in inventory.nodes):
        return []
    places = {"The run folder": place.folder or find_base(site.runs), **list_inputs(wanted.recipe)}
    return check_shared({what: path.absolute() for what, path in places.items()}, site)


def _draft(
    flags: SubmitFlags,
    site: Site,
    inventory: Inventory,
    prepared: PreparedRun,
    *,
    limit: float | None,
) -> SlurmDraft:
    plan, group = prepared.plan, prepared.group
    if limit is not None and group.max_seconds is not None and limit > group.max_seconds:
        raise UsageError(
            f"`--time-limit {flags.time_limit}` exceeds the limit of {group.name}, "
            f"{render_seconds(group.max_seconds)}.",
            remedy="leave it out; at the partition's limit the job saves and is queued again",
        )
    partition = group.name.partition("/")[0]
    resources = find_resources(
        plan,
        max_seconds=group.max_seconds,
        asked_seconds=limit,
        warn=site.slurm.warn_seconds,
    )
    job = TrainingJob(
        plan=plan,
        run=prepared.run.path,
        partition=partition,
        gpu=_find_words(inventory, partition, plan),
        resources=resources,
        can_requeue=flags.requeue,
    )
    return SlurmDraft(
        prepared=prepared,
        partition=partition,
        resources=resources,
        script=write_script(make_batch_job(job, site), site),
        notes=tuple(_list_notes(resources, can_requeue=flags.requeue)),
    )


def _find_words(inventory: Inventory, partition: str, plan: Plan) -> GpuRequest:
    if plan.hardware.node.gpu.is_cpu:
        return GpuRequest()
    return find_gpu_request(
        inventory,
        partition=partition,
        gpu_name=plan.hardware.node.gpu.name,
        gpus_per_node=plan.strategy.gpus_per_node,
    )


def _list_notes(resources: JobResources, *, can_requeue: bool) -> list[str]:
    """Where the run is longer than one job may be."""
    if resources.num_slices == 1 or resources.seconds is None:
        return []
    limit = render_seconds(resources.seconds)
    if can_requeue:
        return [
            f"At a time limit of {limit} it will take about {resources.num_slices} slices: each "
            "saves, goes back to the queue and resumes."
        ]
    return [
        f"It will probably not end within {limit}: it then saves and stops, and the same command "
        "goes on (--requeue does so by itself)."
    ]


def _submit(draft: SlurmDraft) -> str:
    run = draft.prepared.run
    path = run.path / SCRIPT_FILE
    with lock_submission(run):
        if find_queued(path) is not None:
            raise _is_there_already(run)
        write_atomic(path, draft.script)
        job_id = submit_script(path)
        _note(run, job_id, draft.partition)
    return job_id


def _show_draft(draft: SlurmDraft, flags: SubmitFlags) -> None:
    """The plan, the script, and what Slurm would do with it."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as stream:
        stream.write(draft.script)
        stream.flush()
        try:
            said: str | None = check_script(Path(stream.name))
        except SetupError as fault:
            said = fault.problem
    if flags.as_json:
        show_json(
            {
                "run": str(draft.prepared.run.path),
                "plan": draft.prepared.plan.model_dump(mode="json"),
                "script": draft.script,
                "num_slices": draft.resources.num_slices,
                "slurm": said,
                "notes": list(draft.notes),
            }
        )
        return
    from tightfit.cli.submitting.render import show_slurm_draft

    show_slurm_draft(draft.prepared, script=draft.script, notes=draft.notes, said=said)


def _show_submitted(draft: SlurmDraft, job_id: str, flags: SubmitFlags) -> None:
    run = draft.prepared.run
    if not flags.as_json:
        from tightfit.cli.submitting.render import show_submitted

        show_submitted(
            draft.prepared, job_id=job_id, script=run.path / SCRIPT_FILE, notes=draft.notes
        )
    elif flags.follow is False:
        script = str(run.path / SCRIPT_FILE)
        show_json(
            {"run": str(run.path), "job_id": job_id, "script": script, "notes": list(draft.notes)}
        )
