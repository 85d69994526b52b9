"""A run folder made ready here for a job that will run elsewhere, whatever schedules it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, TypeVar

from tightfit.cli.flags.submit import SubmitFlags
from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.submitting.places import Workplace, move_tokens, open_workplace
from tightfit.cli.terminal.harmless import shorten
from tightfit.cli.terminal.output import write_err
from tightfit.cli.training.folder import write_folder
from tightfit.cli.training.job import read_training_job
from tightfit.cli.training.place import Place, Stage, find_place, move_aside
from tightfit.cli.training.plan import Ready, make_ready, reuse_plan
from tightfit.cli.training.recipe import Wish
from tightfit.core.errors import DoesNotFitError, UsageError, UserError
from tightfit.core.recipe import Recipe
from tightfit.core.strategy import Offload
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.launch.space import check_space
from tightfit.ledger.find import DEFAULT_FOLDER
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that only needs to be written to its folder and started."""

    group: NodeGroup
    """The nodes that it is planned for."""
    wish: Wish
    ready: Ready
    begun: Plan | None
    """The plan of a run that goes on."""
    workplace: Workplace

    @property
    def run(self) -> RunFolder:
        return self.workplace.run

    @property
    def plan(self) -> Plan:
        return self.ready.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Plans that there are already: of the run that goes on, or of a file that was named."""

    begun: Plan | None
    saved: Plan | None


def as_train_flags(flags: SubmitFlags) -> TrainFlags:
    """The part that `train` knows too."""
    known = {field.name for field in fields(TrainFlags)} - {"nodes"}
    shared = {field.name for field in fields(SubmitFlags)} & known
    return TrainFlags(nodes=flags.nodes or 1, **{name: getattr(flags, name) for name in shared})


def find_submitted(flags: SubmitFlags, *, runs: str | None) -> tuple[Wish, Plan | None, Place]:
    """What is asked for, the plan where a saved one was named, and where it lies or will lie."""
    train_flags = as_train_flags(flags)
    wish, saved = read_training_job(train_flags)
    return wish, saved, find_place(wish, train_flags, base=find_base(runs))


@contextmanager
def prepare_run(
    flags: SubmitFlags,
    cluster: Cluster,
    *,
    found: tuple[Wish, Plan | None, Place],
    runs: str | None,
) -> Iterator[Prepared]:
    """Plan over `cluster` and encode; `settle_run` makes a run of it while this is open.

    Until then an old run in the same place is whole, and a failure leaves nothing new behind but
    data that was encoded into a folder that the user named. With --dry-run nothing is written,
    and data is encoded in this user's cache.
    """
    wish, saved, place = found
    begun = place.run.read_plan() if place.stage is Stage.BEGUN else None
    with open_workplace(flags, wish, place, home=find_base(runs)) as workplace:
        held = _Held(begun=begun, saved=saved)
        ready, group = _plan(flags, cluster, wish=wish, held=held, cache=workplace.cache)
        check_space(workplace.cache or workplace.run.path, ready.plan)
        yield Prepared(group=group, wish=wish, ready=ready, begun=begun, workplace=workplace)


def settle_run(prepared: Prepared) -> None:
    """Write the run's folder; a run that lies there is kept under another name."""
    place, ready = prepared.workplace, prepared.ready
    if place.cache not in (None, place.run.path):  # an old run is there
        write_err(f"the old run is kept in {move_aside(place.run.path)}\n")
        place.run.path.mkdir()
        ready = move_tokens(ready, place.cache, place.run.path)
    write_folder(place.run, prepared.wish, ready, prepared.begun)


def find_base(runs: str | None) -> Path:
    """Where runs go that were given no folder."""
    return DEFAULT_FOLDER if runs is None else Path(runs).expanduser()


def find_read(recipe: Recipe) -> dict[str, Path]:
    """What a job reads beside its own folder, by what it is."""
    from tightfit.runtime.model_files import locate_model

    found = {"The model": locate_model(recipe.model, needs_weights=not recipe.random_weights)}
    if recipe.template is not None and Path(recipe.template).is_file():
        found["The template"] = Path(recipe.template)
    return found


def _plan(
    flags: SubmitFlags, cluster: Cluster, *, wish: Wish, held: _Held, cache: Path | None
) -> tuple[Ready, NodeGroup]:
    """The plan that is held where the cluster can run it, else a new one."""
    old = held.begun or held.saved
    if old is not None:
        group = _find_group(cluster, old)
        if group is not None and flags.nodes in (None, old.strategy.num_nodes):
            ready = reuse_plan(old, wish, cache=cache)
            plan = ready.plan if held.begun is None else held.begun
            return ready.keep(_moved(plan, group)), group
    if held.begun is None and old is not None:
        raise UsageError(
            f"{shorten(flags.job)} is planned for {old.strategy.num_nodes} x "
            f"{old.strategy.gpus_per_node} {old.hardware.node.gpu.name}, which "
            f"{cluster.source} does not have.",
            remedy=f"tightfit submit {old.model.name} with the same options    (plans it anew)",
        )
    return plan_on_fewest(
        cluster,
        flags.nodes,
        lambda part: make_ready(
            wish, as_train_flags(flags), cluster=part, cache=cache, begun=held.begun
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
        except DoesNotFitError as fault:
            failed = fault
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
