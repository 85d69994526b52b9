"""`submit`: plan for a cluster, prepare the run folder, submit the job, and follow it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

from tightfit.api.call import accepts_keywords
from tightfit.api.options.clusters import SubmitOptions
from tightfit.api.training.hardware import state_network
from tightfit.api.training.job import PlannedJob, plan_job, reuse_plan
from tightfit.api.training.recipe import (
    RECIPE_ENDINGS,
    RunRecipe,
    pick_saved_plan,
    read_run_recipe_file,
    read_training_job,
)
from tightfit.api.training.run_folder import (
    RunLocation,
    RunStage,
    claim_folder,
    find_run_location,
    folder_error,
    move_aside,
    name_folder,
    write_folder,
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
from tightfit.clusters.requirements import check_space
from tightfit.clusters.schedulers import SchedulerOptions
from tightfit.clusters.site import Site, read_site
from tightfit.core.errors import DoesNotFitError, UsageError, UserError
from tightfit.core.files import temporary_folder, write_atomic
from tightfit.core.options import list_given, repeat_options
from tightfit.core.recipe import Recipe, read_recipe
from tightfit.core.settings import Offload
from tightfit.core.text import shorten
from tightfit.data.token_store import TokenStore
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.planning.plan import Plan
from tightfit.runs.report import DEFAULT_FOLDER, find_run
from tightfit.runs.run_folder import RunFolder

DEFAULT_CLUSTER = "slurm"
CARRIED_PLAN = "/etc/tightfit/plan.json"
"""Where a job finds a plan that travels with it."""


_TOKENS = "tokens"
"""What `data/encode.py` calls the folder that it makes in a cache."""


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
    job = _find_job_of_run(options, backend)
    if job is not None:
        return SubmitResult(status=SubmitStatus.FOUND, backend=backend, run=job.run, job=job)
    wanted, saved = read_training_job(options)
    if wanted.recipe.on is None:  # the run says where it went, so that `cancel` finds its job
        recorded = wanted.recipe.model_copy(update={"on": DEFAULT_CLUSTER})
        wanted = wanted.model_copy(update={"recipe": recorded})
    home = DEFAULT_FOLDER if site.runs is None else Path(site.runs).expanduser()
    location = find_run_location(wanted, options, base=home)
    if location.stage is RunStage.FINISHED and not options.dry_run:
        return SubmitResult(status=SubmitStatus.FINISHED, backend=backend, run=location.run)
    job = _find_job_of_recipe(options, backend, location)
    if job is not None:
        return SubmitResult(status=SubmitStatus.FOUND, backend=backend, run=location.run, job=job)
    files = {"The run folder": location.folder or home, **_list_inputs(wanted.recipe)}
    notes = backend.check_files(files)
    nodes = state_network(backend.inventory(), options.network)
    notes += nodes.warnings
    begun = location.run.read_plan() if location.stage is RunStage.BEGUN else None
    kept = None
    with _open_folders(options, wanted, location, home) as (run, cache):
        ready, group = _plan(options, nodes, wanted, begun=begun, saved=saved, cache=cache)
        check_space(cache or run.path, ready.plan)
        spec = JobSpec(plan=ready.plan, run=run.path, group=group, can_requeue=options.requeue)
        draft = backend.draft(spec)
        if not options.dry_run:
            kept = _write_run(run, cache, wanted, ready, begun)
    return _finish(options, backend, draft, run=run, notes=notes, kept=kept)


def _list_inputs(recipe: Recipe) -> dict[str, Path]:
    """What a job reads beside its own folder, by what it is."""
    from tightfit.runtime.model_files import locate_model

    found = {"The model": locate_model(recipe.model, needs_weights=not recipe.random_weights)}
    if recipe.template is not None and Path(recipe.template).is_file():
        found["The template"] = Path(recipe.template)
    return found


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
    stated = options.on or read_recorded_cluster(options.job) or DEFAULT_CLUSTER
    name, _, target = stated.partition(":")
    is_stated = bool((options.on or "").partition(":")[2].strip())
    is_plan = options.job.lower().endswith(".json")
    given = {field.name: getattr(options, field.name) for field in fields(SchedulerOptions)}
    stated_options = ClusterOptions(
        **given,
        target=target.strip(),
        is_offline=bool(options.dry_run or options.write) and (is_stated or is_plan),
    )
    return open_backend(name.strip().casefold(), stated_options, site)


def read_recorded_cluster(job: str) -> str | None:
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
    learning = (
        *("tools", "eval", "epochs", "max_steps", "lr", "beta", "template", "seed", "log_to"),
        "fresh",
    )
    given = {"--data": data, "--output": folder, **list_given(options, learning)}
    spec = JobSpec(
        plan=plan,
        run=folder,
        argv=("tightfit", "train", CARRIED_PLAN, *repeat_options(given)),
        carries_plan=True,
        can_requeue=options.requeue,
    )
    notes.append(f"{folder} is seen by the pods alone: steps and report are in it, not here")
    return backend.draft(spec), notes


def _read_saved_plan(options: SubmitOptions) -> Plan:
    plan = pick_saved_plan(options)
    if plan is None:
        raise UsageError(
            f"{options.output} is seen by pods alone, so nothing can be prepared in it from here.",
            remedy="submit a plan (tightfit plan RECIPE --save plan.json), or give the volume a "
            "`local` path in site.yaml",
        )
    if options.nodes not in (None, plan.strategy.num_nodes):
        raise UsageError(
            f"The plan in {options.job} is for {plan.strategy.num_nodes} nodes.",
            remedy="leave out --nodes, or plan it anew",
        )
    return plan


# A run folder prepared here for a job that will run on a cluster.


@contextmanager
def _open_folders(
    options: SubmitOptions, wanted: RunRecipe, location: RunLocation, home: Path
) -> Iterator[tuple[RunFolder, Path | None]]:
    """The run's folder, and the one to encode data in: the same, or one beside it while an old run
    is there; None for this user's cache, where nothing is to be written.

    Until the run is written, an old run in the same folder is whole, and a failure leaves nothing
    new behind but data that was encoded into a folder that the user named.
    """
    method = wanted.recipe.method.value
    if options.dry_run:
        folder = location.folder or name_folder(wanted, method, home=home)
        yield RunFolder(path=folder.absolute()), None
        return
    if location.folder is None:
        run = RunFolder(path=claim_folder(wanted, method, home=home).absolute())
        try:
            yield run, run.path
        finally:
            if not run.is_run():  # the next attempt claims another: nobody would find its tokens
                shutil.rmtree(run.path, ignore_errors=True)
        return
    run = RunFolder(path=location.folder.absolute())
    is_replaced, is_new = options.fresh and run.is_run(), not run.path.exists()
    cache, files = run.path, ExitStack()
    try:  # before any work, so that a folder that cannot be is not found out in the middle of it
        if is_replaced:
            # On the same disk, so that what it holds can be moved in an instant.
            name = f".{run.path.name[:100]}"
            cache = files.enter_context(temporary_folder(run.path.parent, name=name))
        else:
            run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(run.path, error) from error
    try:
        yield run, cache
    finally:
        files.close()
        if is_new:
            with suppress(OSError):  # it is not empty: encoded data is found again
                run.path.rmdir()


def _write_run(
    run: RunFolder, cache: Path | None, wanted: RunRecipe, ready: PlannedJob, begun: Plan | None
) -> Path | None:
    """Write the run's folder; returns where a run that was there is kept."""
    kept = None
    if cache is not None and cache != run.path:
        kept = move_aside(run.path)
        run.path.mkdir()
        ready = _move_tokens(ready, cache, run.path)
    write_folder(run, wanted, ready, begun)
    return kept


def _move_tokens(ready: PlannedJob, source: Path, target: Path) -> PlannedJob:
    """The same data, moved from one folder that was a cache to another."""
    (source / _TOKENS).rename(target / _TOKENS)

    def reopen(store: TokenStore) -> TokenStore:
        return TokenStore(target / store.folder.relative_to(source))

    encoded = ready.encoded
    held_out = None if encoded.eval is None else reopen(encoded.eval)
    return replace(ready, encoded=replace(encoded, train=reopen(encoded.train), eval=held_out))


def _plan(
    options: SubmitOptions,
    cluster: Cluster,
    wanted: RunRecipe,
    *,
    begun: Plan | None,
    saved: Plan | None,
    cache: Path | None,
) -> tuple[PlannedJob, NodeGroup]:
    """The run's or file's plan where the cluster can run it, else a new one."""
    old = begun or saved
    if old is not None:
        group = _find_group(cluster, old)
        if group is not None and options.nodes in (None, old.strategy.num_nodes):
            ready = reuse_plan(old, wanted, options, cache=cache)
            plan = begun or ready.plan
            hardware = plan.hardware.model_copy(update={"group": group.name})
            return replace(ready, plan=plan.model_copy(update={"hardware": hardware})), group
        if begun is None:
            raise UsageError(
                f"{shorten(options.job)} is planned for {old.strategy.num_nodes} x "
                f"{old.strategy.gpus_per_node} {old.hardware.node.gpu.name}, which "
                f"{cluster.source} does not have.",
                remedy=f"tightfit submit {old.model.name} with the same options    (plans it anew)",
            )
    return plan_on_fewest(
        cluster,
        options.nodes,
        lambda part: plan_job(wanted, options, cluster=part, cache=cache, begun=begun),
    )


class Planned(Protocol):
    """Whatever holds a plan."""

    @property
    def plan(self) -> Plan: ...


_Planned = TypeVar("_Planned", bound=Planned)


def plan_on_fewest(
    cluster: Cluster, num_nodes: int | None, make: Callable[[Cluster], _Planned]
) -> tuple[_Planned, NodeGroup]:
    """A plan for `num_nodes`; where none are named, for the fewest that do without offload.

    Offload saves nodes at a price in time that few mean to pay: it is taken where all nodes
    together need it too. Who wants more speed says --nodes.
    """
    found: tuple[_Planned, NodeGroup] | None = None
    failed: UserError | None = None
    for part in list_parts(cluster, num_nodes):
        try:
            made = make(part)
        except DoesNotFitError as error:
            failed = error
            continue
        name = made.plan.hardware.group
        planned = made, next(group for group in part.groups if group.name == name)
        if made.plan.strategy.offload is Offload.NONE:
            return planned
        found = found or planned
    if found is not None:
        return found
    most = max(group.num_nodes for group in cluster.groups)
    raise failed or UsageError(
        f"`--nodes {num_nodes}`: {cluster.source} has at most {most} nodes of one kind.",
        remedy=f"--nodes {most}",
    )


def list_parts(cluster: Cluster, num_nodes: int | None) -> Iterator[Cluster]:
    """The cluster cut down to `num_nodes`; where none are named to 1, 2, 4, ... up to all."""
    most = max(group.num_nodes for group in cluster.groups)
    doubling = [2**power for power in range(17) if 2**power < most]
    for count in [num_nodes] if num_nodes else [*doubling, most]:
        groups = tuple(
            group.model_copy(update={"num_nodes": count})
            for group in cluster.groups
            if group.num_nodes >= count
        )
        if groups:
            yield cluster.model_copy(update={"groups": groups})


def _find_group(cluster: Cluster, plan: Plan) -> NodeGroup | None:
    """Nodes of the kind that the plan is for, as many as it takes; its own group first."""
    strategy, node = plan.strategy, plan.hardware.node
    fitting = [
        group
        for group in cluster.groups
        if group.node.gpu.name == node.gpu.name
        and group.node.num_gpus >= strategy.gpus_per_node
        and group.num_nodes >= strategy.num_nodes
    ]
    return min(fitting, key=lambda group: group.name != plan.hardware.group, default=None)
