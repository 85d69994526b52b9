"""Bench times work on one device, within a deadline; Disturbance detects other load meanwhile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from tightfit.hardware.machine import (
    SLOWED_BY_HEAT,
    SLOWED_BY_POWER_BRAKE,
    DriverReading,
    read_driver,
    read_machine,
)
from tightfit.runtime.libraries import is_out_of_memory

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

    def note_missing(self, what: str, count: int) -> None:
        """Record that `count` measurements were left out."""
        if count:
            self.skipped.append(f"{count} {what}: no time or memory left")

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
        if self.is_cpu:
            work()
            first = _call(work)
            repeats = min(max(int(NUM_ROUNDS * ROUND_SECONDS["cpu"] / first), 1), MOST_REPEATS)
            times = [first, *(_call(work) for _ in range(repeats))]
        else:
            times = _time_on_gpu(work)
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


# Detects other load on the machine during a measurement, which makes its rates invalid.

BUSY_LOAD_FRACTION = 0.5
"""Load per core before the measurement above which host times are not reliable."""
OTHERS_FRACTION = {"cuda": 0.5, "cpu": 0.15}
"""The fraction of cores that others may use meanwhile. A GPU's host needs one core; a CPU under
measurement needs all (two busy processes on two cores: 0.55)."""
MOST_SPREAD = {"cuda": 0.10, "cpu": 0.25}
"""The allowed median spread between rounds of one measurement. An idle device repeats itself
within a few percent."""
LEAST_MEASUREMENTS = 5
AGAIN = "measure again when idle"
SLOWED = "the GPU's clock was held down by heat or its power supply: measure again when cool"


class Disturbance:
    """Checks the machine before and after a measurement."""

    def __init__(self, *, is_cpu: bool) -> None:
        self._device = "cpu" if is_cpu else "cuda"
        self._before = read_driver()
        self.seen_before = tuple(self._find_before())
        """Problems known before the measurement begins."""
        self._began = time.monotonic()
        self._busy_seconds = _read_busy_seconds()
        self._own_seconds = _read_own_seconds()

    def find(self, spreads: Sequence[float]) -> tuple[str, ...]:
        """All problems found; `spreads` are the relative spreads of the measured times."""
        return (*self.seen_before, *self._find_after(spreads))

    def _find_before(self) -> Iterator[str]:
        load, cores = os.getloadavg()[0], _count_cores()
        if load > BUSY_LOAD_FRACTION * cores:
            most = BUSY_LOAD_FRACTION * cores
            yield (
                f"the machine was busy before (load {load:.1f} over the last minute on {cores} "
                f"cores, {most:.1f} at most): {AGAIN}"
            )
        if self._device == "cpu":
            return
        gpus = self._before.gpus
        if num_used := sum(bool(gpu.processes) for gpu in gpus):
            yield f"{num_used} of {len(gpus)} GPUs were in use: {AGAIN}"
        if _is_slowed(self._before):
            yield SLOWED

    def _find_after(self, spreads: Sequence[float]) -> Iterator[str]:
        cores = _count_cores()
        took = max(time.monotonic() - self._began, 1e-9)
        own = _read_own_seconds() - self._own_seconds
        others = (_read_busy_seconds() - self._busy_seconds - own) / took
        if others > OTHERS_FRACTION[self._device] * cores:
            yield f"others kept {others:.1f} of {cores} cores busy meanwhile: {AGAIN}"
        if self._device == "cuda":
            before, after = self._before, read_driver()
            was_used = any(gpu.processes for gpu in before.gpus)
            # Our own process is on a GPU by now; in a container its pid is another.
            if not was_used and any(len(gpu.processes) > 1 for gpu in after.gpus):
                yield f"another process came to the GPU meanwhile: {AGAIN}"
            if _is_slowed(after) and not _is_slowed(before):
                yield SLOWED
        usual = statistics.median(spreads) if len(spreads) >= LEAST_MEASUREMENTS else 0.0
        if usual > MOST_SPREAD[self._device]:
            yield f"the same work took {usual:.0%} more or less from one time to the next: {AGAIN}"


def _count_cores() -> int:
    return max(read_machine().num_usable_cores, os.cpu_count() or 1)


def _is_slowed(reading: DriverReading) -> bool:
    slowed = SLOWED_BY_HEAT | SLOWED_BY_POWER_BRAKE
    return any(gpu.slowdown_reasons & slowed for gpu in reading.gpus)


def _read_busy_seconds() -> float:
    """CPU seconds of all processes of the machine, including time stolen by a hypervisor."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is in the users' already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)


def _read_own_seconds() -> float:
    """This process's and its ended children's."""
    mine = psutil.Process().cpu_times()
    return float(mine.user + mine.system + mine.children_user + mine.children_system)
