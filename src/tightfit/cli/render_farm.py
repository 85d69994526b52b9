"""A farm as text: what is expected before it, how far it is, what each node did."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.describe import count_of
from tightfit.cli.harmless import harmless
from tightfit.cli.notes import heading, plain
from tightfit.cli.output import write_err
from tightfit.cli.screen import Column, make_table, show
from tightfit.cli.table import Cell
from tightfit.core.units import render_seconds, render_usd
from tightfit.farm.estimate import FarmEstimate
from tightfit.farm.places import Place
from tightfit.farm.progress import Progress
from tightfit.farm.statistics import FarmStatistics, NodeStatistics

if TYPE_CHECKING:
    from tightfit.serve.generate.job import GenerateJob

LINE_SECONDS = 60.0
"""Between lines of progress where nobody watches."""


def describe_estimate(
    places: Sequence[Place], estimate: FarmEstimate, job: GenerateJob
) -> dict[str, Any]:
    return {
        "num_prompts": len(job.prompts),
        "num_answers": job.num_answers,
        "num_workers": sum(place.num_workers for place in places),
        "types": [
            {
                "partition": kind.place,
                "device": kind.name,
                "num_workers": kind.num_workers,
                "new_tokens_per_second": kind.new_tokens_per_second,
                "usd_per_hour": kind.usd_per_hour,
            }
            for kind in estimate.types
        ],
        "new_tokens_per_second": estimate.new_tokens_per_second,
        "predicted_seconds": estimate.seconds,
        "predicted_usd": estimate.usd,
    }


def show_estimate(told: Mapping[str, Any]) -> None:
    show(_render_estimate(told))


def _render_estimate(told: Mapping[str, Any]) -> Iterator[RenderableType]:
    answers = count_of(told["num_answers"], "answer")
    yield heading(f"{answers} by {count_of(told['num_workers'], 'worker')}")
    rows: list[list[Cell]] = [
        [
            kind["partition"],
            kind["device"],
            f"{kind['num_workers']:,}",
            _rate(kind["new_tokens_per_second"]),
            "-" if kind["usd_per_hour"] is None else render_usd(kind["usd_per_hour"]),
        ]
        for kind in told["types"]
    ]
    columns = [
        Column(title="partition"),
        Column(title="device"),
        Column(title="workers", right=True),
        Column(title="new tokens/s", right=True),
        Column(title="rent an hour", right=True),
    ]
    yield make_table(columns, rows)
    yield plain(_time_and_cost(told))


def _time_and_cost(told: Mapping[str, Any]) -> str:
    seconds, usd = told["predicted_seconds"], told["predicted_usd"]
    if seconds is None:
        return "How long it takes is known after the first answers."
    cost = "" if usd is None else f", {render_usd(usd)} at the clouds' prices"
    said = "Under a minute" if seconds < 60 else f"About {render_seconds(seconds)}"
    return (
        f"{said} of answering{cost}, with every worker at work and every answer as long as it may "
        "be, by prediction alone; waiting in the queue and loading come on top."
    )


@contextlib.contextmanager
def watching() -> Iterator[Callable[[Progress], None]]:
    """A table on stderr where someone watches, a line a minute elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=2) as live:
        yield lambda progress: live.update(_render_progress(progress))


class _Lines:
    def __init__(self) -> None:
        self._due_s = time.monotonic() + LINE_SECONDS

    def show(self, progress: Progress) -> None:
        if time.monotonic() >= self._due_s and not progress.is_finished:
            self._due_s += LINE_SECONDS
            write_err(f"{summarize(progress)}\n")


def summarize(progress: Progress) -> str:
    """One line."""
    left = (
        "" if progress.seconds_left is None else f", {render_seconds(progress.seconds_left)} left"
    )
    return (
        f"{progress.num_done:,} of {progress.num_chunks:,} chunks, "
        f"{progress.new_tokens_per_second:,.0f} new tokens/s by "
        f"{count_of(progress.num_alive, 'worker')}{left}"
    )


def _render_progress(progress: Progress) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("partition", "node", "workers", "answers", "leases", "new tokens/s"):
        table.add_column(title, justify="left" if title in ("partition", "node") else "right")
    for node in progress.nodes:
        table.add_row(
            harmless(node.partition),
            harmless(node.node),
            f"{node.num_workers:,}",
            f"{node.num_answers:,}",
            f"{node.num_leases:,}",
            f"{node.new_tokens_per_second:,.0f}",
        )
    bar = ProgressBar(total=progress.num_chunks, completed=progress.num_done, width=60)
    return Group(table, bar, Text(summarize(progress)))


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
