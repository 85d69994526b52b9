"""Checkpoints: folders written atomically, `step-000040` for the state after step 40."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError
from torch.distributed.checkpoint.api import CheckpointException

from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.files import PARTIAL, sync, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.strategy import Sharding
from tightfit.runs.run_folder import RunFolder
from tightfit.training.distributed import DistContext, broadcast_object
from tightfit.training.step import TrainEngine

_WHOLE_NAME = re.compile(r"step-(\d{6,})")
_PROGRESS = "progress.json"
_STREAM_ERROR = "inline_container"
"""torch's zip writer, which reports a short write without its cause."""
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}


class Progress(Frozen):
    """The progress of the run; the last file written into a checkpoint."""

    step: NonNegativeInt
    """Optimizer steps done."""
    num_steps: NonNegativeInt = 0
    world_size: PositiveInt
    sharding: Sharding
    files: dict[str, int] = Field(default_factory=dict)
    """Bytes of every other file, to notice one that is truncated later."""


def write_checkpoint(
    run: RunFolder,
    engine: TrainEngine,
    progress: Progress,
    context: DistContext,
    keep: int,
    *,
    alone: bool = False,
) -> Path:
    """Save the engine's state as the newest checkpoint, then drop all but the `keep` newest.

    All ranks together, unless `alone`: then by this rank, while the others may hang or be dead.
    If the process is killed meanwhile, the checkpoint before it stays intact.
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
        engine.save_state(partial, alone=alone)
        if writes:
            _sync_and_list(partial, progress)
            _publish(partial, folder)
    except BaseException as error:
        _clean_up(partial, error, writes=writes)
        raise
    if writes:
        prune_checkpoints(run, keep=keep)
    if not alone:
        context.barrier()
    return folder


def find_checkpoint(run: RunFolder) -> Path | None:
    """The newest complete checkpoint; None before the first."""
    found = _list_newest_first(run)
    whole = next((folder for folder in found if _is_complete(folder)), None)
    if whole is None and found:
        # Damaged after they were saved: starting over would delete what may be repairable.
        raise InvalidInputError(
            f"No checkpoint in {run.checkpoints_path} is complete: {found[0].name} lacks "
            "files, or they have another size than when it was saved.",
            remedy="bring the files back from a copy, or start over with --fresh",
        )
    return whole


def list_damaged(run: RunFolder, *, after_step: int) -> list[str]:
    """Incomplete checkpoints of later steps, newest first."""
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
    """Remove all but the `keep` newest complete ones, and partial folders."""
    kept = [folder for folder in _list_newest_first(run) if _is_complete(folder)][:keep]
    for folder in run.checkpoints_path.iterdir():
        if folder in kept:
            continue
        if folder.name.endswith(PARTIAL):
            shutil.rmtree(folder, ignore_errors=True)
        elif _WHOLE_NAME.fullmatch(folder.name):
            shutil.rmtree(_rename_for_removal(folder), ignore_errors=True)


def _list_newest_first(run: RunFolder) -> list[Path]:
    try:
        names = [path.name for path in run.checkpoints_path.iterdir()]
    except FileNotFoundError:
        return []
    steps = {int(match[1]): name for name in names if (match := _WHOLE_NAME.fullmatch(name))}
    return [run.checkpoints_path / steps[step] for step in sorted(steps, reverse=True)]


def _is_complete(folder: Path) -> bool:
    try:
        progress = read_progress(folder)
        return all((folder / name).stat().st_size == size for name, size in progress.files.items())
    except (InvalidInputError, OSError):
        return False


def _open_partial(folder: Path, partial: Path) -> bool:
    """Make an empty folder to write into; False if the checkpoint exists already."""
    if _is_complete(folder):
        return False
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise _cannot_save(partial, error) from error
    return True


def _sync_and_list(partial: Path, progress: Progress) -> None:
    """Sync all files to disk and write progress.json, which lists them."""
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
        # An incomplete one (see `_open_partial`), or another rank was faster.
        if _is_complete(folder):
            shutil.rmtree(partial)
            return
        _rename_for_removal(folder)  # `prune_checkpoints` removes it
    partial.rename(folder)
    sync(folder.parent)


def _rename_for_removal(folder: Path) -> Path:
    """Rename before removal: an interrupted removal must not leave half a checkpoint."""
    doomed = folder.with_name(folder.name + ".old" + PARTIAL)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    return doomed


def _clean_up(partial: Path, error: BaseException, *, writes: bool) -> None:
    """Free the space of a failed checkpoint; raise a UserError if the disk caused it."""
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
    cause = find_disk_error(error)
    if cause is not None:
        raise _cannot_save(partial, cause) from error


def find_disk_error(error: BaseException) -> OSError | None:
    """The OSError inside what torch raises: CheckpointException holds one error per rank."""
    if isinstance(error, CheckpointException):
        inner = [failure[0] for failure in error.failures.values()]
        return next((found for each in inner if (found := find_disk_error(each))), None)
    if isinstance(error, OSError):
        return error if error.errno in _DISK_ERRNOS else None
    before = error.__cause__ or error.__context__
    found = None if before is None else find_disk_error(before)
    if found is None and isinstance(error, RuntimeError) and _STREAM_ERROR in str(error):
        return OSError(errno.ENOSPC, "torch could not write all of it, as on a full disk")
    if found is None and os.strerror(errno.ENOSPC) in str(error):  # safetensors raises its own type
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
