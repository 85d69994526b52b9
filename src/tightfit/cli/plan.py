"""`tightfit plan`: the best ways to run a job on given hardware; with `--buy`, what to rent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.cli.charts.memory import Chart, Panel, make_panel, write_chart
from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import PlanFlags
from tightfit.cli.missing import warn_of_missing
from tightfit.cli.network import state_network
from tightfit.cli.terminal.output import announce, show_json
from tightfit.cli.training.command_line import repeat_plan
from tightfit.cli.training.hardware import choose_cluster
from tightfit.cli.training.no_plan import NoPlanError, suggest_fix
from tightfit.cli.training.request import (
    PlanJob,
    read_plan_job,
    read_saved_plans,
    refuse_new_options,
)
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.packages import TRACING, has_packages
from tightfit.core.units import render_usd
from tightfit.hardware.types import Cluster
from tightfit.planning.buying import Offer, buying_guide
from tightfit.planning.describe import describe_how, describe_levers, shorten_gpu
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult, search

if TYPE_CHECKING:
    from tightfit.planning.search import GroupBest
    from tightfit.trace.result import TracedMemory


# `tightfit plan --buy`: what to rent for the job, by price per run and per month.

NUM_OFFERS_DRAWN = 4
"""Offers in the chart; more than that and the bars are too thin to read."""


def buy(flags: PlanFlags, job: PlanJob) -> None:
    """Print the offers, cheapest first; save and draw the best of them."""
    request = job.request
    offers = buying_guide(request)
    if flags.as_json:
        _write_offer_files(flags, offers)  # first: should one fail, JSON stays one document
        show_json({"offers": [_describe_offers(offer) for offer in offers]})
    else:
        from tightfit.cli.render.plan import show_offers

        show_offers(offers, request, num_shown=flags.top, unused=job.on)
        _write_offer_files(flags, offers)


def _write_offer_files(flags: PlanFlags, offers: list[Offer]) -> None:
    if flags.save is not None:
        write_atomic(flags.save, offers[0].plan.model_dump_json(indent=2) + "\n")
        announce(flags.save)
    if flags.chart is not None:
        write_chart(_draw_offers(offers, most=min(flags.top, NUM_OFFERS_DRAWN)), flags.chart)


def _describe_offers(offer: Offer) -> dict[str, Any]:
    return {
        "gpu": offer.gpu.name,
        "num_gpus": offer.num_gpus,
        "usd_per_hour": offer.usd_per_hour,
        "usd_per_run": offer.usd_per_run,
        "usd_per_million_tokens": offer.usd_per_million_tokens,
        "usd_per_month": offer.usd_per_month,
        "price_source": offer.price_source,
        "stages": offer.stages,
        "plan": offer.plan.model_dump(mode="json"),
    }


def _draw_offers(offers: list[Offer], *, most: int) -> Chart:
    drawn = offers[:most]
    is_cut = len(drawn) < len(offers)
    return Chart(
        title=f"{offers[0].plan.model.name}: GPU memory by stage, cheapest first",
        subtitle=f"the cheapest {len(drawn)} of {len(offers)} offers" if is_cut else "",
        panels=tuple(_offer_panel(offer) for offer in drawn),
    )


def _offer_panel(offer: Offer) -> Panel:
    strategy = offer.plan.strategy
    rent = f"{offer.num_gpus} x {shorten_gpu(offer.gpu.name)}, {render_usd(offer.usd_per_hour)}/h"
    how = f"{describe_how(strategy)}, {describe_levers(strategy)}"
    return make_panel(rent, offer.plan.estimate, subtitle=how)


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
        refuse_new_options(flags, saved.plans[0])
        _show_result(flags, saved, cluster=None)
        return
    if flags.buy:
        _refuse_unused(flags)
    job = read_plan_job(flags)
    if flags.buy:
        buy(flags, job)
        return
    cluster = choose_cluster(job.on, command=repeat_plan(flags))
    cluster = state_network(cluster, flags.network)
    result = search(job.request, cluster, num_plans=flags.top)
    if not result.plans:
        _refuse(flags, job, NoPlanError(result=result, request=job.request, cluster=cluster))
    result, traces = _trace(warn_of_missing(result), asked=flags.trace)
    _show_result(flags, result, cluster=cluster, traces=traces)


def _trace(
    result: SearchResult, *, asked: bool | None
) -> tuple[SearchResult, Sequence[TracedMemory | None]]:
    """Plans traced where that is possible; where it is not, nothing of it is loaded."""
    if asked is None and not has_packages(*TRACING):
        return result, ()
    from tightfit.cli.training.tracing import trace_search

    traced = trace_search(result, asked=asked)
    return traced.result, traced.traces


def _show_result(
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
    from tightfit.cli.training.tracing import draw_traces

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


def _refuse(flags: PlanFlags, job: PlanJob, vain: NoPlanError) -> None:
    """Nothing fits: say what is short; the search's reasons still go into the JSON."""
    result = vain.result
    remedy = suggest_fix(vain, flags, job.recipe, is_explained=flags.explain)
    fault = DoesNotFitError(result.failure or "Nothing fits.", remedy=remedy)
    if flags.as_json:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json({**describe_result(result), **told})
    elif flags.explain:
        from tightfit.cli.render.plan import show_exclusions

        show_exclusions(result)
    raise typer.Exit(report_error(fault, as_json=False))


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
