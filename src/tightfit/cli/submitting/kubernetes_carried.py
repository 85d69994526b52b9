"""A saved plan for a run folder that only pods see: the plan travels with the job."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from tightfit.cli.flags.submit import SubmitFlags
from tightfit.cli.saved_plan import read_saved_plans
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.launch.kubernetes.pod import CONFIG_PATH
from tightfit.launch.kubernetes.training import PLAN_FILE, TrainingJob
from tightfit.launch.kubernetes.volumes import find_volume, require_volume
from tightfit.launch.site import Site
from tightfit.planning.plan import Plan


def draft_carried(
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
