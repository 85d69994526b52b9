"""What to ask Slurm for, from the plan: cores, memory, time, and how many slices of it."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.launch.margins import (
    count_restarts,
    count_slices,
    estimate_memory_request,
    estimate_run_seconds,
    round_limit,
)
from tightfit.planning.plan import Plan

CORES_PER_GPU = 4
"""Where Slurm does not tell how many a node has."""
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
    predicted = estimate_run_seconds(plan)
    seconds = asked_seconds
    if seconds is None and predicted is not None:
        seconds = round_limit(predicted)
    if seconds is None or (max_seconds is not None and seconds > max_seconds):
        seconds = max_seconds
    warned = warn if seconds is None else int(min(warn, max(seconds * MAX_WARN_FRACTION, 1)))
    slices = count_slices(predicted, limit=seconds, warn_seconds=warned)
    return Resources(
        cores=_count_cores(plan),
        memory_bytes=_find_memory(plan),
        seconds=seconds,
        predicted_seconds=predicted,
        num_slices=slices,
        max_requeues=count_restarts(slices),
        warn_seconds=warned,
    )


def _count_cores(plan: Plan) -> int:
    """The GPUs' share of the node's cores."""
    node, used = plan.hardware.node, plan.strategy.gpus_per_node
    if node.num_cores is None:
        return CORES_PER_GPU * used
    return max(1, node.num_cores * used // node.num_gpus)


def _find_memory(plan: Plan) -> int | None:
    most = plan.hardware.node.host_memory_bytes
    return None if most is None else estimate_memory_request(plan, most_bytes=most)
