"""`tightfit plan`: the best ways to run a job on given hardware; with `--buy`, what to rent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.api import plan as api
from tightfit.api.training.search import NoPlanError
from tightfit.api.training.settings import repeat_plan
from tightfit.cli.charts.memory import Chart, Panel, check_chart_path, make_panel, write_chart
from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import PlanFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json
from tightfit.core.errors import UsageError
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.units import render_usd
from tightfit.planning.buying import Offer
from tightfit.planning.describe import describe_how, describe_levers, shorten_gpu
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult

if TYPE_CHECKING:
    from tightfit.planning.search import GroupBest

NUM_DRAWN = 3
"""Plans in the chart."""
NUM_OFFERS_DRAWN = 4
"""Offers in the chart; with more, the bars are too thin to read."""


def plan(flags: PlanFlags) -> None:
    """Search, then show, save and draw."""
    if flags.chart is not None:
        check_chart_path(flags.chart)
    if flags.save is not None:
        check_writable(flags.save)
    if flags.buy:
        _buy(flags)
        return
    try:
        with progress_bar() as progress:
            found = api.plan(replace(flags, progress=progress))
    except NoPlanError as error:
        _report_no_plan(flags, error)
        return
    if flags.as_json:
        _write_files(flags, found)  # first: should one fail, JSON stays one document
        show_json(describe_result(found.search))
    else:
        from tightfit.cli.render.plan import show_plans

        show_plans(found.search, cluster=found.cluster, is_explained=flags.explain)
        _write_files(flags, found)


def _write_files(flags: PlanFlags, found: api.PlanResult) -> None:
    if flags.save is not None:
        save_plan(found.best, flags.save)
    if flags.chart is None:
        return
    pairs = zip(found.plans, found.traces, strict=False)
    traced = [(plan, trace) for plan, trace in pairs if trace is not None][:NUM_DRAWN]
    if not traced:
        write_chart(_draw(found.plans), flags.chart)
        return
    from tightfit.cli.charts.trace import make_strategy_panel, write_trace_panels

    panels = tuple(
        make_strategy_panel(
            plan.strategy, plan.hardware.node.gpu, plan.estimate, trace, number=number
        )
        for number, (plan, trace) in enumerate(traced, start=1)
    )
    write_trace_panels(found.best.model.name, panels, flags.chart)


def save_plan(best: Plan, path: Path) -> None:
    """The same JSON as `plans[0]`, whole or not at all."""
    write_atomic(path, best.model_dump_json(indent=2) + "\n")
    announce(path)


def _report_no_plan(flags: PlanFlags, error: NoPlanError) -> None:
    """Say what is short; the reasons of all exclusions still go into the JSON."""
    if flags.as_json:
        described = {"error": error.problem, "remedy": error.remedy, "exit_code": error.exit_code}
        show_json({**describe_result(error.result), **described})
    elif flags.explain:
        from tightfit.cli.render.plan import show_exclusions

        show_exclusions(error.result)
    raise typer.Exit(report_error(error, as_json=False))


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


def _draw(plans: Sequence[Plan]) -> Chart:
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


def _buy(flags: PlanFlags) -> None:
    """Print the offers, cheapest first; save and draw the best of them."""
    _refuse_unused(flags)
    with progress_bar() as progress:
        found = api.buy(replace(flags, progress=progress))
    if flags.as_json:
        _write_offer_files(flags, found.offers)  # first: should one fail, JSON stays one document
        show_json({"offers": [_describe_offer(offer) for offer in found.offers]})
    else:
        from tightfit.cli.render.plan import show_offers

        show_offers(found.offers, found.request, num_shown=flags.top, unused=found.on)
        _write_offer_files(flags, found.offers)


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


def _write_offer_files(flags: PlanFlags, offers: list[Offer]) -> None:
    if flags.save is not None:
        write_atomic(flags.save, offers[0].plan.model_dump_json(indent=2) + "\n")
        announce(flags.save)
    if flags.chart is not None:
        write_chart(_draw_offers(offers, most=min(flags.top, NUM_OFFERS_DRAWN)), flags.chart)


def _describe_offer(offer: Offer) -> dict[str, Any]:
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
