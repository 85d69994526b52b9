"""The folder of a run: where it lies, whether it is new, begun or finished, and its first files."""

from __future__ import annotations

import itertools
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

from tightfit.api.options.training import TrainingOptions, TrainOptions
from tightfit.api.training.job import PlannedJob
from tightfit.api.training.recipe import (
    RUN_RECIPE_FILE,
    RunRecipe,
    read_run_recipe_file,
    refuse_changes,
)
from tightfit.core.errors import SetupError, UsageError, UserError
from tightfit.core.files import describe_write_error, open_locked, write_atomic
from tightfit.core.text import sanitize
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import EventRecord, append_record
from tightfit.runs.report import DEFAULT_FOLDER, find_run
from tightfit.runs.run_folder import (
    RunFolder,
    RunState,
    RunStatus,
    TokenFolders,
    probe_environment,
)

LOCK_WAIT_SECONDS = 180.0
"""A file server forgets the lock of a node that died after its lease, mostly 90 seconds."""


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
        assert self.folder is not None, "the run has no folder yet"
        return RunFolder(path=self.folder)


def find_run_location(
    wanted: RunRecipe, options: TrainingOptions, *, base: Path = DEFAULT_FOLDER
) -> RunLocation:
    """Where this recipe was or will be trained; `base` holds runs without a folder of their own."""
    if wanted.recipe.output is not None:
        folder = Path(wanted.recipe.output).expanduser()
        stage = _read_stage(folder, wanted, options)
        if stage is RunStage.FINISHED and options.again:
            return RunLocation(folder=_first_free(folder, "-", start=2), stage=RunStage.NEW)
        return RunLocation(folder=folder, stage=stage)
    # Among the default folders, the one that was made for the same recipe.
    found = sorted(base.glob(f"*/{RUN_RECIPE_FILE}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        recorded = read_run_recipe_file(path.parent)
        if recorded is None or recorded.recipe.output is not None or not recorded.is_same(wanted):
            continue
        stage = _stage_of(RunFolder(path=path.parent))
        if options.fresh or (stage is RunStage.FINISHED and options.again):
            break
        return RunLocation(folder=path.parent, stage=stage)
    return RunLocation(folder=None, stage=RunStage.NEW)


def _read_stage(folder: Path, wanted: RunRecipe, options: TrainingOptions) -> RunStage:
    run = RunFolder(path=folder)
    if not run.is_run():
        _refuse_foreign(folder)
        return RunStage.NEW
    if options.fresh:
        return RunStage.NEW
    recorded = read_run_recipe_file(folder)
    if recorded is not None and not recorded.is_same(wanted):
        keys = ", ".join(recorded.list_differences(wanted))
        raise UsageError(
            f"{sanitize(str(folder))} holds a run of another recipe (it differs in: {keys}).",
            remedy="--output ANOTHER-FOLDER, or --fresh to start over    (the old run is kept)",
        )
    return _stage_of(run)


def _stage_of(run: RunFolder) -> RunStage:
    if not run.is_run():
        return RunStage.NEW
    return RunStage.FINISHED if is_finished(run) else RunStage.BEGUN


def is_finished(run: RunFolder) -> bool:
    try:
        return run.read_state().status is RunStatus.FINISHED
    except UserError:
        return False


def _refuse_foreign(folder: Path) -> None:
    """Somebody else's files are not to be mixed with a run's; a half-made run is our own."""
    if (folder / RUN_RECIPE_FILE).is_file():
        return
    if folder.is_dir():
        foreign = [item for item in folder.iterdir() if item.suffix != ".lock"]
        if any(item.name != "tokens" for item in foreign):
            raise UsageError(
                f"{sanitize(str(folder))} is not empty and holds no run.",
                remedy=f"--output {shlex.quote(str(folder / 'run'))}",
            )
    elif folder.exists():
        raise UsageError(f"{sanitize(str(folder))} is a file.", remedy="--output a folder's name")


def name_folder(wanted: RunRecipe, method: str, *, home: Path = DEFAULT_FOLDER) -> Path:
    """The next free `runs/MODEL-METHOD-N`."""
    stem = Path(wanted.recipe.model.rstrip("/")).name.removesuffix(".gguf")
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{stem}-{method}").strip("-.") or "run"
    return _first_free(home / base, "-", start=1)


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


def move_aside(folder: Path) -> Path:
    """Keep a whole run under another name; nothing that was trained is ever lost."""
    return folder.rename(_first_free(folder, ".before-", start=1))


def _first_free(folder: Path, separator: str, *, start: int) -> Path:
    numbered = (
        folder.with_name(f"{folder.name}{separator}{number}") for number in itertools.count(start)
    )
    return next(path for path in numbered if not os.path.lexists(path))


def folder_error(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot make the folder {sanitize(str(folder))}: {describe_write_error(error, folder)}.",
        remedy="choose a folder that is writable: --output FOLDER",
    )


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
        raise folder_error(folder, error) from error
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def open_planned(options: TrainOptions) -> tuple[RunFolder, Plan]:
    """The run and its plan of `train RUN --as-planned`: a batch job on a node, a pod.

    Without a look at what is here: whoever planned it looked.
    """
    found = find_run(options.job)
    if found is None:
        raise UsageError(
            f"`--as-planned` takes a run's folder, and {options.job} is none.",
            remedy=f"tightfit train {options.job}    (plans and runs)",
        )
    run = RunFolder(path=found.path.absolute())
    is_numbered = ("plan",) if options.plan != 1 else ()
    refuse_changes(options, "on", "network", "fresh", "again", *is_numbered)
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
        run.write_environment(probe_environment(sys.argv))
    return run, plan


def write_folder(run: RunFolder, wanted: RunRecipe, ready: PlannedJob, begun: Plan | None) -> None:
    """Everything that later starts read; `begun` is the plan of a run that goes on."""
    tokens = TokenFolders(
        train=str(ready.encoded.train.folder),
        eval=None if ready.encoded.eval is None else str(ready.encoded.eval.folder),
    )
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(run.path, error) from error
    if begun is not None:
        _refuse_changed_data(run, tokens)
    # First: by it a half-made folder is known as ours.
    write_atomic(run.path / RUN_RECIPE_FILE, wanted.model_dump_json(indent=2) + "\n")
    run.write_tokens(tokens)
    run.write_environment(probe_environment(sys.argv))
    if not run.state_path.exists():
        now = datetime.now(timezone.utc).isoformat()
        run.write_state(RunState(status=RunStatus.PREPARED, updated_at=now))
    if ready.plan == begun:
        return
    if begun is not None:
        text = f"goes on with other hardware: {ready.plan.summary}"
        append_record(run.metrics_path, EventRecord(step=run.read_state().step, text=text))
    run.write_plan(ready.plan)  # last: a folder with a plan is a run


def _refuse_changed_data(run: RunFolder, tokens: TokenFolders) -> None:
    """Going on with other rows would be another run under the same name."""
    try:
        before = run.read_tokens()
    except UserError:
        return
    if Path(before.train).parent.name != Path(tokens.train).parent.name:
        raise UsageError(
            f"The data has changed since the run in {run.path} began.",
            remedy="--fresh to start over, or --output ANOTHER-FOLDER",
        )
