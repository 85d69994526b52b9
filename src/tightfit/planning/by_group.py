"""A cluster's groups beside each other: the best plan of each, and whether it can start now."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.core.units import render_seconds
from tightfit.estimate.result import Estimate
from tightfit.hardware.types import NodeGroup
from tightfit.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBest:
    """A group and the best that was found for it; None where nothing fits."""

    group: NodeGroup
    plan: Plan | None

    @property
    def can_start_now(self) -> bool | None:
        """Whether as much is free as the plan takes. None: not told, or no plan."""
        group, plan = self.group, self.plan
        if plan is None or group.num_free_nodes is None:
            return None
        wanted = plan.strategy
        if wanted.num_nodes == 1 and wanted.gpus_per_node < group.node.num_gpus:
            return (group.num_free_gpus or 0) >= wanted.gpus_per_node
        return group.num_free_nodes >= wanted.num_nodes

    @property
    def exceeds_limit(self) -> bool:
        """The run takes longer than the partition lets a job run."""
        limit, plan = self.group.max_seconds, self.plan
        seconds = None if plan is None else find_run_seconds(plan.estimate, plan.num_epochs)
        return bool(limit and seconds and seconds > limit)


def find_run_seconds(estimate: Estimate, num_epochs: float) -> float | None:
    """None where the run's length is not known (no dataset given)."""
    epoch = estimate.time.seconds_per_epoch
    return None if epoch is None else epoch * num_epochs


def warn_of_limit(group: NodeGroup, estimate: Estimate, num_epochs: float) -> tuple[str, ...]:
    """A run that its partition would cut off."""
    seconds, limit = find_run_seconds(estimate, num_epochs), group.max_seconds
    if seconds is None or not limit or seconds <= limit:
        return ()
    takes, allowed = render_seconds(seconds), render_seconds(limit)
    return (
        f"takes about {takes}, and {group.name} stops jobs after {allowed}: it has to be queued "
        "again and resume",
    )
