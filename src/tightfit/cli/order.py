"""Why a faster plan stands behind the first: the ranking's policy in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tightfit.cli.describe import describe_method
from tightfit.core.strategy import Offload, Optimizer, Strategy
from tightfit.estimate.result import Verdict
from tightfit.planning.plan import Plan
from tightfit.planning.ranking import METHOD_HANDICAPS, handicap_total, measure_seconds
from tightfit.planning.request import name_method

LEAST_FACTOR = 1.01
"""A closer race is decided by headroom and simplicity, which the table shows."""


def explain_order(plans: Sequence[Plan]) -> str | None:
    """`2 is 1.17x faster, but ...` for the fastest plan that is not first; None where it is."""
    best = plans[0]
    found = [
        (factor, place, plan)
        for place, plan in enumerate(plans[1:], start=2)
        if (factor := _compare(plan, best)) >= LEAST_FACTOR
    ]
    if not found:
        return None
    factor, place, plan = max(found, key=lambda item: item[0])
    return f"{place} is {factor:.2f}x faster, but {_reason(plan, best)}."


def explain_steps(plans: Sequence[Plan]) -> list[str]:
    """`3 is 1.06x faster than 2, but ...` for each plan behind the first that is faster than the
    one above it, and that `explain_order` has no word on."""
    told = []
    for place, (above, plan) in enumerate(pairwise(plans), start=2):
        factor = _compare(plan, above)
        if place == 2 or factor < LEAST_FACTOR or _compare(plan, plans[0]) >= LEAST_FACTOR:
            continue
        is_other = above.estimate.tier != plan.estimate.tier
        reason = "what is traced comes first" if is_other else _reason(plan, above)
        told.append(f"{place} is {factor:.2f}x faster than {place - 1}, but {reason}.")
    return told


def _compare(plan: Plan, other: Plan) -> float:
    """How many times as fast as the other."""
    seconds = measure_seconds(plan.estimate)
    return measure_seconds(other.estimate) / seconds if seconds > 0 else 0.0


def _reason(plan: Plan, best: Plan) -> str:
    is_tighter = plan.estimate.verdict is not best.estimate.verdict
    if is_tighter and plan.estimate.verdict is Verdict.TIGHT:
        return "it is tight: what fits with room comes first"
    if plan.effective_batch > best.effective_batch:
        return f"it takes {plan.effective_batch:,} sequences a step, more than were asked for"
    if handicap_total(plan.strategy) <= handicap_total(best.strategy):
        return "it leaves less room or needs more levers"
    return next(_prices(plan.strategy, best.strategy), "it asks for more than its speed is worth")


def _prices(strategy: Strategy, best: Strategy) -> Iterator[str]:
    """What the strategy costs that the best does not, dearest first; see ranking.py."""
    method = name_method(strategy)
    if METHOD_HANDICAPS.get(method, 1.0) > METHOD_HANDICAPS.get(name_method(best), 1.0):
        if method == "full":
            yield "full tuning makes a whole model per run: --method full plans it first"
        elif method == "qlora":
            yield "QLoRA costs quality: --method qlora plans it first"
        else:
            weights = strategy.weights.value
            yield (
                f"{describe_method(strategy)} over {weights} costs quality: "
                f"--set weights={weights} plans it first"
            )
    if strategy.offload is not Offload.NONE and best.offload is Offload.NONE:
        setting = f"--set offload={strategy.offload.value}"
        yield f"offload ties up host memory and the bus: {setting} plans it first"
    if strategy.compile and not best.compile:
        yield "compiling takes minutes before the first step: --set compile=true plans it first"
    is_exact = strategy.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_KERNEL)
    if strategy.optimizer is not best.optimizer and not is_exact:
        name = strategy.optimizer.value
        yield f"{name} costs some quality: --set optimizer={name} plans it first"
    if strategy.sharding is not best.sharding:
        name = strategy.sharding.value
        yield f"{name} is one more part that can fail: --set sharding={name} plans it first"
    if strategy.num_nodes > best.num_nodes:
        yield "it needs more nodes, which is one more part that can fail"
