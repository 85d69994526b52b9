"""What a plan for this machine needs that is not installed here, said before it is started."""

from __future__ import annotations

from dataclasses import replace

from tightfit.planning.plan import Plan
from tightfit.planning.requirements import RequiredPackage, list_missing_packages
from tightfit.planning.search import SearchResult


def find_missing(plan: Plan) -> tuple[RequiredPackage, ...]:
    """Nothing for a plan of another machine: what it has is not known."""
    if plan.hardware.source != "here":
        return ()
    from tightfit.hardware import environment

    return list_missing_packages(plan.strategy, environment.read_version)


def warn_of_missing(result: SearchResult) -> SearchResult:
    """Each plan with a warning for each package that it would be missing."""
    return replace(result, plans=tuple(_warn(plan) for plan in result.plans))


def _warn(plan: Plan) -> Plan:
    told = [
        f"needs {need.package}, which is not installed here: {need.command}"
        for need in find_missing(plan)
    ]
    return plan.model_copy(update={"warnings": (*plan.warnings, *told)})
