"""What a job asks for beyond its prediction, the same of Slurm and of Kubernetes.

Both end a job that takes more memory than it asked for, and both have it save, stop and come
back where it takes more time.
"""

from __future__ import annotations

import math

from tightfit.core.units import GIB
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

    `most_bytes` is what a node can give. None: nobody told.
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
    return plan.estimate.time.seconds_per_step_high * plan.num_steps * TIME_FACTOR + START_SECONDS


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
