"""The plans of a search, traced: what fits by formula alone leaves, the rest is put in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tightfit.cli.describe import count_of
from tightfit.cli.tracing import NUM_TRACED, VARIABLE, choose_tracer
from tightfit.core.errors import DoesNotFitError
from tightfit.estimate.trace.result import TracedMemory
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult
from tightfit.planning.traced import TRACED, TracedSearch, trace_plans


def trace_search(result: SearchResult, *, asked: bool | None) -> TracedSearch:
    """The search with its first plans traced, or as it was where formulas must do."""
    first = result.plans[0]
    tracer = choose_tracer(first.model, first.hardware.node, asked=asked, profile=first.data)
    if tracer is None:
        return TracedSearch(result=result, traces=(), lost=(), notes=())
    found = trace_plans(result, tracer.trace, num_traced=NUM_TRACED)
    if not found.result.plans:
        lost = found.lost[0]
        raise DoesNotFitError(
            f"Nothing fits: {lost.summary} {lost.estimate.reason}.",
            remedy=f"{VARIABLE}=0 goes by the formulas alone",
        )
    best = found.result.plans[0]
    told = best.estimate.model_copy(
        update={"assumptions": (*best.estimate.assumptions, *_describe(found))}
    )
    plans = (best.model_copy(update={"estimate": told}), *found.result.plans[1:])
    return replace(found, result=replace(found.result, plans=plans))


def draw_traces(pairs: Sequence[tuple[Plan, TracedMemory | None]], path: Path) -> None:
    """Memory over the step of each traced plan."""
    from tightfit.cli.charts.trace import make_strategy_panel, write_trace_panels

    panels = tuple(
        make_strategy_panel(
            plan.strategy, plan.hardware.node.gpu, plan.estimate, traced, number=number
        )
        for number, (plan, traced) in enumerate(pairs, start=1)
        if traced is not None
    )
    write_trace_panels(pairs[0][0].model.name, panels, path)


def _describe(found: TracedSearch) -> tuple[str, ...]:
    num_traced = sum(traced is not None for traced in found.traces)
    num_timed = sum(plan.estimate.time.tier == TRACED for plan in found.result.plans)
    said = []
    if num_traced:
        what = "memory and time" if num_timed == num_traced else "memory"
        said.append(f"{what} of {count_of(num_traced, 'plan')} traced, of the others by formula")
    if num_timed < num_traced:
        count = f"{num_timed} of them" if num_timed else "none"
        said.append(f"time is traced for {count}: not all operations were understood")
    for plan in found.lost:
        said.append(f"left out after tracing: {plan.summary}")
    return (*said, *found.notes)
