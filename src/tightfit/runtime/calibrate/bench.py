"""Bench: times work on one device, within a deadline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from tightfit.runtime.devices import is_out_of_memory

ROUND_SECONDS = {"cuda": 0.1, "cpu": 0.05}
"""The target duration of one round of repeats."""
MOST_REPEATS = 60
"""More would fill the driver's queue, and the host would wait inside the measurement."""
NUM_ROUNDS = 3
MANY_ROUNDS = 8
"""With at least so many rounds, the spread ignores outliers."""
SPIN_HZ = 2.0e9
"""Clock cycles per second of waiting on the device; slower clocks wait longer, which is safe."""
MOST_SPIN_SECONDS = 0.2
ROOM_FRACTION = {"cuda": 0.5, "cpu": 0.25}
"""The part of free memory that one measurement may use."""

Work = Callable[[], object]


@dataclass(slots=True, kw_only=True)
class Bench:
    """The device that is measured, and the deadline."""

    device: torch.device
    dtype: torch.dtype
    """The training dtype: bf16, fp16 on GPUs without it, fp32 on CPUs."""
    supports_bf16: bool
    deadline: float
    """Of the current part, on `time.monotonic`."""
    skipped: list[str] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    """The spread of each measurement's rounds, as a fraction of its result."""

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def part(self, fraction: float) -> Iterator[None]:
        """A part that may use this fraction of the time left."""
        end = self.deadline
        self.deadline = end - (1.0 - fraction) * max(self.seconds_left, 0.0)
        try:
            yield
        finally:
            self.deadline = end

    def has_room(self, num_bytes: float) -> bool:
        if self.is_cpu:
            free = psutil.virtual_memory().available
        else:
            free = torch.cuda.mem_get_info(self.device)[0]
        return num_bytes <= ROOM_FRACTION[self.device.type] * free

    def try_seconds(self, make: Callable[[], Work]) -> float | None:
        """Seconds of the work that `make` prepares; None if it runs out of memory."""
        try:
            return self.seconds(make())
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            if not self.is_cpu:
                torch.cuda.empty_cache()

    def seconds(self, work: Work) -> float:
        """Median time of `work` on the device, after warm-up runs."""
        times = _time_on_cpu(work) if self.is_cpu else _time_on_gpu(work)
        middle = statistics.median(times)
        self.spreads.append(_measure_spread(times) / middle)
        return middle

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)


def _measure_spread(times: list[float]) -> float:
    """The interquartile range; of a few rounds, the full range."""
    if len(times) < MANY_ROUNDS:
        return max(times) - min(times)
    lower, _, upper = statistics.quantiles(times, n=4)
    return upper - lower


def _time_on_cpu(work: Work) -> list[float]:
    work()
    times = [_call(work)]
    repeats = min(max(int(NUM_ROUNDS * ROUND_SECONDS["cpu"] / times[0]), 1), MOST_REPEATS)
    return times + [_call(work) for _ in range(repeats)]


def _call(work: Work) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)


def _time_on_gpu(work: Work) -> list[float]:
    """By CUDA events around repeats that are all queued while the device still waits.

    Otherwise short kernels would show the launch overhead of Python instead of their own time.
    """
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    took = max(time.perf_counter() - start, 1e-6)
    repeats = min(max(int(ROUND_SECONDS["cuda"] / took), 1), MOST_REPEATS)
    times = []
    for _ in range(NUM_ROUNDS):
        # Matrix products without a pause are slowed down by the power limit. In a training step
        # other kernels run between them, and they reach the short-term rate (h200_kernels.json).
        time.sleep(min(repeats * took, ROUND_SECONDS["cuda"]))
        times.append(_time_round(work, repeats, wait=1e-4 + 2 * repeats * queued))
    return times


def time_after_work(work: Work, *, seconds: float) -> float:
    """The time of one call after `seconds` of nothing else, at the sustained clock."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(MOST_REPEATS):
            work()
        torch.cuda.synchronize()
    return _time_round(work, 4 * MOST_REPEATS, wait=0.0)


def _time_round(work: Work, repeats: int, *, wait: float) -> float:
    cuda: Any = torch.cuda  # half annotated
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(int(SPIN_HZ * min(wait, MOST_SPIN_SECONDS)))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return max(float(begin.elapsed_time(end)) / 1e3 / repeats, 1e-9)


def warm_up(bench: Bench, *, seconds: float) -> None:
    """Bring clocks and temperature to their working values."""
    side = 512 if bench.is_cpu else 4096
    left, right = bench.randn(side, side), bench.randn(side, side)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(1 if bench.is_cpu else 10):
            torch.mm(left, right)
        if not bench.is_cpu:
            torch.cuda.synchronize()
