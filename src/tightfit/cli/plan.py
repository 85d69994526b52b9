"""`tightfit plan`: the best ways to run a job on given hardware, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.cli.describe import describe_how, describe_levers
from tightfit.cli.faults import report_fault
from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.hardware_choice import choose_cluster
from tightfit.cli.job import Job, read_job
from tightfit.cli.missing import warn_of_missing
from tightfit.cli.network import state_network
from tightfit.cli.repeat import repeat_plan
from tightfit.cli.require import TRACING, has_packages
from tightfit.cli.saved_plan import read_saved_plans, refuse_new_wishes
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce
from tightfit.cli.way_out import VainSearch, find_way_out
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.files import check_writable, write_atomic
from tightfit.hardware.types import Cluster
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult, search

if TYPE_CHECKING:
    from tightfit.cli.charts.memory import Chart
    from tightfit.estimate.trace.result import TracedMemory
    from tightfit.planning.by_group import GroupBest

NUM_DRAWN = 3
"""Plans in the chart."""


def plan(flags: PlanFlags) -> None:
    """Search, then show, save and draw."""
    if flags.chart is not None:
        from tightfit.cli.charts.memory import check_chart_path

        check_chart_path(flags.chart)
    if flags.save is not None:
        check_writable(flags.save)
    saved = read_saved_plans(flags.job)
    if saved is not None:
        refuse_new_wishes(flags, saved.plans[0])
        _tell(flags, saved, cluster=None)
        return
    if flags.buy:
        _refuse_unused(flags)
    job = read_job(flags)
    if flags.buy:
        from tightfit.cli.buy import buy

        buy(flags, job)
        return
    cluster = choose_cluster(job.on, command=repeat_plan(flags))
    cluster = state_network(cluster, flags.network)
    result = search(job.request, cluster, num_plans=flags.top)
    if not result.plans:
        _refuse(flags, job, VainSearch(result=result, request=job.request, cluster=cluster))
    result, traces = _trace(warn_of_missing(result), asked=flags.trace)
    _tell(flags, result, cluster=cluster, traces=traces)


def _trace(
    result: SearchResult, *, asked: bool | None
) -> tuple[SearchResult, Sequence[TracedMemory | None]]:
    """Plans traced where that is possible; where it is not, nothing of it is loaded."""
    if asked is None and not has_packages(*TRACING):
        return result, ()
    from tightfit.cli.traced_plans import trace_search

    traced = trace_search(result, asked=asked)
    return traced.result, traced.traces


def _tell(
    flags: PlanFlags,
    result: SearchResult,
    *,
    cluster: Cluster | None,
    traces: Sequence[TracedMemory | None] = (),
) -> None:
    """A person sees the answer even if a file cannot be written; JSON stays one document."""
    if flags.as_json:
        _write_files(flags, result, traces)
        show_json(describe_result(result))
    else:
        from tightfit.cli.render.plan import show_plans

        show_plans(result, cluster=cluster, is_explained=flags.explain)
        _write_files(flags, result, traces)


def _write_files(
    flags: PlanFlags, result: SearchResult, traces: Sequence[TracedMemory | None]
) -> None:
    if flags.save is not None:
        save_plan(result.plans[0], flags.save)
    if flags.chart is None:
        return
    from tightfit.cli.charts.memory import write_chart
    from tightfit.cli.traced_plans import draw_traces

    drawn = [pair for pair in zip(result.plans, traces, strict=False) if pair[1] is not None]
    if drawn:
        draw_traces(drawn[:NUM_DRAWN], flags.chart)
    else:
        write_chart(_draw(result.plans), flags.chart)


def describe_result(result: SearchResult) -> dict[str, Any]:
    """The JSON of a search."""
    return {
        "plans": [found.model_dump(mode="json") for found in result.plans],
        "excluded": [exclusion.model_dump(mode="json") for exclusion in result.excluded],
        "considered": result.num_considered,
        "groups": [_describe_group(best) for best in result.by_group],
    }


def _describe_group(best: GroupBest) -> dict[str, Any]:
    """One of several groups: what is free of it, and its best plan."""
    group = best.group
    return {
        "name": group.name,
        "num_nodes": group.num_nodes,
        "num_free_nodes": group.num_free_nodes,
        "num_free_gpus": group.num_free_gpus,
        "max_seconds": group.max_seconds,
        "can_start_now": best.can_start_now,
        "exceeds_limit": best.exceeds_limit,
        "plan": None if best.plan is None else best.plan.model_dump(mode="json"),
    }


def save_plan(best: Plan, path: Path) -> None:
    """The same JSON as `plans[0]`, whole or not at all."""
    write_atomic(path, best.model_dump_json(indent=2) + "\n")
    announce(path)


def _refuse(flags: PlanFlags, job: Job, vain: VainSearch) -> None:
    """Nothing fits: say what is short; the search's reasons still go into the JSON."""
    result = vain.result
    remedy = find_way_out(vain, flags, job.recipe, is_explained=flags.explain)
    fault = DoesNotFitError(result.failure or "Nothing fits.", remedy=remedy)
    if flags.as_json:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json({**describe_result(result), **told})
    elif flags.explain:
        from tightfit.cli.render.plan import show_exclusions

        show_exclusions(result)
    raise typer.Exit(report_fault(fault, as_json=False))


def _refuse_unused(flags: PlanFlags) -> None:
    """`--buy` looks at every card with a price; what it would not use is refused."""
    given = {"--on": flags.on, "--network": flags.network, "--explain": flags.explain or None}
    option = next((name for name, value in given.items() if value is not None), None)
    if option is None:
        return
    why = {
        "--on": "--buy tries every card with a price; --on would be ignored.",
        "--network": "--buy rents single nodes; --network would be ignored.",
        "--explain": "--buy lists offers and keeps no reasons; --explain would be ignored.",
    }
    raise UsageError(why[option], remedy=f"{repeat_plan(flags)} --buy    (without {option})")


def _draw(plans: Sequence[Plan]) -> Chart:
    from tightfit.cli.charts.memory import Chart, make_panel

    drawn = plans[:NUM_DRAWN]
    is_cut = len(drawn) < len(plans)
    return Chart(
        title=f"{plans[0].model.name}: GPU memory by stage",
        subtitle=f"the first {len(drawn)} of {len(plans)} plans" if is_cut else "",
        panels=tuple(
            make_panel(
                f"{number}. {describe_how(found.strategy, found.hardware.node.gpu.name)}",
                found.estimate,
                subtitle=describe_levers(found.strategy),
            )
            for number, found in enumerate(drawn, start=1)
        ),
    )
