"""`plan`: the best ways to run a job on given hardware; `buy`: the hardware to rent for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import PlanOptions
from tightfit.api.training.hardware import choose_cluster, state_network
from tightfit.api.training.recipe import (
    read_plan_job,
    read_saved_plans,
    refuse_new_options,
    saved_plan_error,
)
from tightfit.api.training.search import search_plans
from tightfit.api.training.settings import repeat_plan
from tightfit.core.packages import TRACING, has_packages
from tightfit.hardware.types import Cluster
from tightfit.planning.buying import Offer, buying_guide
from tightfit.planning.plan import Exclusion, Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.requirements import RequiredPackage, list_missing_packages
from tightfit.planning.search import SearchResult

if TYPE_CHECKING:
    from tightfit.trace.result import TracedMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Plans, best first, and what was excluded."""

    search: SearchResult
    cluster: Cluster | None
    """None: the plans were read from a file."""
    traces: tuple[TracedMemory | None, ...] = ()
    """Of the first plans, where they were traced."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        return self.search.plans

    @property
    def best(self) -> Plan:
        return self.search.plans[0]

    @property
    def excluded(self) -> tuple[Exclusion, ...]:
        return tuple(self.search.excluded)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuyResult:
    """Offers, cheapest first."""

    offers: list[Offer]
    request: JobRequest
    on: str | None
    """Hardware that the recipe names, which is not looked at."""


@accepts_keywords(PlanOptions)
def plan(options: PlanOptions) -> PlanResult:
    """Search the plans of a job, or read those of a saved file. Raises NoPlanError."""
    saved = read_saved_plans(options.job)
    if saved is not None:
        refuse_new_options(options, saved.plans[0])
        return PlanResult(search=saved, cluster=None)
    job = read_plan_job(options)
    cluster = choose_cluster(job.on, command=repeat_plan(options))
    cluster = state_network(cluster, options.network)
    result = search_plans(job, cluster, options, num_plans=options.top)
    result = warn_of_missing_packages(result)
    if options.trace is None and not has_packages(*TRACING):
        return PlanResult(search=result, cluster=cluster)
    # Loaded only where a trace is possible: `plan` answers in about a second without it.
    from tightfit.api.training.tracing import trace_search

    traced = trace_search(result, asked=options.trace, progress=options.progress)
    return PlanResult(search=traced.result, cluster=cluster, traces=tuple(traced.traces))


@accepts_keywords(PlanOptions)
def buy(options: PlanOptions) -> BuyResult:
    """The hardware with a known price that does the job, by price per run."""
    saved = read_saved_plans(options.job)
    if saved is not None:
        raise saved_plan_error(options.job, saved.plans[0], "--buy")
    job = read_plan_job(options)
    return BuyResult(offers=buying_guide(job.request), request=job.request, on=job.on)


def find_missing_packages(plan: Plan) -> tuple[RequiredPackage, ...]:
    """Packages that the plan needs and this machine lacks; none for a plan of another machine."""
    if plan.hardware.source != "here":
        return ()
    from tightfit.hardware import environment

    return list_missing_packages(plan.strategy, environment.read_version)


def warn_of_missing_packages(result: SearchResult) -> SearchResult:
    """Each plan with a warning for each package that it lacks here."""

    def warn(plan: Plan) -> Plan:
        warnings = [
            f"needs {need.package}, which is not installed here: {need.command}"
            for need in find_missing_packages(plan)
        ]
        return plan.model_copy(update={"warnings": (*plan.warnings, *warnings)})

    return replace(result, plans=tuple(warn(plan) for plan in result.plans))
