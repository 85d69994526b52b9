"""Whether the disk can hold what a run will write, before it starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.units import render_bytes
from tightfit.planning.plan import Plan

SAFETY_FRACTION = 0.05
"""On top of the estimate: metrics, log, TensorBoard, file system overhead."""


def estimate_run_bytes(plan: Plan) -> int:
    """Checkpoints and the tuned artefact; the base model is on disk already."""
    parts = plan.estimate.disk.components
    needed = sum(size for name, size in parts.items() if "base" not in name)
    return int(needed * (1 + SAFETY_FRACTION))


def check_space(folder: Path, plan: Plan) -> int:
    """Refuse a run that would fill the disk; returns the free bytes.

    What an earlier start of the same run has written is counted as there for the taking.
    """
    needed = estimate_run_bytes(plan)
    home = _nearest_existing(folder)
    free = shutil.disk_usage(home).free
    held = _measure_folder(folder)
    if free + held < needed:
        raise EnvironmentFaultError(
            f"The run will write {render_bytes(needed)} (checkpoints and the tuned model), but "
            f"{home} has {render_bytes(free)} free.",
            remedy="--output FOLDER on a larger disk, or `keep_checkpoints: 1` (or 0) in recipe",
        )
    if not os.access(home, os.W_OK):
        raise EnvironmentFaultError(
            f"Cannot write in {home}.", remedy="choose a folder that is writable: --output FOLDER"
        )
    return free


def _nearest_existing(folder: Path) -> Path:
    path = folder.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _measure_folder(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
