"""Checkpoints: folders that are whole or not there, `step-000040` for the state after step 40."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError
from torch.distributed.checkpoint.api import CheckpointException

from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.files import sync, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.strategy import Sharding
from tightfit.runs.run_folder import RunFolder
from tightfit.train.distributed import DistContext, broadcast_object

PARTIAL = ".partial"
_WHOLE_NAME = re.compile(r"step-(\d{6,})")
_PROGRESS = "progress.json"
_STREAM_ERROR = "inline_container"
"""torch's zip writer, which tells of a short write without saying why."""
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}


class Progress(Frozen):
    """How far the run had come; the last file written into a checkpoint."""

    step: NonNegativeInt
    """Optimizer steps done."""
    num_steps: NonNegativeInt = 0
    world_size: PositiveInt
    sharding: Sharding
    files: dict[str, int] = Field(default_factory=dict)
    """Bytes of every other file: one that was cut short later is noticed."""


def write_checkpoint(
    run: RunFolder,
    engine: Any,
    progress: Progress,
    context: DistContext,
    keep: int,
    *,
    alone: bool = False,
) -> Path:
    """Save the engine's state as the newest checkpoint, then drop all but the `keep` newest.

    All ranks together, unless `alone`: then this rank by itself, while the others
    may hang or be dead. Killed at any moment, it leaves the checkpoint before it.
    """
    folder = run.checkpoints_path / f"step-{progress.step:06d}"
    partial = folder.with_name(folder.name + (f".rank{context.rank}" if alone else "") + PARTIAL)
    writes = alone or context.is_first
    is_needed = writes and _open_partial(folder, partial)
    if not alone:
        is_needed = broadcast_object(is_needed)
    if not is_needed:
        return folder
    try:
        engine.save_state(partial, alone=True) if alone else engine.save_state(partial)
        if writes:
            _seal(partial, progress)
            _publish(partial, folder)
    except BaseException as error:
        _give_up(partial, error, writes=writes)
        raise
    if writes:
        prune_checkpoints(run, keep=keep)
    if not alone:
        context.barrier()
    return folder


def find_checkpoint(run: RunFolder) -> Path | None:
    """The newest whole checkpoint; None before the first."""
    found = _list_newest_first(run)
    whole = next((folder for folder in found if _is_whole(folder)), None)
    if whole is None and found:
        # Saved whole and damaged since: starting over would remove what may yet be mended.
        raise InvalidInputError(
            f"No checkpoint in {run.checkpoints_path} is whole any more: {found[0].name} lacks "
            "files, or they have another size than when it was saved.",
            remedy="bring the files back from a copy, or start over with --fresh",
        )
    return whole


def list_damaged(run: RunFolder, *, after_step: int) -> list[str]:
    """Checkpoints of later steps, newest first: one would be resumed from, were it whole."""
    names = [folder.name for folder in _list_newest_first(run)]
    return [name for name in names if int(name.removeprefix("step-")) > after_step]


def read_progress(folder: Path) -> Progress:
    path = folder / _PROGRESS
    try:
        return Progress.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InvalidInputError(
            f"{path} cannot be read: {str(error).splitlines()[0]}.",
            remedy=f"remove {folder}; the checkpoint before it is used then",
        ) from error


def prune_checkpoints(run: RunFolder, *, keep: int) -> None:
    """Remove all but the newest whole ones, and what was left half written or half removed."""
    kept = [folder for folder in _list_newest_first(run) if _is_whole(folder)][:keep]
    for folder in run.checkpoints_path.iterdir():
        if folder in kept:
            continue
        if folder.name.endswith(PARTIAL):
            shutil.rmtree(folder, ignore_errors=True)
        elif _WHOLE_NAME.fullmatch(folder.name):
            shutil.rmtree(_set_aside(folder), ignore_errors=True)


def _list_newest_first(run: RunFolder) -> list[Path]:
    try:
        names = [path.name for path in run.checkpoints_path.iterdir()]
    except FileNotFoundError:
        return []
    steps = {int(match[1]): name for name in names if (match := _WHOLE_NAME.fullmatch(name))}
    return [run.checkpoints_path / steps[step] for step in sorted(steps, reverse=True)]


def _is_whole(folder: Path) -> bool:
    try:
        progress = read_progress(folder)
        return all((folder / name).stat().st_size == size for name, size in progress.files.items())
    except (InvalidInputError, OSError):
        return False


def _open_partial(folder: Path, partial: Path) -> bool:
    """An empty folder to write into; False where the checkpoint is there already."""
    if _is_whole(folder):
        return False
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise _cannot_save(partial, error) from error
    return True


def _seal(partial: Path, progress: Progress) -> None:
    """Note what is there, and have all of it on the disk."""
    paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    for path in paths:
        sync(path)
    files = {str(path.relative_to(partial)): path.stat().st_size for path in paths}
    whole = progress.model_copy(update={"files": files})
    write_atomic(partial / _PROGRESS, whole.model_dump_json(indent=2) + "\n")
    for folder in {path.parent for path in paths}:
        sync(folder)


def _publish(partial: Path, folder: Path) -> None:
    if folder.exists():
        # Not whole, or `_open_partial` would have said so; or another rank was faster.
        if _is_whole(folder):
            shutil.rmtree(partial)
            return
        _set_aside(folder)  # which the pruning that follows removes
    partial.rename(folder)
    sync(folder.parent)


def _set_aside(folder: Path) -> Path:
    """Under a name that no run resumes from: a removal that is cut off tears no checkpoint."""
    doomed = folder.with_name(folder.name + ".old" + PARTIAL)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    return doomed


def _give_up(partial: Path, error: BaseException, *, writes: bool) -> None:
    """Free the space that a failed checkpoint holds, and name the disk where it is to blame."""
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
    cause = find_disk_error(error)
    if cause is not None:
        raise _cannot_save(partial, cause) from error


def find_disk_error(error: BaseException) -> OSError | None:
    """The system's complaint inside what torch raises; it packs one fault per rank."""
    if isinstance(error, CheckpointException):
        inner = [failure[0] for failure in error.failures.values()]
        return next((found for each in inner if (found := find_disk_error(each))), None)
    if isinstance(error, OSError):
        return error if error.errno in _DISK_ERRNOS else None
    before = error.__cause__ or error.__context__
    found = None if before is None else find_disk_error(before)
    if found is None and isinstance(error, RuntimeError) and _STREAM_ERROR in str(error):
        return OSError(errno.ENOSPC, "torch could not write all of it, as on a full disk")
    if found is None and os.strerror(errno.ENOSPC) in str(error):  # safetensors tells it in words
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return found


def _cannot_save(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot write the checkpoint {str(folder)!r}: {error.strerror or error}. "
        f"{_describe_before(folder)}",
        remedy=f"make room (df -h {folder.parent.parent}), then start the same command again",
    )


def _describe_before(folder: Path) -> str:
    found = _list_newest_first(RunFolder(path=folder.parent.parent))
    return "The one before it is intact." if found else "There is none before it."
