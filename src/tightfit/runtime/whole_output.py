"""A converted model is whole or not there, and takes no place that it was not given."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError, UsageError
from tightfit.core.files import sync
from tightfit.runtime.finished_folder import PARTIAL, begin_folder, finish_folder


def check_file_target(target: Path, *, force: bool) -> None:
    """Refuse to write over something that is there, unless told; never over what is no GGUF."""
    if not target.exists():
        return
    if not force:
        raise UsageError(
            f"{target} is there already.", remedy="--out another name, or --force to replace it"
        )
    if not target.is_file() or target.suffix.lower() != ".gguf":
        raise UsageError(
            f"{target} is no GGUF file, so --force does not replace it.",
            remedy="--out another name that ends in .gguf",
        )


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write to; it becomes `target` when the block ends well, and goes otherwise."""
    partial = target.with_name(target.name + PARTIAL)
    with _faults_told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _claim(handle, target)
            with _litter_gone(partial):
                yield partial
                sync(partial)
                partial.replace(target)
                sync(target.parent)
        finally:
            os.close(handle)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `target` when the block ends well, and goes otherwise."""
    with _faults_told(target):
        work = begin_folder(target)
        with _litter_gone(work):
            yield work
            finish_folder(work, target)


@contextlib.contextmanager
def _litter_gone(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:  # an interrupt must leave no litter either
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _faults_told(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot write {str(target)!r}: {fault.strerror or fault}.",
            remedy="--out a path that is writable and has free space",
        ) from fault


def _claim(handle: int, target: Path) -> None:
    """One writer at a time; the lock goes with the process, however it ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as fault:
        raise UsageError(
            f"Another command is writing {target} right now.",
            remedy="wait for it to end, or --out another path",
        ) from fault
