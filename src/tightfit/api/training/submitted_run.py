"""A run folder prepared here for a job that will run on a cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol, TypeVar

from tightfit.api.options.clusters import SubmitOptions
from tightfit.api.options.training import TrainOptions
from tightfit.api.training.job import PlannedJob, plan_job, reuse_plan
from tightfit.api.training.recipe import RunRecipe
from tightfit.api.training.run_folder import (
    RunLocation,
    RunStage,
    claim_folder,
    find_run_location,
    folder_error,
    move_aside,
    name_folder,
    read_training_job,
    write_folder,
)
from tightfit.clusters.requirements import check_space
from tightfit.core.errors import DoesNotFitError, UsageError, UserError
from tightfit.core.recipe import Recipe
from tightfit.core.strategy import Offload
from tightfit.core.text import shorten
from tightfit.data.token_store import TokenStore
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.planning.plan import Plan
from tightfit.runs.find import DEFAULT_FOLDER
from tightfit.runs.run_folder import RunFolder

_TOKENS = "tokens"
"""What `data/encode.py` calls the folder that it makes in a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWorkspace:
    """A run's folder, and the one to prepare it in."""

    run: RunFolder
    cache: Path | None
    """Where data is encoded: the run's own folder, or one beside it while an old run is there.
    None: in this user's cache, as nothing is to be written."""


@contextmanager
def open_workspace(
    options: SubmitOptions, wanted: RunRecipe, place: RunLocation, *, home: Path
) -> Iterator[RunWorkspace]:
    """`home` holds runs that were given no folder. What is new in it goes again on a failure."""
    method = wanted.recipe.method.value
    if options.dry_run:
        folder = place.folder or name_folder(wanted, method, home=home)
        yield RunWorkspace(run=RunFolder(path=folder.absolute()), cache=None)
    elif place.folder is None:
        with _claimed(claim_folder(wanted, method, home=home).absolute()) as run:
            yield RunWorkspace(run=run, cache=run.path)
    elif options.fresh and place.run.is_run():
        run = RunFolder(path=place.folder.absolute())
        with _beside(run.path) as cache:
            yield RunWorkspace(run=run, cache=cache)
    else:
        with _made(place.folder.absolute()) as run:
            yield RunWorkspace(run=run, cache=run.path)


@contextmanager
def _claimed(folder: Path) -> Iterator[RunFolder]:
    run = RunFolder(path=folder)
    try:
        yield run
    finally:
        if not run.is_run():  # the next attempt claims another: nobody would find its tokens
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """On the same disk, so that what it holds can be moved in an instant."""
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}.", dir=folder.parent))
    except OSError as error:
        raise folder_error(folder, error) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _made(folder: Path) -> Iterator[RunFolder]:
    """Before any work, so that a folder that cannot be is not found out in the middle of it."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(folder, error) from error
    try:
        yield RunFolder(path=folder)
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty: encoded data is found again
                folder.rmdir()


def move_tokens(ready: PlannedJob, source: Path, target: Path) -> PlannedJob:
    """The same data, moved from one folder that was a cache to another."""
    (source / _TOKENS).rename(target / _TOKENS)

    def reopen(store: TokenStore) -> TokenStore:
        return TokenStore(target / store.folder.relative_to(source))

    held = ready.encoded
    held_out = None if held.eval is None else reopen(held.eval)
    return replace(ready, encoded=replace(held, train=reopen(held.train), eval=held_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that only needs to be written to its folder and started."""

    group: NodeGroup
    """The nodes that it is planned for."""
    wanted: RunRecipe
    ready: PlannedJob
    begun: Plan | None
    """The plan of a run that goes on."""
    workspace: RunWorkspace

    @property
    def run(self) -> RunFolder:
        return self.workspace.run

    @property
    def plan(self) -> Plan:
        return self.ready.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExistingPlans:
    """Plans that there are already: of the run that goes on, or of a file that was named."""

    begun: Plan | None
    saved: Plan | None


def as_train_options(options: SubmitOptions) -> TrainOptions:
    """The part that `train` knows too."""
    known = {field.name for field in fields(TrainOptions)} - {"nodes"}
    shared = {field.name for field in fields(SubmitOptions)} & known
    return TrainOptions(
        nodes=options.nodes or 1, **{name: getattr(options, name) for name in shared}
    )


def find_submitted(
    options: SubmitOptions, *, runs: str | None
) -> tuple[RunRecipe, Plan | None, RunLocation]:
    """What is asked for, the plan where a saved one was named, and where it lies or will lie."""
    train_options = as_train_options(options)
    wanted, saved = read_training_job(train_options)
    return wanted, saved, find_run_location(wanted, train_options, base=find_base(runs))


@contextmanager
def prepare_run(
    options: SubmitOptions,
    cluster: Cluster,
    *,
    found: tuple[RunRecipe, Plan | None, RunLocation],
    runs: str | None,
) -> Iterator[PreparedRun]:
    """Plan over `cluster` and encode; `write_prepared_run` makes a run of it while this is open.

    Until then an old run in the same place is whole, and a failure leaves nothing new behind but
    data that was encoded into a folder that the user named. With --dry-run nothing is written,
    and data is encoded in this user's cache.
    """
    wanted, saved, place = found
    begun = place.run.read_plan() if place.stage is RunStage.BEGUN else None
    with open_workspace(options, wanted, place, home=find_base(runs)) as workspace:
        held = _ExistingPlans(begun=begun, saved=saved)
        ready, group = _plan(options, cluster, wanted=wanted, held=held, cache=workspace.cache)
        check_space(workspace.cache or workspace.run.path, ready.plan)
        yield PreparedRun(group=group, wanted=wanted, ready=ready, begun=begun, workspace=workspace)


def write_prepared_run(prepared: PreparedRun) -> Path | None:
    """Write the run's folder; returns where a run that was there is kept."""
    place, ready = prepared.workspace, prepared.ready
    kept = None
    if place.cache not in (None, place.run.path):  # an old run is there
        kept = move_aside(place.run.path)
        place.run.path.mkdir()
        ready = move_tokens(ready, place.cache, place.run.path)
    write_folder(place.run, prepared.wanted, ready, prepared.begun)
    return kept


def find_base(runs: str | None) -> Path:
    """Where runs go that were given no folder."""
    return DEFAULT_FOLDER if runs is None else Path(runs).expanduser()


def list_inputs(recipe: Recipe) -> dict[str, Path]:
    """What a job reads beside its own folder, by what it is."""
    from tightfit.runtime.model_files import locate_model

    found = {"The model": locate_model(recipe.model, needs_weights=not recipe.random_weights)}
    if recipe.template is not None and Path(recipe.template).is_file():
        found["The template"] = Path(recipe.template)
    return found


def _plan(
    options: SubmitOptions,
    cluster: Cluster,
    *,
    wanted: RunRecipe,
    held: _ExistingPlans,
    cache: Path | None,
) -> tuple[PlannedJob, NodeGroup]:
    """The plan that is held where the cluster can run it, else a new one."""
    old = held.begun or held.saved
    if old is not None:
        group = _find_group(cluster, old)
        if group is not None and options.nodes in (None, old.strategy.num_nodes):
            ready = reuse_plan(old, wanted, as_train_options(options), cache=cache)
            plan = ready.plan if held.begun is None else held.begun
            return ready.keep(_moved(plan, group)), group
    if held.begun is None and old is not None:
        raise UsageError(
            f"{shorten(options.job)} is planned for {old.strategy.num_nodes} x "
            f"{old.strategy.gpus_per_node} {old.hardware.node.gpu.name}, which "
            f"{cluster.source} does not have.",
            remedy=f"tightfit submit {old.model.name} with the same options    (plans it anew)",
        )
    return plan_on_fewest(
        cluster,
        options.nodes,
        lambda part: plan_job(
            wanted, as_train_options(options), cluster=part, cache=cache, begun=held.begun
        ),
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
        found = found or (made, next(group for group in part.groups if group.name == name))
        if made.plan.strategy.offload is Offload.NONE:
            return made, next(group for group in part.groups if group.name == name)
    if found is not None:
        return found
    raise failed or _too_many(cluster, num_nodes or 1)


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


def _moved(plan: Plan, group: NodeGroup) -> Plan:
    """The same plan under the group's own name."""
    hardware = plan.hardware.model_copy(update={"group": group.name})
    return plan.model_copy(update={"hardware": hardware})


def _too_many(cluster: Cluster, num_nodes: int) -> UsageError:
    most = max(group.num_nodes for group in cluster.groups)
    return UsageError(
        f"`--nodes {num_nodes}`: {cluster.source} has at most {most} nodes of one kind.",
        remedy=f"--nodes {most}",
    )
