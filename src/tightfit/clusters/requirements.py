"""What a run needs beside the GPUs: host memory, time and disk space, with safety margins.

Slurm and Kubernetes kill a job that takes more memory than it requested. A job that takes more
time saves, stops and comes back.
"""

from __future__ import annotations

import math
import os
import shutil
from contextlib import suppress
from pathlib import Path

from tightfit.core.errors import SetupError
from tightfit.core.files import nearest_folder
from tightfit.core.units import GIB, render_bytes
from tightfit.planning.plan import Plan

MEMORY_FACTOR = 1.2
MEMORY_SPARE_BYTES = 2 * GIB
"""Both on top of the predicted peak: what exceeds the request is killed at once."""
TIME_FACTOR = 1.25
"""On top of the slow end of the prediction: evaluations, checkpoints, a busy file system."""
START_SECONDS = 900.0
"""Imports, reading the model, compiling, writing the result."""
ROUND_SECONDS = 300.0
"""Time limits are rounded up to this."""
MIN_RESTARTS = 10
"""Granted to any job, however short: neighbours are preempted, nodes fail."""


def estimate_memory_request(plan: Plan, *, most_bytes: int | None) -> int:
    """Host memory per node with its margin, in whole GiB; never below the prediction itself.

    `most_bytes` is what a node can give. None: unknown.
    """
    needed = plan.estimate.host.peak_bytes
    if plan.hardware.node.gpu.is_cpu:  # what would lie on a card lies in the same memory
        needed = max(needed, plan.estimate.gpu.peak_reserved_bytes * plan.strategy.gpus_per_node)
    wanted = math.ceil((needed * MEMORY_FACTOR + MEMORY_SPARE_BYTES) / GIB) * GIB
    return wanted if most_bytes is None else max(min(wanted, most_bytes), needed)


def estimate_run_seconds(plan: Plan) -> float | None:
    """The whole run with its margins; None where its length is not known."""
    if not plan.num_steps:
        return None
    time = plan.estimate.time
    stretched = time.seconds_per_step_high / max(time.seconds_per_step, 1e-12)
    before = stretched * time.reference_seconds
    return (time.seconds_per_step_high * plan.num_steps + before) * TIME_FACTOR + START_SECONDS


def round_limit(seconds: float) -> float:
    """A time limit that people can read."""
    return math.ceil(seconds / ROUND_SECONDS) * ROUND_SECONDS


def count_slices(run_seconds: float | None, *, limit: float | None, warn_seconds: int = 0) -> int:
    """Starts that it takes to get through where each may last `limit` seconds.

    Every slice starts anew, and stops `warn_seconds` before its end.
    """
    if run_seconds is None or limit is None or run_seconds <= limit:
        return 1
    useful = max(limit - warn_seconds - min(START_SECONDS, limit / 2), 1.0)
    return math.ceil((run_seconds - START_SECONDS) / useful)


def count_restarts(num_slices: int) -> int:
    """How often a job may come back: what goes on for longer makes no progress."""
    return max(MIN_RESTARTS, 2 * num_slices)


# Whether the disk can hold what a run will write, before it starts.

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
    home = nearest_folder(folder)
    free = shutil.disk_usage(home).free
    written = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            written += path.stat().st_size if path.is_file() else 0
    if free + written < needed:
        raise SetupError(
            f"The run will write {render_bytes(needed)} (checkpoints and the tuned model), but "
            f"{home} has {render_bytes(free)} free.",
            remedy="--output FOLDER on a larger disk, or `keep_checkpoints: 1` (or 0) in recipe",
        )
    if not os.access(home, os.W_OK):
        raise SetupError(
            f"Cannot write in {home}.", remedy="choose a folder that is writable: --output FOLDER"
        )
    return free
