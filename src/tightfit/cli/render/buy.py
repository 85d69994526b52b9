"""Offers as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.describe import (
    describe_method,
    describe_precision,
    describe_sharding,
    shorten_gpu,
)
from tightfit.cli.terminal.notes import heading, render_notes
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.cli.terminal.table import Cell
from tightfit.core.units import GIB, render_count, render_seconds, render_usd
from tightfit.planning.buying import Offer
from tightfit.planning.request import JobRequest


def show_offers(
    offers: Sequence[Offer], request: JobRequest, *, num_shown: int, unused: str | None = None
) -> None:
    """`unused`: hardware that a recipe names, which buying does not look at."""
    show(_render(offers, request, num_shown=num_shown, unused=unused))


def _render(
    offers: Sequence[Offer], request: JobRequest, *, num_shown: int, unused: str | None
) -> Iterator[RenderableType]:
    spec = request.spec
    has_run = offers[0].usd_per_run is not None
    price = "$ per run" if has_run else "$ per million tokens"
    yield heading(
        f"What to rent for {spec.name} ({render_count(spec.num_params)} parameters), "
        f"{request.planned_seq_len:,} tokens a sequence, cheapest first by {price}"
    )
    yield ""
    columns = (
        Column(title="", right=True),
        Column(title="rent", keep=False),
        Column(title="GiB/GPU", right=True),
        Column(title="time" if has_run else "tokens/s", right=True),
        Column(title="$/run" if has_run else "$/M tokens", right=True),
        Column(title="$/hour", right=True),
        Column(title="$/month", right=True),
    )
    rows = [_row(place, offer) for place, offer in enumerate(offers[:num_shown], start=1)]
    yield make_table(columns, rows, is_spaced=True)
    notes = list(_list_notes(offers, num_shown=num_shown))
    if unused is not None:
        notes.append(f"the recipe's hardware ({unused}) is not used: --buy tries every priced card")
    yield from render_notes("Notes", notes)


def _list_notes(offers: Sequence[Offer], *, num_shown: int) -> Iterator[str]:
    if len(offers) > num_shown:
        yield f"{len(offers) - num_shown} more at a higher price: --top {len(offers)}"
    if offers[0].usd_per_run is None:
        yield "with --data FILE the price of the whole run is known"
    yield (
        "each card at its cheapest cloud's median on-demand price, without host, disk and traffic: "
        f"tightfit hardware {shorten_gpu(offers[0].gpu.name)!r} lists them"
    )


def _row(place: int, offer: Offer) -> tuple[Cell, ...]:
    estimate, strategy = offer.plan.estimate, offer.plan.strategy
    gpu, time = estimate.gpu, estimate.time
    words = (describe_method(strategy), describe_precision(strategy), describe_sharding(strategy))
    rent = Text(f"{offer.num_gpus} x {shorten_gpu(offer.gpu.name)}", style="bold")
    rent.append("\n" + ", ".join(words), style="not bold dim")
    run = offer.usd_per_run
    speed = f"{time.tokens_per_second:,.0f}"
    if time.seconds_per_epoch is not None:
        speed = render_seconds(time.seconds_per_epoch * offer.plan.num_epochs)
    return (
        str(place),
        rent,
        f"{gpu.peak_reserved_bytes / GIB:.1f}/{gpu.capacity_bytes / GIB:.1f}",
        speed,
        render_usd(run) if run is not None else f"${offer.usd_per_million_tokens:.2g}",
        render_usd(offer.usd_per_hour),
        render_usd(offer.usd_per_month),
    )
