"""A new model folder: filled under another name, then given its own, or kept as rejected."""

from __future__ import annotations

import shutil
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError, UsageError
from tightfit.core.files import sync
from tightfit.core.units import render_bytes

PARTIAL = ".partial"
REJECTED = ".rejected"
_OLD = ".old"
SAFETY_FRACTION = 0.02


def check_target(target: Path, *, force: bool, sources: tuple[Path, ...] = ()) -> None:
    """Refuse to write over something that is there, unless told; never over what is read."""
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
    """Refuse what would fill the disk."""
    home = target.absolute()
    while not home.is_dir():
        home = home.parent
    free = shutil.disk_usage(home).free
    if free < num_bytes * (1 + SAFETY_FRACTION):
        raise EnvironmentFaultError(
            f"{target} will take {render_bytes(num_bytes)}; {home} has {render_bytes(free)} free.",
            remedy="--out a folder on a larger disk",
        )


def begin_folder(target: Path) -> Path:
    """The empty folder to fill; what an interrupted start has left there goes."""
    work = target.with_name(target.name + PARTIAL)
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot write {target}: {fault.strerror or fault}.",
            remedy="--out a folder that is writable",
        ) from fault
    return work


def finish_folder(work: Path, target: Path) -> None:
    """Everything on the disk for good, then the name. An old folder there goes last."""
    _settle(work)
    old = target.with_name(target.name + _OLD)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    work.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def reject_folder(work: Path, target: Path) -> Path:
    """Keep a broken result for whoever wants to see it, under a name nobody takes for a model."""
    rejected = target.with_name(target.name + REJECTED)
    shutil.rmtree(rejected, ignore_errors=True)
    work.rename(rejected)
    return rejected


def _settle(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(0o644)
        sync(path)
    sync(folder)
