"""New output files and folders: written under a temporary name, then renamed or rejected."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import (
    atomic_file,
    atomic_folder,
    describe_write_error,
    nearest_folder,
    partial_path,
    take_lock,
)
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
    is_model = target.is_dir() and (target / "config.json").is_file()
    is_empty = target.is_dir() and not any(target.iterdir())
    is_ours = (is_model or is_empty) and not (target / "plan.json").exists()
    _check_replaced(target, "model folder", "--out another folder", force=force, is_ours=is_ours)


def check_file_target(target: Path, *, force: bool) -> None:
    """Refuse to overwrite a file without `force`, and anything that is not GGUF."""
    is_ours = target.is_file() and target.suffix.lower() == ".gguf"
    remedy = "--out another name that ends in .gguf"
    _check_replaced(target, "GGUF file", remedy, force=force, is_ours=is_ours)


def _check_replaced(target: Path, kind: str, remedy: str, *, force: bool, is_ours: bool) -> None:
    if target.exists() and not force:
        raise UsageError(
            f"{target} is there already.", remedy="--out another name, or --force to replace it"
        )
    if target.exists() and not is_ours:
        raise UsageError(f"{target} is no {kind}, so --force does not replace it.", remedy=remedy)


def check_room(
    target: Path, num_bytes: int, *, remedy: str = "--out a folder on a larger disk"
) -> None:
    """Raise if the disk has too little free space."""
    home = nearest_folder(target)
    free = shutil.disk_usage(home).free
    if free < num_bytes * (1 + SAFETY_FRACTION):
        raise SetupError(
            f"{target} will take {render_bytes(num_bytes)}; {home} has {render_bytes(free)} free.",
            remedy=remedy,
        )


def check_resources(what: str, target: Path, disk_bytes: int, host_bytes: int) -> None:
    """Raise if disk or memory will not do; `host_bytes` is the process's peak."""
    check_room(target, disk_bytes)
    needed = host_bytes - psutil.Process().memory_info().rss
    free = psutil.virtual_memory().available
    if needed > free:
        raise SetupError(
            f"The {what} needs {render_bytes(needed)} more memory; {render_bytes(free)} is free.",
            remedy="end other programs, or use a machine with more memory",
        )


def measure_bytes(path: Path) -> int:
    """Of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def begin_folder(target: Path) -> Path:
    """Make the empty folder to fill; removes what an interrupted attempt left."""
    work = partial_path(target)
    with _report_errors(target):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    return work


def reject(result: Path, target: Path) -> Path:
    """Keep a broken result for inspection, under a name that is not taken for a model."""
    rejected = target.with_name(target.name + REJECTED)
    if rejected.is_dir():
        shutil.rmtree(rejected)
    return result.replace(rejected)


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write to: renamed to `target` on success, removed on an error."""
    partial = partial_path(target)
    with _report_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not take_lock(handle):  # ends with the process
                raise UsageError(
                    f"Another command is writing {target} right now.",
                    remedy="wait for it to end, or --out another path",
                )
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
            f"Cannot write {str(target)!r}: {describe_write_error(error, target)}.",
            remedy="--out a path that is writable and has free space",
        ) from error
