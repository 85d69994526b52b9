"""Plan for a cluster, submit the job, and follow it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tightfit.api.call import accepts_keywords
from tightfit.api.options.clusters import SubmitOptions
from tightfit.api.training.hardware import state_network
from tightfit.api.training.recipe import RECIPE_ENDINGS, read_saved_plans
from tightfit.api.training.run_folder import RunLocation, RunStage, read_run_recipe_file
from tightfit.api.training.submitted_run import (
    find_base,
    find_submitted,
    list_inputs,
    prepare_run,
    write_prepared_run,
)
from tightfit.clusters.protocol import (
    ClusterBackend,
    ClusterOptions,
    Draft,
    Job,
    JobEnd,
    JobSpec,
    RunObserver,
    open_backend,
)
from tightfit.clusters.site import Site, read_site
from tightfit.core.errors import UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.recipe import read_recipe
from tightfit.planning.plan import Plan
from tightfit.runs.find import find_run
from tightfit.runs.run_folder import RunFolder

DEFAULT_CLUSTER = "slurm"
CARRIED_PLAN = "/etc/tightfit/plan.json"
"""Where a job finds a plan that travels with it."""


class SubmitStatus(str, Enum):
    """What `submit` did."""

    FINISHED = "finished"
    """Nothing: the run was finished before."""
    FOUND = "found"
    """Nothing: the run's job is queued or running, or over and to be reported."""
    DRAFTED = "drafted"
    WRITTEN = "written"
    SUBMITTED = "submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitResult:
    """A job, or its draft; `follow` and `cancel` act on the job."""

    status: SubmitStatus
    backend: ClusterBackend
    run: RunFolder | None
    """None where only the job sees the folder."""
    plan: Plan | None = None
    draft: Draft | None = None
    job: Job | None = None
    scheduler_answer: str | None = None
    """What the scheduler says to the draft of a dry run."""
    notes: tuple[str, ...] = ()
    kept_run: Path | None = None
    """Where an old run of the same folder was moved."""

    def follow(self, observer: RunObserver) -> JobEnd:
        """Wait for the job's end; an exception leaves the job running."""
        assert self.job is not None
        return self.backend.follow(self.job, observer)

    def cancel(self) -> None:
        """End the job; it saves first."""
        assert self.job is not None
        self.backend.cancel(self.job)


@accepts_keywords(SubmitOptions)
def submit(options: SubmitOptions) -> SubmitResult:
    """Submit the job to the cluster that `on`, the run or the recipe names.

    A job of the same run that is queued or running is found instead of submitted again.
    """
    if options.dry_run and options.write is not None:
        raise UsageError(
            "`--dry-run` writes nothing, and `--write` is to write a file.",
            remedy="--write alone applies nothing either",
        )
    site = read_site()
    backend = _open_backend(options, site)
    if options.output is not None and backend.is_remote(options.output):
        draft, notes = _draft_remote(options, backend, options.output)
        return _finish(options, backend, draft, run=None, notes=notes)
    found_job = _find_job_of_run(options, backend)
    if found_job is not None:
        return SubmitResult(
            status=SubmitStatus.FOUND, backend=backend, run=found_job.run, job=found_job
        )
    found = find_submitted(options, runs=site.runs)
    wanted, _, location = found
    if location.stage is RunStage.FINISHED and not options.dry_run:
        return SubmitResult(status=SubmitStatus.FINISHED, backend=backend, run=location.run)
    job = _find_job_of_recipe(options, backend, location)
    if job is not None:
        return SubmitResult(status=SubmitStatus.FOUND, backend=backend, run=location.run, job=job)
    folder = location.folder or find_base(site.runs)
    notes = backend.check_files({"The run folder": folder, **list_inputs(wanted.recipe)})
    nodes = state_network(backend.inventory(), options.network)
    notes += nodes.warnings
    kept = None
    with prepare_run(options, nodes, found=found, runs=site.runs) as prepared:
        spec = JobSpec(
            plan=prepared.plan,
            run=prepared.run.path,
            group=prepared.group,
            can_requeue=options.requeue,
        )
        draft = backend.draft(spec)
        if not options.dry_run:
            kept = write_prepared_run(prepared)
    return _finish(options, backend, draft, run=prepared.run, notes=notes, kept=kept)


def _finish(
    options: SubmitOptions,
    backend: ClusterBackend,
    draft: Draft,
    *,
    run: RunFolder | None,
    notes: list[str],
    kept: Path | None = None,
) -> SubmitResult:
    """Check, write or submit the draft."""
    status, job, answer = SubmitStatus.SUBMITTED, None, None
    if options.dry_run:
        status, answer = SubmitStatus.DRAFTED, backend.check(draft)
    elif options.write is not None:
        status = SubmitStatus.WRITTEN
        if run is not None:
            write_atomic(run.path / draft.file_name, draft.text)
        write_atomic(options.write, draft.text)
    else:
        job = backend.submit(draft)
    return SubmitResult(
        status=status,
        backend=backend,
        run=run,
        plan=draft.spec.plan,
        draft=draft,
        job=job,
        scheduler_answer=answer,
        notes=tuple(dict.fromkeys((*notes, *draft.notes))),
        kept_run=kept,
    )


def _open_backend(options: SubmitOptions, site: Site) -> ClusterBackend:
    stated = options.on or _read_recorded_cluster(options.job) or DEFAULT_CLUSTER
    name, _, target = stated.partition(":")
    is_stated = bool((options.on or "").partition(":")[2].strip())
    is_plan = options.job.lower().endswith(".json")
    stated_options = ClusterOptions(
        target=target.strip(),
        time_limit=options.time_limit,
        account=options.account,
        qos=options.qos,
        constraint=options.constraint,
        reservation=options.reservation,
        kind=options.kind,
        context=options.context,
        namespace=options.namespace,
        stage=options.stage,
        write=options.write,
        is_offline=bool(options.dry_run or options.write) and (is_stated or is_plan),
    )
    return open_backend(name.strip().casefold(), stated_options, site)


def _read_recorded_cluster(job: str) -> str | None:
    """The cluster that the run was submitted to, or the recipe's `on`."""
    run = find_run(job)
    if run is not None:
        recorded = read_run_recipe_file(run.path)
        return None if recorded is None else recorded.recipe.on
    if not job.lower().endswith(RECIPE_ENDINGS):
        return None
    try:
        return read_recipe(job).on
    except UserError:
        return None  # reported where the recipe is read for planning


def _find_job_of_run(options: SubmitOptions, backend: ClusterBackend) -> Job | None:
    """The job of a run that was named; with `follow`, also one that is over."""
    run = find_run(options.job)
    if run is None or options.dry_run or options.fresh or options.again:
        return None
    job = backend.find_job(run)
    if job is None and options.follow is True:
        return backend.find_last_job(run)
    if job is not None and options.follow is False:
        raise UsageError(
            f"{options.job} is {job.label}, which is queued or running.",
            remedy=f"tightfit submit {shlex.quote(options.job)}    (follows it; "
            f"{job.cancel_command} ends it)",
        )
    return job


def _find_job_of_recipe(
    options: SubmitOptions, backend: ClusterBackend, location: RunLocation
) -> Job | None:
    """The queued or running job of the same recipe; refused where it cannot be followed."""
    if location.folder is None or options.dry_run or not location.run.is_run():
        return None
    job = backend.find_job(location.run)
    if job is None:
        return None
    if options.fresh:  # moves the old run away while a job writes in it
        raise UsageError(
            f"The run in {location.run.path} is {job.label}, which is queued or running.",
            remedy=f"{job.cancel_command}    (it saves first), then the same again",
        )
    if options.follow is False:
        raise UsageError(
            f"The same recipe is queued or running already, in {location.run.path}.",
            remedy=f"tightfit submit {shlex.quote(str(location.run.path))}    (follows it)",
        )
    return job


def _draft_remote(
    options: SubmitOptions, backend: ClusterBackend, folder: Path
) -> tuple[Draft, list[str]]:
    """The job for a run folder that only the job sees: the plan travels with it.

    The job encodes the data itself, its first node for all, and runs the plan as it is.
    """
    if options.stage:
        raise UsageError(
            f"`--stage` asks for the model's size, and {folder} is seen by pods alone.",
            remedy="leave out --stage, or give the volume a `local` path in site.yaml",
        )
    plan = backend.translate_plan(_read_saved_plan(options))
    data = options.data
    if data is None and plan.training is not None and plan.training.data:
        data = Path(plan.training.data[0].path)
    if data is None:
        raise UsageError("No data to train on was named.", remedy="--data /data/train.jsonl")
    notes = backend.check_files({"The data": data})
    argv = ["tightfit", "train", CARRIED_PLAN, "--data", str(data), "--output", str(folder)]
    spec = JobSpec(
        plan=plan,
        run=folder,
        argv=(*argv, *_list_training_options(options)),
        carries_plan=True,
        can_requeue=options.requeue,
    )
    notes.append(f"{folder} is seen by the pods alone: steps and report are in it, not here")
    return backend.draft(spec), notes


def _read_saved_plan(options: SubmitOptions) -> Plan:
    saved = read_saved_plans(options.job)
    if saved is None:
        raise UsageError(
            f"{options.output} is seen by pods alone, so nothing can be prepared in it from here.",
            remedy="submit a plan (tightfit plan RECIPE --save plan.json), or give the volume a "
            "`local` path in site.yaml",
        )
    if options.plan > len(saved.plans):
        raise UsageError(
            f"`--plan {options.plan}`: {options.job} holds {len(saved.plans)} plans.",
            remedy=f"--plan {len(saved.plans)}",
        )
    plan = saved.plans[options.plan - 1]
    if options.nodes not in (None, plan.strategy.num_nodes):
        raise UsageError(
            f"The plan in {options.job} is for {plan.strategy.num_nodes} nodes.",
            remedy="leave out --nodes, or plan it anew",
        )
    return plan


def _list_training_options(options: SubmitOptions) -> list[str]:
    """Options of the learning side, for `tightfit train` in the job."""
    given = {
        "--eval": options.eval, "--epochs": options.epochs, "--max-steps": options.max_steps,
        "--lr": options.lr, "--template": options.template, "--seed": options.seed,
        "--log-to": options.log_to,
    }  # fmt: skip
    words = [word for name, value in given.items() if value is not None
             for word in (name, str(value))]  # fmt: skip
    return words + (["--fresh"] if options.fresh else [])
