"""A farm while it runs: how far it is, and what its first chunks make of the estimate."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.describe import count_of
from tightfit.cli.render.farm import render_range
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.output import write_err
from tightfit.core.units import render_seconds, render_usd
from tightfit.farm.bounds import Bounds
from tightfit.farm.estimate import FarmEstimate
from tightfit.farm.progress import Progress

LINE_SECONDS = 60.0
"""Between lines of progress where nobody watches."""
LEAST_CHUNKS = 3


@contextlib.contextmanager
def watching(estimate: FarmEstimate) -> Iterator[Callable[[Progress], None]]:
    """A table on stderr where someone watches, a line a minute elsewhere.

    Both say once what the first chunks make of the estimate.
    """
    revision = _Revision(estimate)
    if not sys.stderr.isatty():
        lines = _Lines()

        def tell(progress: Progress) -> None:
            revision.show(progress, lambda text: write_err(f"{text}\n"))
            lines.show(progress)

        yield tell
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=2) as live:

        def draw(progress: Progress) -> None:
            revision.show(progress, live.console.print)
            live.update(_render_progress(progress, estimate))

        yield draw


class _Revision:
    """Once as many chunks have come as workers are there, they say more than any estimate."""

    def __init__(self, estimate: FarmEstimate) -> None:
        self._estimate = estimate
        self._num_before: int | None = None
        self._is_told = False

    def show(self, progress: Progress, tell: Callable[[str], None]) -> None:
        if self._num_before is None:
            self._num_before = progress.num_done
        num_new = progress.num_done - self._num_before
        if self._is_told or progress.is_finished or num_new < max(LEAST_CHUNKS, progress.num_alive):
            return
        self._is_told = True
        text = revise(progress, self._estimate, num_chunks=num_new)
        if text is not None:
            tell(text)


def revise(progress: Progress, estimate: FarmEstimate, *, num_chunks: int) -> str | None:
    """The estimate anew, from the chunks that this command saw done."""
    if progress.seconds_left is None:
        return None
    spent = progress.seconds
    whole = progress.seconds_left + Bounds(spent, spent)
    rent = estimate.usd_per_hour
    cost = "" if rent is None else f", {render_range(whole.scaled(rent / 3600), render_usd)}"
    before = (
        ""
        if estimate.seconds is None
        else f" instead of {render_range(estimate.seconds, render_seconds)}"
    )
    return (
        f"measured by the first {count_of(num_chunks, 'chunk')}: "
        f"{render_range(whole, render_seconds)} in all{before}{cost}"
    )


class _Lines:
    def __init__(self) -> None:
        self._due_s = time.monotonic() + LINE_SECONDS

    def show(self, progress: Progress) -> None:
        if time.monotonic() >= self._due_s and not progress.is_finished:
            self._due_s += LINE_SECONDS
            write_err(f"{summarize(progress)}\n")


def summarize(progress: Progress, estimate: FarmEstimate | None = None) -> str:
    """One line."""
    left = ""
    if progress.seconds_left is not None:
        left = f", {render_range(progress.seconds_left, render_seconds)} left (measured)"
    elif estimate is not None and estimate.seconds is not None:
        expected = render_range(estimate.seconds, render_seconds)
        left = f", {expected} in all ({estimate.basis.value})"
    return (
        f"{progress.num_done:,} of {progress.num_chunks:,} chunks, "
        f"{progress.new_tokens_per_second:,.0f} new tokens/s by "
        f"{count_of(progress.num_alive, 'worker')}{left}"
    )


def _render_progress(progress: Progress, estimate: FarmEstimate) -> RenderableType:
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
    return Group(table, bar, Text(summarize(progress, estimate)))
