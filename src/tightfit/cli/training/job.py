"""What `train` and `submit` are asked to run: a recipe, a model, a saved plan, or a run."""

from __future__ import annotations

from pathlib import Path

from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.saved_plan import read_saved_plans
from tightfit.cli.training.place import read_wish_file
from tightfit.cli.training.recipe import Wish, read_wish
from tightfit.core.errors import UsageError
from tightfit.ledger.find import find_run
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan


def read_training_job(flags: TrainFlags) -> tuple[Wish, Plan | None]:
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
    refuse_changes(flags)
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


def refuse_changes(flags: TrainFlags) -> None:
    """Options that would make another run of it."""
    given: dict[str, object] = {
        "--data": flags.data,
        "--eval": flags.eval,
        "--method": flags.method,
        "--seq-len": flags.seq_len,
        "--epochs": flags.epochs,
        "--max-steps": flags.max_steps,
        "--lr": flags.lr,
        "--effective-batch": flags.effective_batch,
        "--template": flags.template,
        "--seed": flags.seed,
        "--set": flags.settings,
        "--output": flags.output,
        "--log-to": flags.log_to,
    }
    if flags.as_planned:
        given["--on"], given["--network"] = flags.on, flags.network
        given["--fresh"], given["--again"] = flags.fresh or None, flags.again or None
        given["--plan"] = None if flags.plan == 1 else flags.plan
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"{flags.job} is a run, which {option} cannot change.",
            remedy=f"tightfit train {flags.job}    (goes on with it as it is)",
        )


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
