"""`tightfit farm`: answer the prompts of a file on many machines, once each."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tightfit.api.farm import FarmPreview, FarmResult, FarmWatcher, preview_farm, run_farm
from tightfit.cli.flags.serving import FarmFlags
from tightfit.cli.generate import show_result
from tightfit.cli.terminal.output import announce, show_json, write_err
from tightfit.cli.terminal.screen import Cell, Column, heading, make_table, plain, show
from tightfit.core.errors import EXIT_INTERRUPTED
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_seconds, render_usd
from tightfit.farming.estimate import Bounds, EstimateBasis, FarmEstimate
from tightfit.farming.folder import FarmFile
from tightfit.farming.progress import FarmProgress
from tightfit.farming.statistics import FarmStatistics, NodeStatistics


def describe_estimate(preview: FarmPreview) -> dict[str, Any]:
    job, estimate = preview.job, preview.estimate
    return {
        "num_prompts": len(job.prompts),
        "num_answers": job.num_answers,
        "num_left": estimate.num_answers,
        "num_workers": sum(group.num_workers for group in preview.groups),
        "types": [
            {
                "partition": kind.group,
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
        "out": str(preview.out),
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


def render_range(bounds: Bounds, render: Callable[[float], str]) -> str:
    """`2 min to 5 min`; once, where both read the same."""
    low, high = render(bounds.low), render(bounds.high)
    return low if low == high else f"{low} to {high}"


def show_estimate(preview: FarmPreview) -> None:
    show(_render_estimate(preview))


def _render_estimate(preview: FarmPreview) -> Iterator[RenderableType]:
    estimate = preview.estimate
    answers = count_of(preview.job.num_answers, "answer")
    if estimate.num_answers != preview.job.num_answers:
        answers = f"The other {estimate.num_answers:,} of {answers}"
    num_workers = sum(group.num_workers for group in preview.groups)
    yield heading(f"{answers} by {count_of(num_workers, 'worker')}")
    rows: list[list[Cell]] = [
        [
            kind.group,
            kind.name,
            f"{kind.num_workers:,}",
            "-"
            if kind.new_tokens_per_second is None
            else render_range(kind.new_tokens_per_second, _rate),
            kind.basis.value,
            "-" if kind.usd_per_hour is None else render_usd(kind.usd_per_hour),
        ]
        for kind in estimate.types
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
    yield plain(_time_and_cost(estimate))


_BASES = {
    EstimateBasis.MEASURED: "measured: by earlier runs of this model on such devices",
    EstimateBasis.CALIBRATED: "predicted, from rates that `tightfit calibrate` measured here",
    EstimateBasis.PREDICTED: "predicted: this model has not been run on such devices yet",
    EstimateBasis.MIXED: "measured for some devices, predicted for the others",
}


def _time_and_cost(estimate: FarmEstimate) -> str:
    if estimate.seconds is None or estimate.start_seconds is None:
        return "How long it takes is known after the first answers."
    usd = estimate.usd
    cost = "" if usd is None else f", {render_range(usd, render_usd)} at the clouds' prices"
    start = render_range(estimate.start_seconds, render_seconds)
    return (
        f"About {render_range(estimate.seconds, render_seconds)}{cost}, of which {start} until "
        "models are loaded, with every worker at work and every answer as long as it may be "
        f"({_BASES[estimate.basis]}). Waiting in a queue comes on top; the first chunks will tell "
        "more."
    )


def show_statistics(statistics: FarmStatistics) -> None:
    show(_render_statistics(statistics))


def _render_statistics(statistics: FarmStatistics) -> Iterator[RenderableType]:
    yield heading(
        f"{count_of(statistics.num_answers, 'answer')} in {render_seconds(statistics.seconds)}"
    )
    yield plain(
        f"{statistics.num_prompt_tokens:,} prompt and {statistics.num_new_tokens:,} new tokens; "
        f"{statistics.new_tokens_per_second:,.1f} new and "
        f"{statistics.total_tokens_per_second:,.1f} in all a second, "
        f"{statistics.answers_per_second:,.2f} answers a second"
    )
    yield plain(_releases(statistics))
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
    yield make_table(columns, [_node_row(node) for node in statistics.nodes])


def _releases(statistics: FarmStatistics) -> str:
    size = count_of(statistics.prompts_per_chunk, "prompt")
    parts = [f"{count_of(statistics.num_chunks, 'chunk')} of {size}"]
    again = ", ".join(f"{count:,} {why}" for why, count in statistics.released.items())
    parts.append(f"leased again: {again}" if again else "none leased again")
    parts.append(f"done twice and discarded: {statistics.num_discarded:,}")
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


LINE_SECONDS = 60.0
"""Between lines of progress where stderr is no terminal."""
MIN_CHUNKS = 3


class _Revision:
    """Once as many chunks have come as workers are there, they say more than any estimate."""

    def __init__(self, estimate: FarmEstimate) -> None:
        self._estimate = estimate
        self._num_before: int | None = None
        self._is_shown = False

    def show(self, progress: FarmProgress, write: Callable[[str], None]) -> None:
        if self._num_before is None:
            self._num_before = progress.num_done
        num_new = progress.num_done - self._num_before
        if self._is_shown or progress.is_finished or num_new < max(MIN_CHUNKS, progress.num_alive):
            return
        self._is_shown = True
        text = revise(progress, self._estimate, num_chunks=num_new)
        if text is not None:
            write(text)


def revise(progress: FarmProgress, estimate: FarmEstimate, *, num_chunks: int) -> str | None:
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

    def show(self, progress: FarmProgress) -> None:
        if time.monotonic() >= self._due_s and not progress.is_finished:
            self._due_s += LINE_SECONDS
            write_err(f"{summarize(progress)}\n")


def summarize(progress: FarmProgress, estimate: FarmEstimate | None = None) -> str:
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


def _render_progress(progress: FarmProgress, estimate: FarmEstimate) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("partition", "node", "workers", "answers", "leases", "new tokens/s"):
        table.add_column(title, justify="left" if title in ("partition", "node") else "right")
    for node in progress.nodes:
        table.add_row(
            sanitize(node.partition),
            sanitize(node.node),
            f"{node.num_workers:,}",
            f"{node.num_answers:,}",
            f"{node.num_leases:,}",
            f"{node.new_tokens_per_second:,.0f}",
        )
    bar = ProgressBar(total=progress.num_chunks, completed=progress.num_done, width=60)
    return Group(table, bar, Text(summarize(progress, estimate)))


def farm(flags: FarmFlags) -> None:
    """Answer the prompts of a file on many machines, or with --dry-run show where."""
    screen = _FarmScreen(as_json=flags.as_json)
    if flags.dry_run:
        preview = preview_farm(flags)
        if flags.as_json:
            show_json(describe_estimate(preview))
        else:
            show_estimate(preview)
        return
    result = run_farm(flags, screen)
    if result.was_finished:
        _report_finished(flags, result)
        return
    written = (result.out, result.failures_path, flags.stats)
    for path in filter(None, written):
        announce(path)
    assert result.estimate is not None
    expected = describe_expected(result.estimate)
    show_result(
        result.out,
        result.statistics,
        result.error,
        show_statistics,
        flags.as_json,
        estimate=expected,
    )


def _report_finished(flags: FarmFlags, result: FarmResult) -> None:
    out = sanitize(str(result.out))
    write_err(f"{out} is finished already; --fresh makes the answers again\n")
    document: dict[str, Any] = {"finished": True, "out": str(result.out)}
    if flags.stats is not None and result.statistics is not None:
        announce(flags.stats)
        document |= result.statistics.model_dump(mode="json")
    if flags.as_json:
        show_json(document)


class _FarmScreen(FarmWatcher):
    """The estimate on stdout, progress on stderr, and a question on Ctrl-C."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._live: Live | None = None
        self._is_stopped: bool | None = None

    def estimated(self, preview: FarmPreview) -> None:
        if not self._as_json:
            show_estimate(preview)

    @contextlib.contextmanager
    def watching(self, preview: FarmPreview) -> Iterator[Callable[[FarmProgress], None]]:
        """A table on stderr where it is a terminal, a line a minute elsewhere.

        Both report once how the first chunks change the estimate.
        """
        revision = _Revision(preview.estimate)
        # stdout is for the result alone: Ray's threads print there what happens to its workers.
        with contextlib.redirect_stdout(sys.stderr):
            if not sys.stderr.isatty():
                lines = _Lines()

                def write(progress: FarmProgress) -> None:
                    revision.show(progress, lambda text: write_err(f"{text}\n"))
                    lines.show(progress)

                yield write
                return
            console = Console(stderr=True)
            with Live(console=console, transient=True, refresh_per_second=2) as live:
                self._live = live

                def draw(progress: FarmProgress) -> None:
                    revision.show(progress, live.console.print)
                    live.update(_render_progress(progress, preview.estimate))

                yield draw

    def message(self, text: str) -> None:
        write_err(f"{sanitize(text)}\n")

    def stops_workers(self) -> bool:
        """Yes where nobody can be asked, and on a second Ctrl-C."""
        if self._live is not None:
            self._live.stop()
        self._is_stopped = True
        if not self._as_json and sys.stdin is not None and sys.stdin.isatty():
            with contextlib.suppress(KeyboardInterrupt, typer.Abort):
                self._is_stopped = typer.confirm("\nEnd the workers too?", default=True, err=True)
        return self._is_stopped

    def interrupted(self, file: FarmFile, num_kept: int) -> None:
        if self._is_stopped:
            write_err("\nstopped: what was answered is kept; the same command goes on\n")
        elif self._is_stopped is False:
            write_err("\nthe workers go on; the same command watches them again\n")
        if self._as_json:
            show_json(
                {
                    "status": "interrupted",
                    "finished": False,
                    "out": file.out,
                    "num_answers": file.num_answers,
                    "num_kept_answers": num_kept,
                    "remedy": "the same command goes on",
                    "exit_code": EXIT_INTERRUPTED,
                }
            )
