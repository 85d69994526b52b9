"""Which folder a run lies in, and whether it is new, half done, or finished."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import ValidationError

from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.training.recipe import Wish
from tightfit.core.errors import EnvironmentFaultError, UsageError, UserError
from tightfit.core.files import write_atomic
from tightfit.ledger.find import DEFAULT_FOLDER
from tightfit.ledger.run_folder import RunFolder, RunStatus

WISH_FILE = "recipe.json"


class Stage(Enum):
    NEW = "new"
    BEGUN = "begun"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder and what is in it."""

    folder: Path | None
    """None: new, and named once the method is known."""
    stage: Stage

    @property
    def run(self) -> RunFolder:
        if self.folder is None:
            raise AssertionError("the place has no folder yet")
        return RunFolder(path=self.folder)


def find_place(wish: Wish, flags: TrainFlags, *, base: Path = DEFAULT_FOLDER) -> Place:
    """Where this wish is, was, or will be trained; `base` holds runs that were given no folder."""
    if wish.recipe.output is None:
        return _find_default(wish, flags, base)
    folder = Path(wish.recipe.output).expanduser()
    stage = _look(folder, wish, flags)
    if stage is Stage.FINISHED and flags.again:
        return Place(folder=_next_free(folder), stage=Stage.NEW)
    return Place(folder=folder, stage=stage)


def _find_default(wish: Wish, flags: TrainFlags, base: Path) -> Place:
    """Among the default folders, the one that was made for the same wish."""
    found = sorted(base.glob(f"*/{WISH_FILE}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        held = read_wish_file(path.parent)
        if held is None or held.recipe.output is not None or not held.is_same(wish):
            continue
        stage = _stage_of(RunFolder(path=path.parent))
        if flags.fresh or (stage is Stage.FINISHED and flags.again):
            break
        return Place(folder=path.parent, stage=stage)
    return Place(folder=None, stage=Stage.NEW)


def name_folder(wish: Wish, method: str, *, home: Path = DEFAULT_FOLDER) -> Path:
    """The next free `runs/MODEL-METHOD-N`."""
    stem = Path(wish.recipe.model.rstrip("/")).name.removesuffix(".gguf")
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{stem}-{method}").strip("-.") or "run"
    number = 1
    while os.path.lexists(home / f"{base}-{number}"):
        number += 1
    return home / f"{base}-{number}"


def claim_folder(wish: Wish, method: str, *, home: Path) -> Path:
    """Make the next free folder: of several who do so at once, each gets one of its own."""
    while True:
        folder = name_folder(wish, method, home=home)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as fault:
            raise cannot_make(folder, fault) from fault
        return folder


def cannot_make(folder: Path, fault: OSError) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"Cannot make the folder {harmless(str(folder))}: {fault.strerror or fault}.",
        remedy="choose a folder that is writable: --output FOLDER",
    )


def _look(folder: Path, wish: Wish, flags: TrainFlags) -> Stage:
    run = RunFolder(path=folder)
    if not run.is_run():
        _refuse_foreign(folder)
        return Stage.NEW
    if flags.fresh:
        return Stage.NEW
    held = read_wish_file(folder)
    if held is not None and not held.is_same(wish):
        keys = ", ".join(held.list_differences(wish)) or "the recipe"
        raise UsageError(
            f"{harmless(str(folder))} holds a run of another recipe (it differs in: {keys}).",
            remedy="--output ANOTHER-FOLDER, or --fresh to start over    (the old run is kept)",
        )
    return _stage_of(run)


def _stage_of(run: RunFolder) -> Stage:
    if not run.is_run():
        return Stage.NEW
    try:
        is_finished = run.read_state().status is RunStatus.FINISHED
    except UserError:
        is_finished = False
    return Stage.FINISHED if is_finished else Stage.BEGUN


def _refuse_foreign(folder: Path) -> None:
    """Somebody else's files are not to be mixed with a run's; a half-made run is our own."""
    if (folder / WISH_FILE).is_file():
        return
    if folder.is_dir() and any(not _is_ours(item) for item in folder.iterdir()):
        raise UsageError(
            f"{harmless(str(folder))} is not empty and holds no run.",
            remedy=f"--output {shlex.quote(str(folder / 'run'))}",
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{harmless(str(folder))} is a file.", remedy="--output a folder's name")


def _is_ours(item: Path) -> bool:
    return item.suffix == ".lock" or item.name == "tokens"


@contextmanager
def one_node_at_a_time(wish: Wish, flags: TrainFlags) -> Iterator[None]:
    """Of several nodes the first prepares the folder; the others wait and find it made."""
    if flags.nodes == 1 or flags.dry_run:
        yield
        return
    if wish.recipe.output is None:
        raise UsageError(
            "Several nodes need one folder that all of them see.",
            remedy="--output FOLDER    (on a file system that the nodes share)",
        )
    folder = Path(wish.recipe.output).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "prepare.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot write in {folder}: {fault.strerror or fault}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from fault
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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


def read_wish_file(folder: Path) -> Wish | None:
    try:
        return Wish.model_validate_json((folder / WISH_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_wish_file(folder: Path, wish: Wish) -> None:
    write_atomic(folder / WISH_FILE, wish.model_dump_json(indent=2) + "\n")
