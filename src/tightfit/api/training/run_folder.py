"""The folder of a run: where it lies, whether it is new, begun or finished, and its first files."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from pydantic import ValidationError

from tightfit.api.options.training import TrainOptions
from tightfit.api.training.job import PlannedJob
from tightfit.api.training.recipe import RunRecipe, read_run_recipe, read_saved_plans
from tightfit.core.errors import SetupError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.locks import open_locked
from tightfit.core.text import sanitize
from tightfit.planning.plan import Plan
from tightfit.runs.environment import probe_environment, write_environment
from tightfit.runs.find import DEFAULT_FOLDER, find_run
from tightfit.runs.metrics import EventRecord, append_record
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus, TokenFolders

RUN_RECIPE_FILE = "recipe.json"


class RunStage(Enum):
    NEW = "new"
    BEGUN = "begun"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocation:
    """A folder and what is in it."""

    folder: Path | None
    """None: new, and named once the method is known."""
    stage: RunStage

    @property
    def run(self) -> RunFolder:
        if self.folder is None:
            raise AssertionError("the place has no folder yet")
        return RunFolder(path=self.folder)


def find_run_location(
    wanted: RunRecipe, options: TrainOptions, *, base: Path = DEFAULT_FOLDER
) -> RunLocation:
    """Where this recipe was or will be trained; `base` holds runs without a folder of their own."""
    if wanted.recipe.output is None:
        return _find_default(wanted, options, base)
    folder = Path(wanted.recipe.output).expanduser()
    stage = _read_stage(folder, wanted, options)
    if stage is RunStage.FINISHED and options.again:
        return RunLocation(folder=_next_free(folder), stage=RunStage.NEW)
    return RunLocation(folder=folder, stage=stage)


def _find_default(wanted: RunRecipe, options: TrainOptions, base: Path) -> RunLocation:
    """Among the default folders, the one that was made for the same recipe."""
    found = sorted(base.glob(f"*/{RUN_RECIPE_FILE}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        held = read_run_recipe_file(path.parent)
        if held is None or held.recipe.output is not None or not held.is_same(wanted):
            continue
        stage = _stage_of(RunFolder(path=path.parent))
        if options.fresh or (stage is RunStage.FINISHED and options.again):
            break
        return RunLocation(folder=path.parent, stage=stage)
    return RunLocation(folder=None, stage=RunStage.NEW)


def name_folder(wanted: RunRecipe, method: str, *, home: Path = DEFAULT_FOLDER) -> Path:
    """The next free `runs/MODEL-METHOD-N`."""
    stem = Path(wanted.recipe.model.rstrip("/")).name.removesuffix(".gguf")
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{stem}-{method}").strip("-.") or "run"
    number = 1
    while os.path.lexists(home / f"{base}-{number}"):
        number += 1
    return home / f"{base}-{number}"


def claim_folder(wanted: RunRecipe, method: str, *, home: Path) -> Path:
    """Make the next free folder: of several who do so at once, each gets one of its own."""
    while True:
        folder = name_folder(wanted, method, home=home)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise folder_error(folder, error) from error
        return folder


def folder_error(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot make the folder {sanitize(str(folder))}: {error.strerror or error}.",
        remedy="choose a folder that is writable: --output FOLDER",
    )


def _read_stage(folder: Path, wanted: RunRecipe, options: TrainOptions) -> RunStage:
    run = RunFolder(path=folder)
    if not run.is_run():
        _refuse_foreign(folder)
        return RunStage.NEW
    if options.fresh:
        return RunStage.NEW
    held = read_run_recipe_file(folder)
    if held is not None and not held.is_same(wanted):
        keys = ", ".join(held.list_differences(wanted)) or "the recipe"
        raise UsageError(
            f"{sanitize(str(folder))} holds a run of another recipe (it differs in: {keys}).",
            remedy="--output ANOTHER-FOLDER, or --fresh to start over    (the old run is kept)",
        )
    return _stage_of(run)


def _stage_of(run: RunFolder) -> RunStage:
    if not run.is_run():
        return RunStage.NEW
    try:
        is_finished = run.read_state().status is RunStatus.FINISHED
    except UserError:
        is_finished = False
    return RunStage.FINISHED if is_finished else RunStage.BEGUN


def _refuse_foreign(folder: Path) -> None:
    """Somebody else's files are not to be mixed with a run's; a half-made run is our own."""
    if (folder / RUN_RECIPE_FILE).is_file():
        return
    if folder.is_dir() and any(not _is_ours(item) for item in folder.iterdir()):
        raise UsageError(
            f"{sanitize(str(folder))} is not empty and holds no run.",
            remedy=f"--output {shlex.quote(str(folder / 'run'))}",
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{sanitize(str(folder))} is a file.", remedy="--output a folder's name")


def _is_ours(item: Path) -> bool:
    return item.suffix == ".lock" or item.name == "tokens"


@contextmanager
def one_node_at_a_time(wanted: RunRecipe, options: TrainOptions) -> Iterator[None]:
    """Of several nodes the first prepares the folder; the others wait and find it made."""
    if options.nodes == 1 or options.dry_run:
        yield
        return
    if wanted.recipe.output is None:
        raise UsageError(
            "Several nodes need one folder that all of them see.",
            remedy="--output FOLDER    (on a file system that the nodes share)",
        )
    folder = Path(wanted.recipe.output).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_locked(folder / "prepare.lock", wait_seconds=None)
    except OSError as error:
        raise SetupError(
            f"Cannot write in {folder}: {error.strerror or error}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from error
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def move_aside(folder: Path) -> Path:
    """Keep a whole run under another name; nothing that was trained is ever lost."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def _next_free(folder: Path) -> Path:
    number = 2
    while (free := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return free


def read_run_recipe_file(folder: Path) -> RunRecipe | None:
    try:
        return RunRecipe.model_validate_json((folder / RUN_RECIPE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_run_recipe_file(folder: Path, wanted: RunRecipe) -> None:
    write_atomic(folder / RUN_RECIPE_FILE, wanted.model_dump_json(indent=2) + "\n")


# What `train` and `submit` are asked to run: a recipe, a model, a saved plan, or a run.


def read_training_job(options: TrainOptions) -> tuple[RunRecipe, Plan | None]:
    """The recipe, and the plan where a saved one was named."""
    run = find_run(options.job)
    if run is not None:
        return _recipe_of_run(run, options), None
    saved = read_saved_plans(options.job)
    if saved is None:
        return read_run_recipe(options), None
    if options.plan > len(saved.plans):
        raise UsageError(
            f"`--plan {options.plan}`: {options.job} holds {len(saved.plans)} plans.",
            remedy=f"--plan {len(saved.plans)}",
        )
    plan = saved.plans[options.plan - 1]
    return _recipe_of_plan(plan, options), plan


def _recipe_of_run(run: RunFolder, options: TrainOptions) -> RunRecipe:
    """A run goes on as it was; only where it runs may change."""
    refuse_changes(options)
    wanted = read_run_recipe_file(run.path)
    if wanted is None:
        raise UsageError(
            f"{options.job} does not hold the recipe it was started with.",
            remedy="start it with the command that began it",
        )
    update: dict[str, str] = {"output": str(run.path)}
    if options.on is not None:
        update["on"] = options.on
    return wanted.model_copy(update={"recipe": wanted.recipe.model_copy(update=update)})


def refuse_changes(options: TrainOptions) -> None:
    """Options that would make another run of it."""
    given: dict[str, object] = {
        "--data": options.data,
        "--eval": options.eval,
        "--method": options.method,
        "--seq-len": options.seq_len,
        "--epochs": options.epochs,
        "--max-steps": options.max_steps,
        "--lr": options.lr,
        "--effective-batch": options.effective_batch,
        "--template": options.template,
        "--seed": options.seed,
        "--set": options.settings,
        "--output": options.output,
        "--log-to": options.log_to,
    }
    if options.as_planned:
        given["--on"], given["--network"] = options.on, options.network
        given["--fresh"], given["--again"] = options.fresh or None, options.again or None
        given["--plan"] = None if options.plan == 1 else options.plan
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"{options.job} is a run, which {option} cannot change.",
            remedy=f"tightfit train {options.job}    (goes on with it as it is)",
        )


def _recipe_of_plan(plan: Plan, options: TrainOptions) -> RunRecipe:
    """The plan's job as a recipe; data and learning side may be given beside it."""
    from dataclasses import replace

    fixed = {"--method": options.method, "--seq-len": options.seq_len, "--set": options.settings,
             "--on": options.on, "--effective-batch": options.effective_batch}  # fmt: skip
    option = next((name for name, value in fixed.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"{options.job} is a saved plan, which {option} cannot change.",
            remedy=f"tightfit train {plan.model.name} with the same options    (plans it anew)",
        )
    held = plan.training
    data = options.data
    if data is None and held is not None and held.data:
        data = Path(held.data[0].path)
    name = plan.model.name if held is None else held.model_path
    return read_run_recipe(replace(options, job=name, data=data, plan=1))


# `train RUN --as-planned`: a batch job on a node, a pod: the folder's plan, and nothing else.

LOCK_WAIT_SECONDS = 180.0
"""A file server forgets the lock of a node that died after its lease, mostly 90 seconds."""


def open_planned(options: TrainOptions) -> tuple[RunFolder, Plan]:
    """The run and its plan, without a look at what is here: whoever planned it looked."""
    found = find_run(options.job)
    if found is None:
        raise UsageError(
            f"`--as-planned` takes a run's folder, and {options.job} is none.",
            remedy=f"tightfit train {options.job}    (plans and runs)",
        )
    run = RunFolder(path=found.path.absolute())
    refuse_changes(options)
    plan = run.read_plan()
    count = plan.strategy.num_nodes
    if options.nodes != count:
        raise UsageError(
            f"The plan in {run.path} is for {count} nodes, not for {options.nodes}.",
            remedy=f"--nodes {count} --rendezvous FIRST-NODE:29500    (on every node)"
            if count > 1
            else "leave out --nodes",
        )
    if not options.dry_run and not is_finished(run) and options.node_rank in (None, "0"):
        write_environment(run, probe_environment(sys.argv))
    return run, plan


def is_finished(run: RunFolder) -> bool:
    try:
        return run.read_state().status is RunStatus.FINISHED
    except UserError:
        return False


# The folder of a run, filled before its workers start.


def write_folder(run: RunFolder, wanted: RunRecipe, ready: PlannedJob, begun: Plan | None) -> None:
    """Everything that later starts read; `begun` is the plan of a run that goes on."""
    tokens = TokenFolders(
        train=str(ready.encoded.train.folder),
        eval=None if ready.encoded.eval is None else str(ready.encoded.eval.folder),
    )
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"Cannot make the folder {run.path}: {error.strerror or error}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from error
    if begun is not None:
        _refuse_changed_data(run, tokens)
    write_run_recipe_file(run.path, wanted)  # first: by it a half-made folder is known as ours
    run.write_tokens(tokens)
    write_environment(run, probe_environment(sys.argv))
    if not run.state_path.exists():
        now = datetime.now(timezone.utc).isoformat()
        run.write_state(RunState(status=RunStatus.PREPARED, updated_at=now))
    if begun is not None and ready.plan != begun:
        text = f"goes on with other hardware: {ready.plan.summary}"
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
