"""A farm as text: what is expected before it, and what each node did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.notes import heading, plain
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.cli.terminal.table import Cell
from tightfit.core.units import render_seconds, render_usd
from tightfit.farm.bounds import Bounds
from tightfit.farm.estimate import FarmEstimate
from tightfit.farm.measured import Basis
from tightfit.farm.places import Place
from tightfit.farm.statistics import FarmStatistics, NodeStatistics

if TYPE_CHECKING:
    from tightfit.serve.generate.job import GenerateJob


def describe_estimate(
    places: Sequence[Place], estimate: FarmEstimate, job: GenerateJob
) -> dict[str, Any]:
    return {
        "num_prompts": len(job.prompts),
        "num_answers": job.num_answers,
        "num_left": estimate.num_answers,
        "num_workers": sum(place.num_workers for place in places),
        "types": [
            {
                "partition": kind.place,
                "device": kind.name,
                "num_workers": kind.num_workers,
                "new_tokens_per_second": _as_json(kind.new_tokens_per_second),
                "start_seconds": _as_json(kind.start_seconds),
                "basis": kind.basis.value,
                "usd_per_hour": kind.usd_per_hour,
            }
            for kind in estimate.types
        ],
        **describe_expected(estimate),
    }


def describe_expected(estimate: FarmEstimate) -> dict[str, Any]:
    """The whole, without its parts."""
    return {
        "basis": estimate.basis.value,
        "new_tokens_per_second": _as_json(estimate.new_tokens_per_second),
        "start_seconds": _as_json(estimate.start_seconds),
        "predicted_seconds": _as_json(estimate.seconds),
        "predicted_usd": _as_json(estimate.usd),
    }


def _as_json(bounds: Bounds | None) -> dict[str, float] | None:
    return None if bounds is None else {"low": bounds.low, "high": bounds.high}


def render_range(bounds: Bounds | Mapping[str, float], render: Callable[[float], str]) -> str:
    """`2 min to 5 min`; once, where both read the same."""
    if isinstance(bounds, Bounds):
        bounds = {"low": bounds.low, "high": bounds.high}
    low, high = render(bounds["low"]), render(bounds["high"])
    return low if low == high else f"{low} to {high}"


def show_estimate(told: Mapping[str, Any]) -> None:
    show(_render_estimate(told))


def _render_estimate(told: Mapping[str, Any]) -> Iterator[RenderableType]:
    answers = count_of(told["num_answers"], "answer")
    if told["num_left"] != told["num_answers"]:
        answers = f"The other {told['num_left']:,} of {answers}"
    yield heading(f"{answers} by {count_of(told['num_workers'], 'worker')}")
    rows: list[list[Cell]] = [
        [
            kind["partition"],
            kind["device"],
            f"{kind['num_workers']:,}",
            _rate_range(kind["new_tokens_per_second"]),
            kind["basis"],
            "-" if kind["usd_per_hour"] is None else render_usd(kind["usd_per_hour"]),
        ]
        for kind in told["types"]
    ]
    columns = [
        Column(title="partition"),
        Column(title="device"),
        Column(title="workers", right=True),
        Column(title="new tokens/s", right=True),
        Column(title="basis"),
        Column(title="rent an hour", right=True),
    ]
    yield make_table(columns, rows)
    yield plain(_time_and_cost(told))


_BASES = {
    Basis.MEASURED: "measured: by earlier runs of this model on such devices",
    Basis.CALIBRATED: "predicted, from rates that `tightfit calibrate` measured here",
    Basis.PREDICTED: "predicted: this model has not been run on such devices yet",
    Basis.MIXED: "measured for some devices, predicted for the others",
}


def _time_and_cost(told: Mapping[str, Any]) -> str:
    seconds, usd = told["predicted_seconds"], told["predicted_usd"]
    if seconds is None:
        return "How long it takes is known after the first answers."
    cost = "" if usd is None else f", {render_range(usd, render_usd)} at the clouds' prices"
    start = render_range(told["start_seconds"], render_seconds)
    return (
        f"About {render_range(seconds, render_seconds)}{cost}, of which {start} until models are "
        "loaded, with every worker at work and every answer as long as it may be "
        f"({_BASES[Basis(told['basis'])]}). Waiting in a queue comes on top; the first chunks "
        "will tell more."
    )


def show_statistics(told: FarmStatistics) -> None:
    show(_render_statistics(told))


def _render_statistics(told: FarmStatistics) -> Iterator[RenderableType]:
    yield heading(f"{count_of(told.num_answers, 'answer')} in {render_seconds(told.seconds)}")
    yield plain(
        f"{told.num_prompt_tokens:,} prompt and {told.num_new_tokens:,} new tokens; "
        f"{told.new_tokens_per_second:,.1f} new and {told.total_tokens_per_second:,.1f} in all a "
        f"second, {told.answers_per_second:,.2f} answers a second"
    )
    yield plain(_releases(told))
    yield ""
    columns = [
        Column(title="partition"),
        Column(title="node"),
        Column(title="workers", right=True),
        Column(title="answers", right=True),
        Column(title="share", right=True),
        Column(title="new tokens", right=True),
        Column(title="a second", right=True),
        Column(title="busy", right=True),
        Column(title="idle", right=True),
        Column(title="taken over", right=True),
        Column(title="doubled", right=True),
    ]
    yield make_table(columns, [_node_row(node) for node in told.nodes])


def _releases(told: FarmStatistics) -> str:
    size = count_of(told.prompts_per_chunk, "prompt")
    parts = [f"{count_of(told.num_chunks, 'chunk')} of {size}"]
    again = ", ".join(f"{count:,} {why}" for why, count in told.released.items())
    parts.append(f"leased again: {again}" if again else "none leased again")
    parts.append(f"done twice and discarded: {told.num_discarded:,}")
    return "; ".join(parts)


def _node_row(node: NodeStatistics) -> list[Cell]:
    lost = f" ({node.num_lost_workers:,} lost)" if node.num_lost_workers else ""
    return [
        node.partition,
        node.node,
        f"{node.num_workers:,}{lost}",
        f"{node.num_answers:,}",
        f"{node.share:.0%}",
        f"{node.num_new_tokens:,}",
        _rate(node.new_tokens_per_second),
        render_seconds(node.busy_seconds),
        render_seconds(node.idle_seconds),
        f"{sum(node.taken_over.values()):,}",
        f"{node.num_discarded:,}",
    ]


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _rate_range(rate: Mapping[str, float] | None) -> str:
    return "-" if rate is None else render_range(rate, _rate)
