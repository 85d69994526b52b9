"""`tightfit plan --buy`: what to rent for the job, by price per run and per month."""

from __future__ import annotations

from typing import Any

from tightfit.cli.charts.memory import Chart, Panel, make_panel, write_chart
from tightfit.cli.describe import describe_how, describe_levers, shorten_gpu
from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.job import Job
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce
from tightfit.core.files import write_atomic
from tightfit.core.units import render_usd
from tightfit.planning.buying import Offer, buying_guide

NUM_DRAWN = 4
"""Offers in the chart; more than that and the bars are too thin to read."""


def buy(flags: PlanFlags, job: Job) -> None:
    """Print the offers, cheapest first; save and draw the best of them."""
    request = job.request
    offers = buying_guide(request)
    if flags.as_json:
        _write_files(flags, offers)  # first: should one fail, JSON stays one document
        show_json({"offers": [_describe(offer) for offer in offers]})
    else:
        from tightfit.cli.render.buy import show_offers

        show_offers(offers, request, num_shown=flags.top, unused=job.on)
        _write_files(flags, offers)


def _write_files(flags: PlanFlags, offers: list[Offer]) -> None:
    if flags.save is not None:
        write_atomic(flags.save, offers[0].plan.model_dump_json(indent=2) + "\n")
        announce(flags.save)
    if flags.chart is not None:
        write_chart(_draw(offers, most=min(flags.top, NUM_DRAWN)), flags.chart)


def _describe(offer: Offer) -> dict[str, Any]:
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


def _draw(offers: list[Offer], *, most: int) -> Chart:
    drawn = offers[:most]
    is_cut = len(drawn) < len(offers)
    return Chart(
        title=f"{offers[0].plan.model.name}: GPU memory by stage, cheapest first",
        subtitle=f"the cheapest {len(drawn)} of {len(offers)} offers" if is_cut else "",
        panels=tuple(_panel(offer) for offer in drawn),
    )


def _panel(offer: Offer) -> Panel:
    strategy = offer.plan.strategy
    rent = f"{offer.num_gpus} x {shorten_gpu(offer.gpu.name)}, {render_usd(offer.usd_per_hour)}/h"
    how = f"{describe_how(strategy)}, {describe_levers(strategy)}"
    return make_panel(rent, offer.plan.estimate, subtitle=how)
