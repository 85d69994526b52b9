"""What to ask Slurm for, from the plan: cores, memory, time, and how many slices of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tightfit.core.units import GIB
from tightfit.planning.plan import Plan

MEMORY_FACTOR = 1.2
MEMORY_SPARE_BYTES = 2 * GIB
"""Both on top of the estimate: the batch system kills what exceeds the request, at once."""
TIME_FACTOR = 1.25
"""On top of the slow end of the prediction: evaluations, checkpoints, a busy file system."""
START_SECONDS = 900.0
"""Imports, reading the model, compiling, writing the result."""
STEP_SECONDS = 300.0
"""Time limits are rounded up to this."""
CORES_PER_GPU = 4
"""Where Slurm does not tell how many a node has."""
MIN_REQUEUES = 10
MAX_WARN_FRACTION = 0.25
"""Of the time limit: a warning before a short limit must leave time to train in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Per node, save for the time."""

    cores: int
    memory_bytes: int | None
    """None where Slurm accounts for no memory."""
    seconds: float | None
    """The time limit to ask for. None: the partition's own."""
    predicted_seconds: float | None
    """The whole run with its margins; None where its length is not known."""
    num_slices: int
    """Starts that it takes to get through, where each ends at the time limit."""
    max_requeues: int
    warn_seconds: int


def find_resources(
    plan: Plan, *, max_seconds: float | None, asked_seconds: float | None, warn: int
) -> Resources:
    """`max_seconds` is the partition's limit, `asked_seconds` the user's own."""
    predicted = _predict_seconds(plan)
    seconds = asked_seconds
    if seconds is None and predicted is not None:
        seconds = math.ceil(predicted / STEP_SECONDS) * STEP_SECONDS
    if seconds is None or (max_seconds is not None and seconds > max_seconds):
        seconds = max_seconds
    warned = warn if seconds is None else int(min(warn, max(seconds * MAX_WARN_FRACTION, 1)))
    slices = _count_slices(predicted, seconds, warned)
    return Resources(
        cores=_count_cores(plan),
        memory_bytes=_find_memory(plan),
        seconds=seconds,
        predicted_seconds=predicted,
        num_slices=slices,
        max_requeues=max(MIN_REQUEUES, 2 * slices),
        warn_seconds=warned,
    )


def _predict_seconds(plan: Plan) -> float | None:
    if not plan.num_steps:
        return None
    return plan.estimate.time.seconds_per_step_high * plan.num_steps * TIME_FACTOR + START_SECONDS


def _count_slices(predicted: float | None, seconds: float | None, warn: int) -> int:
    """Every slice starts anew and stops before its end."""
    if predicted is None or seconds is None or predicted <= seconds:
        return 1
    useful = max(seconds - warn - min(START_SECONDS, seconds / 2), 1.0)
    return math.ceil((predicted - START_SECONDS) / useful)


def _count_cores(plan: Plan) -> int:
    """The GPUs' share of the node's cores."""
    node, used = plan.hardware.node, plan.strategy.gpus_per_node
    if node.num_cores is None:
        return CORES_PER_GPU * used
    return max(1, node.num_cores * used // node.num_gpus)


def _find_memory(plan: Plan) -> int | None:
    """The estimate with its margin, in whole GiB, within what a node has."""
    node = plan.hardware.node
    if node.host_memory_bytes is None:
        return None
    peak = plan.estimate.host.peak_bytes
    if node.gpu.is_cpu:  # what would lie on a card lies in the same memory
        peak = max(peak, plan.estimate.gpu.peak_reserved_bytes * plan.strategy.gpus_per_node)
    wanted = math.ceil((peak * MEMORY_FACTOR + MEMORY_SPARE_BYTES) / GIB) * GIB
    return min(wanted, node.host_memory_bytes)
