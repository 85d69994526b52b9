"""One strategy judged: the rules first, then the numbers."""

from __future__ import annotations

from tightfit.core.strategy import Strategy
from tightfit.core.workload import DataProfile
from tightfit.estimate.job import estimate_job
from tightfit.estimate.result import Estimate, Verdict
from tightfit.hardware.types import Node
from tightfit.models.spec import ModelSpec
from tightfit.planning.assume import assume_host, describe_assumption
from tightfit.planning.case import Case
from tightfit.planning.rules import find_violations, find_warnings


def judge(
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
