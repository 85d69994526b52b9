"""Judge one strategy: assume the host memory that was not stated, check the rules, estimate."""

from __future__ import annotations

from tightfit.core.data_profile import DataProfile
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.estimation.job import estimate_job
from tightfit.estimation.result import Estimate, Verdict
from tightfit.hardware.types import Node
from tightfit.models.spec import ModelSpec
from tightfit.planning.rules import Case, find_violations, find_warnings

# What the planner takes for granted where the hardware was given as mere words.

HOST_BYTES_PER_GPU_BYTE = 2
"""Host memory of an unstated node, by the memory of its GPUs together.

Rented nodes have 0.7x (g5.xlarge) to 4x (g5.48xlarge, p3.8xlarge); 2x is a2-highgpu-1g.
Without an assumption, offload would seem to fit any model on any card.
"""


def assume_host(node: Node) -> Node:
    """The node with its host memory filled in, where it was not stated."""
    if node.host_memory_bytes is not None:
        return node
    assumed = HOST_BYTES_PER_GPU_BYTE * node.num_gpus * node.gpu.memory_bytes
    return node.model_copy(update={"host_memory_bytes": assumed})


def describe_assumption(stated: Node, assumed: Node) -> tuple[str, ...]:
    """The sentence that says so, where something was assumed."""
    if stated.host_memory_bytes is not None or assumed.host_memory_bytes is None:
        return ()
    size = render_bytes(assumed.host_memory_bytes)
    return (f"host memory was not stated: {size} per node is assumed (twice the GPUs' memory)",)


def judge_strategy(
    *,
    spec: ModelSpec,
    strategy: Strategy,
    node: Node,
    num_nodes: int = 1,
    network_bytes_per_second: float | None = None,
    profile: DataProfile | None = None,
) -> Estimate:
    """The estimate of one strategy, `illegal` with its reasons where a rule forbids it.

    An illegal strategy keeps its memory figures: people want to see what they asked for.
    Warnings join the assumptions, in the same order as in `rules.py`.
    """
    assumed = assume_host(node)
    estimate = estimate_job(
        spec=spec,
        strategy=strategy,
        node=assumed,
        network_bytes_per_second=network_bytes_per_second,
        profile=profile,
    )
    case = Case(spec=spec, strategy=strategy, node=node, num_nodes=num_nodes)
    update: dict[str, object] = {}
    violations = find_violations(case)
    if violations:
        update["verdict"] = Verdict.ILLEGAL
        update["reason"] = "; ".join(violation.reason for violation in violations)
    warnings = tuple(warning.reason for warning in find_warnings(case))
    warnings = (*describe_assumption(node, assumed), *warnings)
    if warnings:
        update["assumptions"] = (*estimate.assumptions, *warnings)
    return estimate.model_copy(update=update) if update else estimate
