"""A training run as it goes: a live panel on a terminal, plain lines elsewhere, nothing with
`--json`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from tightfit.cli.terminal.output import write_err
from tightfit.clusters.protocol import RunObserver, SilentObserver
from tightfit.core.text import sanitize
from tightfit.core.units import GIB, render_bytes, render_seconds
from tightfit.runs.metrics import EvalRecord, EventRecord, Record, StepRecord

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


SMOOTHING = 0.9
"""Share of the old value in the shown loss; about ten steps' memory."""
NUM_FIRST_LINES = 5
LINE_SECONDS = 10.0
"""Between lines of steps: a log file of a night stays readable."""
ASK_SECONDS = 1.0
"""How often the number of steps is looked up until it is known."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What the display shows; changed by records alone."""

    num_steps: int
    """0: not known yet."""
    capacity_bytes: int
    last: StepRecord | None = None
    loss: float | None = None
    """Smoothed."""
    seconds_per_step: float | None = None
    """Smoothed, for the time that is left."""
    wait_fraction: float | None = None
    evaluation: EvalRecord | None = None
    peak_bytes: int = 0

    def add(self, record: Record) -> None:
        if isinstance(record, EvalRecord):
            self.evaluation = record
        if not isinstance(record, StepRecord):
            return
        # The first step of a start warms up; it says little of the others.
        follows = self.last is not None and self.last.step + 1 == record.step
        self.loss = _blend(self.loss, record.loss)
        self.seconds_per_step = _blend(self.seconds_per_step if follows else None, record.seconds)
        self.wait_fraction = _blend(self.wait_fraction, wait_fraction(record))
        self.peak_bytes = max(self.peak_bytes, record.gpu_reserved_bytes)
        self.num_steps = max(self.num_steps, record.step)
        self.last = record

    @property
    def seconds_left(self) -> float | None:
        if self.last is None or self.seconds_per_step is None or not self.num_steps:
            return None
        return (self.num_steps - self.last.step) * self.seconds_per_step


def _blend(old: float | None, new: float) -> float:
    if old is None or not isfinite(old) or not isfinite(new):
        return new
    return SMOOTHING * old + (1 - SMOOTHING) * new


def wait_fraction(record: StepRecord) -> float:
    return record.data_wait_seconds / record.seconds if record.seconds > 0 else 0.0


def render_step(record: StepRecord, progress: Progress) -> str:
    """`step 40/120  loss 1.234  lr 1.8e-04  5,210 tok/s  31% MFU  18.2/24.0 GiB  left 12 min`."""
    total = f"/{progress.num_steps:,}" if progress.num_steps else ""
    parts = [
        f"step {record.step:,}{total}",
        f"loss {record.loss:.4f}",
        *([] if record.router_loss is None else [f"router loss {record.router_loss:.3f}"]),
        *_render_rewards(record),
        *_render_pace(record),
        render_memory(record.gpu_reserved_bytes, progress.capacity_bytes),
    ]
    if wait_fraction(record) >= 0.01:
        parts.append(f"data wait {wait_fraction(record):.0%}")
    if record.grad_norm is None:
        parts.append("step skipped (overflow)")
    if progress.seconds_left is not None:
        parts.append(f"left {render_seconds(progress.seconds_left)}")
    return "  ".join(parts)


def _render_pace(record: StepRecord) -> Iterator[str]:
    yield f"lr {record.learning_rate:.2e}"
    yield f"{record.tokens_per_second:,.0f} tok/s"
    if record.mfu_fraction is not None:
        yield f"{record.mfu_fraction:.0%} MFU"


def render_eval(record: EvalRecord) -> str:
    parts = [f"eval at step {record.step:,}", f"loss {record.loss:.4f}"]
    if record.perplexity is not None:
        parts.append(f"perplexity {record.perplexity:,.2f}")
    return "  ".join([*parts, *_render_rewards(record), render_seconds(record.seconds)])


def _render_rewards(record: StepRecord | EvalRecord) -> Iterator[str]:
    found = record.preference
    if found is None:
        return
    if found.reward_margin is not None:
        yield f"margin {found.reward_margin:+.3f}"
    if found.reward_accuracy is not None:
        yield f"accuracy {found.reward_accuracy:.0%}"
    if found.kl is not None:
        yield f"KL {found.kl:.3f}"


def render_memory(used_bytes: int, capacity_bytes: int) -> str:
    """`18.2/24.0 GiB`."""
    if capacity_bytes < GIB or used_bytes < 0.1 * GIB:
        return render_bytes(used_bytes)
    return f"{used_bytes / GIB:.1f}/{capacity_bytes / GIB:.1f} GiB"


class PlainDisplay:
    """Lines on stderr: the first few steps, then at most one in ten seconds; every evaluation."""

    def __init__(
        self,
        progress: Progress,
        read_num_steps: Callable[[], int] = lambda: 0,
        *,
        write: Callable[[str], None] = write_err,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = progress
        self._read_num_steps = read_num_steps
        self._write = write
        self._clock = clock
        self._num_lines = 0
        self._printed_at = -LINE_SECONDS
        self._asked_at = 0.0

    def record(self, record: Record) -> None:
        self._ask()
        self.progress.add(record)
        if isinstance(record, EvalRecord):
            self.say(render_eval(record))
        elif isinstance(record, EventRecord):
            self.say(f"step {record.step:,}: {record.text}")
        else:
            self.step(record)

    def step(self, record: StepRecord) -> None:
        is_last = 0 < self.progress.num_steps == record.step
        is_due = self._clock() - self._printed_at >= LINE_SECONDS
        if is_last or is_due or self._num_lines < NUM_FIRST_LINES:
            self._num_lines += 1
            self._printed_at = self._clock()
            self.say(render_step(record, self.progress))

    def line(self, line: str) -> None:
        """The workers' own lines are in the log."""

    def say(self, text: str) -> None:
        self._write(f"{sanitize(text)}\n")

    def tick(self) -> None:
        if self._clock() - self._asked_at >= ASK_SECONDS:
            self._ask()

    def _ask(self) -> None:
        """Learn the number of steps as soon as the worker has counted them."""
        self._asked_at = self._clock()
        self.progress.num_steps = self._read_num_steps() or self.progress.num_steps


class LiveDisplay(PlainDisplay):
    """A bar and the numbers of the last step, redrawn in place on stderr."""

    def __init__(
        self, progress: Progress, live: Live, read_num_steps: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__(progress, read_num_steps)
        self._live = live
        self._news = "starting"

    def step(self, record: StepRecord) -> None:
        """Shown by the next tick."""

    def line(self, line: str) -> None:
        self._news = line.strip() or self._news

    def say(self, text: str) -> None:
        self._live.console.print(sanitize(text), markup=False, highlight=False)

    def tick(self) -> None:
        super().tick()
        self._live.update(render_live(self.progress, self._news))


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
        ProgressBar(total=max(progress.num_steps, 1), completed=step),
        "" if left is None else f"{render_seconds(left)} left",
    )
    if progress.last is None:
        return Group(grid, Text(sanitize(news), style="dim", overflow="ellipsis", no_wrap=True))
    return Group(grid, Text("  ".join(list_numbers(progress)), overflow="fold"))


def list_numbers(progress: Progress) -> list[str]:
    """The second line, part by part."""
    if progress.last is None or progress.loss is None:
        return []
    parts = [
        f"loss {progress.loss:.4f}",
        *_render_pace(progress.last),
        f"peak {render_memory(progress.peak_bytes, progress.capacity_bytes)}",
        f"data wait {progress.wait_fraction or 0.0:.0%}",
    ]
    if progress.evaluation is not None:
        parts.append(f"eval {progress.evaluation.loss:.4f} (step {progress.evaluation.step:,})")
    return parts


@contextmanager
def open_display(
    capacity_bytes: int, read_num_steps: Callable[[], int], *, is_silent: bool
) -> Iterator[RunObserver]:
    """The display that suits where stderr goes."""
    if is_silent:
        yield SilentObserver()
        return
    progress = Progress(num_steps=read_num_steps(), capacity_bytes=capacity_bytes)
    if sys.stderr is None or not sys.stderr.isatty():
        yield PlainDisplay(progress, read_num_steps)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, emoji=False)
    if console.is_dumb_terminal:  # where a live panel shows nothing at all
        yield PlainDisplay(progress, read_num_steps)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield LiveDisplay(progress, live, read_num_steps)
