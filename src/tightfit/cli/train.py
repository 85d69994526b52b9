"""`tightfit train`: plan, show the plan, run it, survive what goes wrong, report."""

from __future__ import annotations

import os
from pathlib import Path

from tightfit.cli.flags.training import TrainFlags
from tightfit.cli.terminal.output import show_json, write_err, write_out
from tightfit.cli.terminal.run_display import Progress, open_display
from tightfit.cli.training.finish import find_artefact, finish_run, list_kept_plans
from tightfit.cli.training.hardware import limiting, read_limit, read_rendezvous
from tightfit.cli.training.plan import PlannedJob, plan_job, reuse_plan
from tightfit.cli.training.request import RunRecipe
from tightfit.cli.training.run_folder import (
    LOCK_WAIT_SECONDS,
    RunLocation,
    RunStage,
    find_run_location,
    is_finished,
    move_aside,
    name_folder,
    one_node_at_a_time,
    open_planned,
    read_training_job,
    write_folder,
)
from tightfit.clusters.local.launcher import run_job
from tightfit.clusters.requirements import check_space, estimate_run_bytes
from tightfit.core.errors import UserError
from tightfit.planning.plan import Plan
from tightfit.planning.request import name_method
from tightfit.runs.run_folder import RunFolder


def train(flags: TrainFlags) -> None:
    """From whatever names the job to a report."""
    read_rendezvous(flags)  # faults of the command line come before any work
    limit = read_limit(flags, os.environ)
    if flags.as_planned:
        run, plan = open_planned(flags)
        if is_finished(run):
            _report_finished(run, flags)
            return
    else:
        found = _find_run(flags)
        if found is None:
            return
        run, plan = found
    _show(plan, run, flags)
    if not flags.dry_run:
        with limiting(limit):
            _start(run, plan, flags, limit_bytes=limit)


def _find_run(flags: TrainFlags) -> tuple[RunFolder, Plan] | None:
    """The run as it will go, made or gone on with; None where it is finished."""
    wanted, saved = read_training_job(flags)
    with one_node_at_a_time(wanted, flags):
        place = find_run_location(wanted, flags)
        if place.stage is RunStage.FINISHED and not flags.dry_run:
            _report_finished(place.run, flags)
            return None
        return _prepare(wanted, saved, place, flags)


def _report_finished(run: RunFolder, flags: TrainFlags) -> None:
    artefact = find_artefact(run)
    if flags.as_json:
        from tightfit.runs.report import read_report

        show_json(
            {
                "run": str(run.path),
                "artefact": None if artefact is None else str(artefact),
                "exit_code": 0,
                "notes": ["finished before; nothing was done"],
                "report": read_report(run).model_dump(mode="json"),
            }
        )
        return
    where = f"; the result is in {artefact}" if artefact is not None else ""
    write_out(f"{run.path} is finished{where}.\nTrain once more: add --again\n")


def _prepare(
    wanted: RunRecipe, saved: Plan | None, place: RunLocation, flags: TrainFlags
) -> tuple[RunFolder, Plan]:
    """Plan, check the disk, and make or reopen the folder."""
    begun = place.run.read_plan() if place.stage is RunStage.BEGUN else None
    # Every node reads the data, so that of several nodes lies in the folder they share.
    cache = place.folder.absolute() if place.folder is not None and flags.nodes > 1 else None
    ready = _plan_run(wanted, saved, begun, flags, cache=cache)
    folder = place.folder or name_folder(wanted, name_method(ready.plan.strategy))
    run = RunFolder(path=folder.absolute())
    check_space(run.path, ready.plan)
    if not flags.dry_run:
        if flags.fresh and run.is_run():
            write_err(f"the old run is kept in {move_aside(run.path)}\n")
        write_folder(run, wanted, ready, begun)
    return run, ready.plan


def _plan_run(
    wanted: RunRecipe,
    saved: Plan | None,
    begun: Plan | None,
    flags: TrainFlags,
    *,
    cache: Path | None,
) -> PlannedJob:
    if saved is not None and begun is None:
        return reuse_plan(saved, wanted, cache=cache)
    if begun is None:
        return plan_job(wanted, flags, cache=cache)
    if _has_moved(wanted, flags, begun):
        return plan_job(wanted, flags, cache=cache, begun=begun)
    return reuse_plan(begun, wanted, cache=cache).keep(begun)


def _has_moved(wanted: RunRecipe, flags: TrainFlags, begun: Plan) -> bool:
    """Whether the run is to go on with other hardware than its plan was made for."""
    if wanted.recipe.on is None and flags.nodes == begun.strategy.num_nodes:
        return False
    from tightfit.cli.training.hardware import find_hardware

    groups = find_hardware(flags, wanted.recipe.on).groups
    same = [
        group
        for group in groups
        if group.node.gpu.name == begun.hardware.node.gpu.name
        and group.node.num_gpus == begun.hardware.node.num_gpus
        and group.num_nodes == begun.strategy.num_nodes
        and group.name == begun.hardware.group
    ]
    return not same


def _show(plan: Plan, run: RunFolder, flags: TrainFlags) -> None:
    free = check_space(run.path, plan)
    if not flags.as_json:
        from tightfit.cli.render.train import show_start

        show_start(plan, folder=run.path, free_bytes=free, needed_bytes=estimate_run_bytes(plan))
    elif flags.dry_run:
        show_json({"run": str(run.path), "plan": plan.model_dump(mode="json"), "free_bytes": free})


def _start(run: RunFolder, plan: Plan, flags: TrainFlags, *, limit_bytes: int | None) -> None:
    def read_num_steps() -> int:
        try:
            return run.read_state().num_steps
        except UserError:
            return 0

    num_kept = len(list_kept_plans(run))
    capacity = plan.estimate.gpu.capacity_bytes
    progress = Progress(
        num_steps=read_num_steps(), capacity_bytes=min(capacity, limit_bytes or capacity)
    )
    with open_display(progress, read_num_steps=read_num_steps, is_silent=flags.as_json) as display:
        state = run_job(
            run,
            watch=display,
            rendezvous=read_rendezvous(flags),
            lock_wait_seconds=LOCK_WAIT_SECONDS if flags.as_planned else 0.0,
        )
    finish_run(
        run,
        state,
        num_kept_before=num_kept,
        is_limited=limit_bytes is not None,
        as_json=flags.as_json,
        is_first=flags.node_rank in (None, "0"),
    )
