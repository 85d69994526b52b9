"""The whole story of a search as data, for `--explain`: what was tried, and why it lost."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.estimate.result import Estimate, Phase
from tightfit.planning.plan import Exclusion, Plan
from tightfit.planning.ranking import count_levers, handicap_total, measure_seconds
from tightfit.planning.search import SearchResult

STAGES = {
    "load": "load",
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "recompute": "backward",
    "backward_end": "backward",
    "optimizer": "optimizer",
    "eval": "eval",
    "save": "save",
    "merge": "merge",
}
"""Moments of the estimate by the stage people know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One plan against the best one."""

    place: int
    summary: str
    group: str
    slowdown: float
    """Its time over the best plan's; below 1 a faster plan stands behind for other reasons."""
    handicap: float
    """What its method and levers were held back by; see `ranking.py`."""
    num_levers: int
    headroom_bytes: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What `--explain` shows."""

    num_considered: int
    num_illegal: int
    num_too_big: int
    standings: tuple[Standing, ...]
    by_rule: tuple[Exclusion, ...]
    by_memory: tuple[Exclusion, ...]
    failure: str | None


def explain(result: SearchResult) -> Explanation:
    """Turn a search's result inside out. Touches nothing and estimates nothing again."""
    by_memory = tuple(found for found in result.excluded if is_memory(found))
    by_rule = tuple(found for found in result.excluded if not is_memory(found))
    best = measure_seconds(result.plans[0].estimate) if result.plans else 0.0
    return Explanation(
        num_considered=result.num_considered,
        num_illegal=sum(found.num_strategies for found in by_rule),
        num_too_big=sum(found.num_strategies for found in by_memory),
        standings=tuple(
            _stand(place, plan, best) for place, plan in enumerate(result.plans, start=1)
        ),
        by_rule=by_rule,
        by_memory=by_memory,
        failure=result.failure,
    )


def is_memory(exclusion: Exclusion) -> bool:
    """Left out for want of memory, not because it could never work."""
    return exclusion.rule in ("memory", "host-memory", "ran-out-before")


def list_stages(estimate: Estimate) -> dict[str, int]:
    """Peak bytes per GPU by stage of the job, in the order they happen."""
    return {
        stage: phase.peak_reserved_bytes
        for stage, phase in fullest_phases(estimate).items()
        if stage in STAGES.values()
    }


def fullest_phases(estimate: Estimate) -> dict[str, Phase]:
    """The fullest moment of each stage; a moment that belongs to none is a stage of its own."""
    fullest: dict[str, Phase] = {}
    for phase in estimate.phases:
        stage = STAGES.get(phase.name, phase.name)
        held = fullest.get(stage)
        if held is None or phase.peak_reserved_bytes > held.peak_reserved_bytes:
            fullest[stage] = phase
    return fullest


def _stand(place: int, plan: Plan, best_seconds: float) -> Standing:
    gpu = plan.estimate.gpu
    return Standing(
        place=place,
        summary=plan.summary,
        group=plan.hardware.group,
        slowdown=measure_seconds(plan.estimate) / best_seconds if best_seconds else 1.0,
        handicap=handicap_total(plan.strategy),
        num_levers=count_levers(plan.strategy),
        headroom_bytes=gpu.capacity_bytes - gpu.peak_reserved_bytes,
        why=plan.why,
    )
