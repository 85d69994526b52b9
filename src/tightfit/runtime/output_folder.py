"""New output files and folders: written under a temporary name, then renamed or rejected."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import atomic_file, atomic_folder, partial_path
from tightfit.core.locks import take_lock
from tightfit.core.units import render_bytes

REJECTED = ".rejected"
SAFETY_FRACTION = 0.02


def check_target(target: Path, *, force: bool, sources: tuple[Path, ...] = ()) -> None:
    """Refuse to overwrite a folder without `force`, and never one that is read from."""
    resolved = target.resolve()
    for source in sources:
        if resolved in (source.resolve(), *source.resolve().parents):
            raise UsageError(
                f"{target} holds {source}, which is read for it.",
                remedy="--out another folder",
            )
    if not target.exists():
        return
    if not force:
        raise UsageError(
            f"{target} is there already.", remedy="--out another name, or --force to replace it"
        )
    is_model = target.is_dir() and (target / "config.json").is_file()
    is_empty = target.is_dir() and not any(target.iterdir())
    if not (is_model or is_empty) or (target / "plan.json").exists():
        raise UsageError(
            f"{target} is no model folder, so --force does not replace it.",
            remedy="--out another folder",
        )


def check_room(target: Path, num_bytes: int) -> None:
    """Raise if the disk has too little free space."""
    home = target.absolute()
    while not home.is_dir():
        home = home.parent
    free = shutil.disk_usage(home).free
    if free < num_bytes * (1 + SAFETY_FRACTION):
        raise SetupError(
            f"{target} will take {render_bytes(num_bytes)}; {home} has {render_bytes(free)} free.",
            remedy="--out a folder on a larger disk",
        )


def begin_folder(target: Path) -> Path:
    """Make the empty folder to fill; removes what an interrupted attempt left."""
    work = partial_path(target)
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    except OSError as error:
        raise SetupError(
            f"Cannot write {target}: {error.strerror or error}.",
            remedy="--out a folder that is writable",
        ) from error
    return work


def reject_folder(work: Path, target: Path) -> Path:
    """Keep a broken result for inspection, under a name that is not taken for a model."""
    rejected = target.with_name(target.name + REJECTED)
    shutil.rmtree(rejected, ignore_errors=True)
    work.rename(rejected)
    return rejected


def check_file_target(target: Path, *, force: bool) -> None:
    """Refuse to overwrite a file without `force`, and anything that is not GGUF."""
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
    """A path to write to: renamed to `target` on success, removed on an error."""
    partial = partial_path(target)
    with _report_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _claim(handle, target)
            with atomic_file(target):
                yield partial
        finally:
            os.close(handle)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill: renamed to `target` on success, removed on an error."""
    with _report_errors(target), atomic_folder(target) as work:
        yield work


@contextlib.contextmanager
def _report_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"Cannot write {str(target)!r}: {error.strerror or error}.",
            remedy="--out a path that is writable and has free space",
        ) from error


def _claim(handle: int, target: Path) -> None:
    """Allow one writer at a time; the lock ends with the process."""
    if not take_lock(handle):
        raise UsageError(
            f"Another command is writing {target} right now.",
            remedy="wait for it to end, or --out another path",
        )
