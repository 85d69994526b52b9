"""`tightfit farm`: Answer the prompts of a file on many machines, once each."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tightfit.api.farm import FarmPreview, FarmResult, FarmWatcher, preview_farm, run_farm
from tightfit.api.options.serving import FarmOptions, FarmOutput
from tightfit.cli.generate import StopRequestedError, render_gb, show_result, signals_caught
from tightfit.cli.terminal.output import announce, show_json, write_err
from tightfit.cli.terminal.screen import Cell, heading, make_table, plain, show
from tightfit.core.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from tightfit.core.text import count_of, disarm, sanitize
from tightfit.core.units import render_seconds, render_usd
from tightfit.farming.bounds import Bounds
from tightfit.farming.estimate import EstimateBasis, FarmEstimate
from tightfit.farming.folder import FarmFile
from tightfit.farming.statistics import FarmProgress, FarmStatistics, NodeStatistics

PIPED_COLUMNS = 200
"""Room for all columns beside each other, with names of nodes that are 40 letters long."""


def farm(options: FarmOptions, output: FarmOutput) -> None:
    """Answer the prompts of a file on many machines, or with --dry-run show where."""
    screen = _FarmScreen(as_json=output.as_json)
    if output.dry_run:
        preview = preview_farm(options)
        if output.as_json:
            show_json(_describe_preview(preview))
        else:
            show(_render_estimate(preview))
        return
    try:
        with signals_caught():
            result = run_farm(options, screen)
    except StopRequestedError:
        raise typer.Exit(EXIT_REQUEUE) from None
    if result.was_finished:
        _report_finished(result, options.stats, as_json=output.as_json)
        return
    written = (result.out, result.failures_path, options.stats)
    for path in filter(None, written):
        announce(path)
    assert result.estimate is not None
    expected = _describe_expected(result.estimate)
    show_result(
        result.out,
        result.statistics,
        result.error,
        _render_statistics,
        output.as_json,
        piped_columns=PIPED_COLUMNS,
        estimate=expected,
    )


def _report_finished(result: FarmResult, stats: Path | None, *, as_json: bool) -> None:
    out = sanitize(str(result.out))
    write_err(f"{out} is finished already; --fresh makes the answers again\n")
    document: dict[str, Any] = {"finished": True, "out": str(result.out)}
    if stats is not None and result.statistics is not None:
        announce(stats)
        document |= result.statistics.model_dump(mode="json")
    if as_json:
        show_json(document)


def _describe_preview(preview: FarmPreview) -> dict[str, Any]:
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
        **_describe_expected(estimate),
        "out": str(preview.out),
    }


def _describe_expected(estimate: FarmEstimate) -> dict[str, Any]:
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


def _render_estimate(preview: FarmPreview) -> Iterator[RenderableType]:
    estimate = preview.estimate
    answers = count_of(preview.job.num_answers, "answer")
    if not estimate.num_answers:
        yield heading(f"Nothing is left to do: {answers} given already")
        return
    if estimate.num_answers != preview.job.num_answers:
        answers = f"The other {estimate.num_answers:,} of {answers}"
    num_workers = sum(group.num_workers for group in preview.groups)
    yield heading(f"{answers} by {count_of(num_workers, 'worker')}")
    rows = []
    for kind in estimate.types:
        rate, rent = kind.new_tokens_per_second, kind.usd_per_hour
        rows.append(
            [
                kind.group,
                kind.name,
                f"{kind.num_workers:,}",
                "-" if rate is None else render_range(rate, _rate),
                kind.basis.value,
                "-" if rent is None else render_usd(rent),
            ]
        )
    columns = ["partition", "device", ">workers", ">new tokens/s", "basis", ">rent an hour"]
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


def _render_statistics(statistics: FarmStatistics) -> Iterator[RenderableType]:
    start = ""
    if statistics.start_seconds is not None:
        start = f", after {render_seconds(statistics.start_seconds)} until a model was loaded"
    answers = count_of(statistics.num_answers, "answer")
    yield heading(f"{answers} in {render_seconds(statistics.seconds)}{start}")
    yield plain(
        f"{statistics.num_prompt_tokens:,} prompt and {statistics.num_new_tokens:,} new tokens; "
        f"{statistics.new_tokens_per_second:,.1f} new and "
        f"{statistics.total_tokens_per_second:,.1f} in all a second, "
        f"{statistics.answers_per_second:,.2f} answers a second"
    )
    size = count_of(statistics.prompts_per_chunk, "prompt")
    again = ", ".join(f"{count:,} {why}" for why, count in statistics.released.items())
    yield plain(
        f"{count_of(statistics.num_chunks, 'chunk')} of {size}; "
        f"{f'leased again: {again}' if again else 'none leased again'}; "
        f"done twice and discarded: {statistics.num_discarded:,}"
    )
    yield ""
    columns = [
        "partition",
        "node",
        ">workers",
        ">answers",
        ">share",
        ">new tokens",
        ">a second",
        ">busy",
        ">idle",
        ">taken over",
        ">doubled",
        ">memory/s",
        "bottleneck",
    ]
    rows = [_node_row(node) for node in statistics.nodes]
    yield make_table(columns, rows, piped_columns=PIPED_COLUMNS)
    most = max(statistics.nodes, key=lambda node: node.num_answers, default=None)
    if most is not None and most.sentence is not None:
        yield ""
        yield heading(f"{most.node}: {most.sentence}")


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
        _bandwidth(node),
        node.bottleneck or "-",
    ]


def _bandwidth(node: NodeStatistics) -> str:
    """Estimated, and of what a copy reaches there."""
    if node.bytes_per_second is None:
        return "-"
    share = node.bandwidth_fraction
    return render_gb(node.bytes_per_second) + ("" if share is None else f" ({share:.0%})")


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


LINE_SECONDS = 60.0
"""Between lines of progress where stderr is no terminal."""
MIN_CHUNKS = 3


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


class _FarmScreen(FarmWatcher):
    """The estimate on stdout, progress on stderr, and a question on Ctrl-C."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._live: Live | None = None
        self._is_stopped: bool | None = None
        self._cancel_commands: tuple[str, ...] = ()

    def estimated(self, preview: FarmPreview) -> None:
        if not self._as_json:
            show(_render_estimate(preview))

    @contextlib.contextmanager
    def watching(self, preview: FarmPreview) -> Iterator[Callable[[FarmProgress], None]]:
        """A table on stderr where it is a terminal, a line a minute elsewhere.

        Once as many chunks have come as there are workers, both report how they change the
        estimate.
        """
        estimate = preview.estimate
        num_before: int | None = None
        is_revised = False
        line_due_s = time.monotonic() + LINE_SECONDS

        def update(progress: FarmProgress) -> None:
            nonlocal num_before, is_revised, line_due_s
            num_before = progress.num_done if num_before is None else num_before
            num_new = progress.num_done - num_before
            is_due = not progress.is_finished and num_new >= max(MIN_CHUNKS, progress.num_alive)
            if is_due and not is_revised:
                is_revised = True
                text = revise(progress, estimate, num_chunks=num_new)
                if text is not None:
                    write(text)
            if self._live is not None:
                self._live.update(_render_progress(progress, estimate))
            elif time.monotonic() >= line_due_s and not progress.is_finished:
                line_due_s += LINE_SECONDS
                write(summarize(progress))

        def write(text: str) -> None:
            if self._live is not None:
                self._live.console.print(disarm(text), markup=False, highlight=False)
            else:
                write_err(f"{text}\n")

        # stdout is for the result alone: Ray's threads print there what happens to its workers.
        with contextlib.redirect_stdout(sys.stderr):
            if not sys.stderr.isatty():
                yield update
                return
            console = Console(stderr=True)
            with Live(console=console, transient=True, refresh_per_second=2) as self._live:
                yield update

    def message(self, text: str) -> None:
        write_err(f"{sanitize(text)}\n")

    def stops_workers(self) -> bool:
        """On Ctrl-C yes where nobody can be asked, and on a second one. On SIGTERM no: a login
        node that is restarted, or a session that ends, is no reason to lose a place in the queue.
        """
        if self._live is not None:
            self._live.stop()
        if isinstance(sys.exc_info()[1], StopRequestedError):
            self._is_stopped = False
            return False
        self._is_stopped = True
        if not self._as_json and sys.stdin is not None and sys.stdin.isatty():
            with contextlib.suppress(KeyboardInterrupt, typer.Abort):
                self._is_stopped = typer.confirm("\nEnd the workers too?", default=True, err=True)
        return self._is_stopped

    def left_running(self, cancel_commands: tuple[str, ...]) -> None:
        self._cancel_commands = cancel_commands

    def interrupted(self, file: FarmFile, num_kept: int) -> None:
        if self._is_stopped:
            write_err("\nstopped: what was answered is kept; the same command goes on\n")
        elif self._is_stopped is False:
            end = "; ".join(self._cancel_commands) or "Ctrl-C in the same command"
            write_err(
                "\nthe workers go on, or stay in the queue; the same command watches them again\n"
                f"  to end them: {sanitize(end)}\n"
            )
        if self._as_json:
            show_json(
                {
                    "status": "interrupted",
                    "finished": False,
                    "out": file.out,
                    "num_answers": file.num_answers,
                    "num_kept_answers": num_kept,
                    "remedy": "the same command goes on",
                    "cancel": list(self._cancel_commands),
                    "exit_code": EXIT_REQUEUE
                    if isinstance(sys.exc_info()[1], StopRequestedError)
                    else EXIT_INTERRUPTED,
                }
            )
