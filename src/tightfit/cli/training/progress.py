"""How far a run has come, gathered from its records; and one line that says so."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from tightfit.core.units import GIB, render_bytes, render_seconds
from tightfit.ledger.metrics import EvalRecord, Record, StepRecord

SMOOTHING = 0.9
"""Share of the old value in the shown loss; about ten steps' memory."""


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
        elif isinstance(record, StepRecord):
            self._add_step(record)

    def _add_step(self, record: StepRecord) -> None:
        wait = record.data_wait_seconds / record.seconds if record.seconds > 0 else 0.0
        # The first step of a start warms up; it says little of the others.
        is_first = self.last is None or record.step <= self.last.step
        pace = None if is_first else self.seconds_per_step
        if self.last is not None and self.last.step + 1 != record.step:
            pace = None
        self.loss = _blend(self.loss, record.loss)
        self.seconds_per_step = _blend(pace, record.seconds)
        self.wait_fraction = _blend(self.wait_fraction, wait)
        self.peak_bytes = max(self.peak_bytes, record.gpu_reserved_bytes)
        self.num_steps = max(self.num_steps, record.step)
        self.last = record

    @property
    def seconds_left(self) -> float | None:
        if self.last is None or self.seconds_per_step is None or not self.num_steps:
            return None
        return (self.num_steps - self.last.step) * self.seconds_per_step

    @property
    def done_fraction(self) -> float:
        if self.last is None or not self.num_steps:
            return 0.0
        return min(self.last.step / self.num_steps, 1.0)


def _blend(old: float | None, new: float) -> float:
    if old is None or not isfinite(old) or not isfinite(new):
        return new
    return SMOOTHING * old + (1 - SMOOTHING) * new


def render_step(record: StepRecord, progress: Progress) -> str:
    """`step 40/120  loss 1.234  lr 1.8e-04  5,210 tok/s  31% MFU  18.2/24.0 GiB  left 12 min`."""
    total = f"/{progress.num_steps:,}" if progress.num_steps else ""
    parts = [
        f"step {record.step:,}{total}",
        f"loss {record.loss:.4f}",
        f"lr {record.learning_rate:.2e}",
        f"{record.tokens_per_second:,.0f} tok/s",
    ]
    if record.mfu_fraction is not None:
        parts.append(f"{record.mfu_fraction:.0%} MFU")
    parts.append(render_memory(record.gpu_reserved_bytes, progress.capacity_bytes))
    wait = record.data_wait_seconds / record.seconds if record.seconds > 0 else 0.0
    if wait >= 0.01:
        parts.append(f"data wait {wait:.0%}")
    if record.grad_norm is None:
        parts.append("step skipped (overflow)")
    if progress.seconds_left is not None:
        parts.append(f"left {render_seconds(progress.seconds_left)}")
    return "  ".join(parts)


def render_eval(record: EvalRecord) -> str:
    return (
        f"eval at step {record.step:,}  loss {record.loss:.4f}  "
        f"perplexity {record.perplexity:,.2f}  {render_seconds(record.seconds)}"
    )


def render_memory(used_bytes: int, capacity_bytes: int) -> str:
    """`18.2/24.0 GiB`."""
    if capacity_bytes < GIB or used_bytes < 0.1 * GIB:
        return render_bytes(used_bytes)
    return f"{used_bytes / GIB:.1f}/{capacity_bytes / GIB:.1f} GiB"
