"""`tightfit train`: plan, show the plan, run it, survive what goes wrong, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.json_output import show_json
from tightfit.cli.output import write_err, write_out
from tightfit.cli.saved_plan import read_saved_plans
from tightfit.cli.train_display import open_display
from tightfit.cli.train_end import end_run, find_artefact, list_kept_plans
from tightfit.cli.train_hardware import MEMORY_VARIABLE, read_limit, read_rendezvous
from tightfit.cli.train_place import (
    Place,
    Stage,
    find_place,
    move_aside,
    name_folder,
    one_node_at_a_time,
    read_wish_file,
    write_wish_file,
)
from tightfit.cli.train_plan import Ready, make_ready, reuse_plan
from tightfit.cli.train_progress import Progress
from tightfit.cli.train_recipe import Wish, read_wish
from tightfit.core.errors import EnvironmentFaultError, UsageError, UserError
from tightfit.launch.local import run_job
from tightfit.launch.space import check_space, estimate_run_bytes
from tightfit.ledger.environment import probe_environment, write_environment
from tightfit.ledger.find import find_run
from tightfit.ledger.metrics import EventRecord, append_record
from tightfit.ledger.run_folder import RunFolder, RunState, RunStatus, TokenFolders
from tightfit.planning.plan import Plan
from tightfit.planning.request import describe_strategy, name_method


def train(flags: TrainFlags) -> None:
    """From whatever names the job to a report."""
    read_rendezvous(flags)  # faults of the command line come before any work
    limit = read_limit(flags, os.environ)
    wish, saved = _read_job(flags)
    with one_node_at_a_time(wish, flags):
        place = find_place(wish, flags)
        if place.stage is Stage.FINISHED and not flags.dry_run:
            _tell_finished(place.run, flags)
            return
        run, plan = _prepare(wish, saved, place, flags)
    _show(plan, run, flags)
    if not flags.dry_run:
        with _limiting(limit):
            _start(run, plan, flags, limit_bytes=limit)


@contextmanager
def _limiting(limit_bytes: int | None) -> Iterator[None]:
    """Workers inherit the limit; what runs in this process afterwards does not."""
    before = os.environ.get(MEMORY_VARIABLE)
    if limit_bytes is not None:
        os.environ[MEMORY_VARIABLE] = str(limit_bytes)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(MEMORY_VARIABLE, None)
        else:
            os.environ[MEMORY_VARIABLE] = before


def _read_job(flags: TrainFlags) -> tuple[Wish, Plan | None]:
    """The wish, and the plan where a saved one was named."""
    run = find_run(flags.job)
    if run is not None:
        return _wish_of_run(run, flags), None
    saved = read_saved_plans(flags.job)
    if saved is None:
        return read_wish(flags), None
    if flags.plan > len(saved.plans):
        raise UsageError(
            f"`--plan {flags.plan}`: {flags.job} holds {len(saved.plans)} plans.",
            remedy=f"--plan {len(saved.plans)}",
        )
    plan = saved.plans[flags.plan - 1]
    return _wish_of_plan(plan, flags), plan


def _wish_of_run(run: RunFolder, flags: TrainFlags) -> Wish:
    """A run goes on as it was; only where it runs may change."""
    given = {
        "--data": flags.data, "--eval": flags.eval, "--method": flags.method,
        "--seq-len": flags.seq_len, "--epochs": flags.epochs, "--max-steps": flags.max_steps,
        "--lr": flags.lr, "--effective-batch": flags.effective_batch, "--template": flags.template,
        "--seed": flags.seed, "--set": flags.settings, "--output": flags.output,
        "--log-to": flags.log_to,
    }  # fmt: skip
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"{flags.job} is a run, which {option} cannot change.",
            remedy=f"tightfit train {flags.job}    (goes on with it as it is)",
        )
    wish = read_wish_file(run.path)
    if wish is None:
        raise UsageError(
            f"{flags.job} does not hold the recipe it was started with.",
            remedy="start it with the command that began it",
        )
    update: dict[str, str] = {"output": str(run.path)}
    if flags.on is not None:
        update["on"] = flags.on
    return wish.model_copy(update={"recipe": wish.recipe.model_copy(update=update)})


def _wish_of_plan(plan: Plan, flags: TrainFlags) -> Wish:
    """The plan's job as a recipe; data and learning side may be given beside it."""
    from dataclasses import replace

    fixed = {"--method": flags.method, "--seq-len": flags.seq_len, "--set": flags.settings,
             "--on": flags.on, "--effective-batch": flags.effective_batch}  # fmt: skip
    option = next((name for name, value in fixed.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"{flags.job} is a saved plan, which {option} cannot change.",
            remedy=f"tightfit train {plan.model.name} with the same options    (plans it anew)",
        )
    held = plan.training
    data = flags.data
    if data is None and held is not None and held.data:
        data = Path(held.data[0].path)
    name = plan.model.name if held is None else held.model_path
    return read_wish(replace(flags, job=name, data=data, plan=1))


def _tell_finished(run: RunFolder, flags: TrainFlags) -> None:
    artefact = find_artefact(run)
    if flags.as_json:
        from tightfit.ledger.report import read_report

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
    wish: Wish, saved: Plan | None, place: Place, flags: TrainFlags
) -> tuple[RunFolder, Plan]:
    """Plan, check the disk, and make or reopen the folder."""
    begun = place.run.read_plan() if place.stage is Stage.BEGUN else None
    # Every node reads the data, so that of several nodes lies in the folder they share.
    cache = place.folder.absolute() if place.folder is not None and flags.nodes > 1 else None
    ready = _make_ready(wish, saved, begun, flags, cache=cache)
    folder = place.folder or name_folder(wish, name_method(ready.plan.strategy))
    run = RunFolder(path=folder.absolute())
    check_space(run.path, ready.plan)
    if not flags.dry_run:
        if flags.fresh and run.is_run():
            write_err(f"the old run is kept in {move_aside(run.path)}\n")
        _write_folder(run, wish, ready, begun)
    return run, ready.plan


def _make_ready(
    wish: Wish, saved: Plan | None, begun: Plan | None, flags: TrainFlags, *, cache: Path | None
) -> Ready:
    if saved is not None and begun is None:
        return reuse_plan(saved, wish, cache=cache)
    if begun is None:
        return make_ready(wish, flags, cache=cache)
    if _has_moved(wish, flags, begun):
        return make_ready(wish, flags, cache=cache, begun=begun)
    return reuse_plan(begun, wish, cache=cache).keep(begun)


def _has_moved(wish: Wish, flags: TrainFlags, begun: Plan) -> bool:
    """Whether the run is to go on with other hardware than its plan was made for."""
    if wish.recipe.on is None and flags.nodes == begun.strategy.num_nodes:
        return False
    from tightfit.cli.train_hardware import find_hardware

    groups = find_hardware(flags, wish.recipe.on).groups
    same = [
        group
        for group in groups
        if group.node.gpu.name == begun.hardware.node.gpu.name
        and group.node.num_gpus == begun.hardware.node.num_gpus
        and group.num_nodes == begun.strategy.num_nodes
        and group.name == begun.hardware.group
    ]
    return not same


def _write_folder(run: RunFolder, wish: Wish, ready: Ready, begun: Plan | None) -> None:
    tokens = TokenFolders(
        train=str(ready.encoded.train.folder),
        eval=None if ready.encoded.eval is None else str(ready.encoded.eval.folder),
    )
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot make the folder {run.path}: {fault.strerror or fault}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from fault
    if begun is not None:
        _refuse_changed_data(run, tokens)
    write_wish_file(run.path, wish)  # first: by it a half-made folder is known as ours
    run.write_tokens(tokens)
    write_environment(run, probe_environment(sys.argv))
    if not run.state_path.exists():
        now = datetime.now(timezone.utc).isoformat()
        run.write_state(RunState(status=RunStatus.PREPARED, updated_at=now))
    if begun is not None and ready.plan != begun:
        text = f"goes on with other hardware: {describe_strategy(ready.plan.strategy)}"
        append_record(run.metrics_path, EventRecord(step=run.read_state().step, text=text))
    if ready.plan != begun:
        run.write_plan(ready.plan)  # last: a folder with a plan is a run


def _refuse_changed_data(run: RunFolder, tokens: TokenFolders) -> None:
    """Going on with other rows would be another run under the same name."""
    try:
        held = run.read_tokens()
    except UserError:
        return
    if Path(held.train).parent.name != Path(tokens.train).parent.name:
        raise UsageError(
            f"The data has changed since the run in {run.path} began.",
            remedy="--fresh to start over, or --output ANOTHER-FOLDER",
        )


def _show(plan: Plan, run: RunFolder, flags: TrainFlags) -> None:
    free = check_space(run.path, plan)
    if not flags.as_json:
        from tightfit.cli.render_train import show_start

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
        state = run_job(run, watch=display, rendezvous=read_rendezvous(flags))
    end_run(
        run,
        state,
        num_kept_before=num_kept,
        is_limited=limit_bytes is not None,
        as_json=flags.as_json,
    )
