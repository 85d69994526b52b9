"""The run as it goes: a live panel on a terminal, plain lines elsewhere, silence for JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.output import write_err
from tightfit.cli.training.progress import Progress, render_eval, render_memory, render_step
from tightfit.core.units import render_seconds
from tightfit.ledger.metrics import EvalRecord, EventRecord, Record, StepRecord

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

NUM_FIRST_LINES = 5
LINE_SECONDS = 10.0
"""A log file of a night stays readable."""
ASK_SECONDS = 1.0
"""How often the number of steps is looked up until it is known."""


class Display(Protocol):
    """What `launch.local.Watch` asks for."""

    def record(self, record: Record) -> None: ...
    def line(self, line: str) -> None: ...
    def say(self, text: str) -> None: ...
    def tick(self) -> None: ...


class SilentDisplay:
    """For `--json`."""

    def record(self, record: Record) -> None:
        pass

    def line(self, line: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass


class PlainDisplay:
    """Lines on stderr: the first few steps, then at most one in ten seconds; every evaluation."""

    def __init__(
        self,
        progress: Progress,
        *,
        write: Callable[[str], None] = write_err,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._write = write
        self._clock = clock
        self._num_lines = 0
        self._told_at = -LINE_SECONDS

    def record(self, record: Record) -> None:
        self._progress.add(record)
        if isinstance(record, EvalRecord):
            self.say(render_eval(record))
        elif isinstance(record, EventRecord):
            self.say(f"step {record.step:,}: {record.text}")
        elif isinstance(record, StepRecord) and self._is_due(record):
            self._num_lines += 1
            self._told_at = self._clock()
            self.say(render_step(record, self._progress))

    def _is_due(self, record: StepRecord) -> bool:
        is_last = 0 < self._progress.num_steps == record.step
        is_early = self._num_lines < NUM_FIRST_LINES
        return is_early or is_last or self._clock() - self._told_at >= LINE_SECONDS

    def line(self, line: str) -> None:
        """The workers' own lines are in the log."""

    def say(self, text: str) -> None:
        self._write(f"{harmless(text)}\n")

    def tick(self) -> None:
        pass


class LiveDisplay:
    """A bar and the numbers of the last step, redrawn in place on stderr."""

    def __init__(self, progress: Progress, live: Live) -> None:
        self._progress = progress
        self._live = live
        self._news = "starting"
        self._started = time.monotonic()

    def record(self, record: Record) -> None:
        self._progress.add(record)
        if isinstance(record, EvalRecord):
            self.say(render_eval(record))
        elif isinstance(record, EventRecord):
            self.say(f"step {record.step:,}: {record.text}")

    def line(self, line: str) -> None:
        if line.strip():
            self._news = line.strip()

    def say(self, text: str) -> None:
        self._live.console.print(harmless(text), markup=False, highlight=False)

    def tick(self) -> None:
        self._live.update(render_live(self._progress, self._news))


def render_live(progress: Progress, news: str) -> RenderableType:
    """Two or three lines; all numbers are those of records."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    step = progress.last.step if progress.last else 0
    total = f"{progress.num_steps:,}" if progress.num_steps else "?"
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    left = progress.seconds_left
    grid.add_row(
        f"step {step:,}/{total}",
        ProgressBar(total=1.0, completed=progress.done_fraction),
        "" if left is None else f"{render_seconds(left)} left",
    )
    if progress.last is None:
        return Group(grid, Text(harmless(news), style="dim", overflow="ellipsis", no_wrap=True))
    return Group(grid, Text("  ".join(list_numbers(progress)), overflow="fold"))


def list_numbers(progress: Progress) -> list[str]:
    """The second line, part by part."""
    last = progress.last
    if last is None or progress.loss is None:
        return []
    parts = [
        f"loss {progress.loss:.4f}",
        f"lr {last.learning_rate:.2e}",
        f"{last.tokens_per_second:,.0f} tok/s",
    ]
    if last.mfu_fraction is not None:
        parts.append(f"{last.mfu_fraction:.0%} MFU")
    parts.append(f"peak {render_memory(progress.peak_bytes, progress.capacity_bytes)}")
    parts.append(f"data wait {progress.wait_fraction or 0.0:.0%}")
    if progress.evaluation is not None:
        parts.append(f"eval {progress.evaluation.loss:.4f} (step {progress.evaluation.step:,})")
    return parts


class CountingDisplay:
    """Another display that learns the number of steps as soon as the worker has counted them."""

    def __init__(self, inner: Display, progress: Progress, read: Callable[[], int]) -> None:
        self._inner = inner
        self._progress = progress
        self._read = read
        self._asked_at = 0.0

    def record(self, record: Record) -> None:
        self._ask()
        self._inner.record(record)

    def line(self, line: str) -> None:
        self._inner.line(line)

    def say(self, text: str) -> None:
        self._inner.say(text)

    def tick(self) -> None:
        if time.monotonic() - self._asked_at >= ASK_SECONDS:
            self._ask()
        self._inner.tick()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        told = self._read()
        if told:
            self._progress.num_steps = told


@contextmanager
def open_display(
    progress: Progress, *, read_num_steps: Callable[[], int], is_silent: bool
) -> Iterator[Display]:
    """The display that suits where stderr goes."""
    if is_silent:
        yield SilentDisplay()
        return
    if sys.stderr is None or not sys.stderr.isatty():
        yield CountingDisplay(PlainDisplay(progress), progress, read_num_steps)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, emoji=False)
    if console.is_dumb_terminal:  # where a live panel shows nothing at all
        yield CountingDisplay(PlainDisplay(progress), progress, read_num_steps)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield CountingDisplay(LiveDisplay(progress, live), progress, read_num_steps)
