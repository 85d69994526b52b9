"""Whether the machine was the measurement's own: rates beside other work are not its rates."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence

import psutil

from tightfit.hardware.machine import read_machine
from tightfit.hardware.nvml import (
    SLOWED_BY_HEAT,
    SLOWED_BY_POWER_BRAKE,
    DriverReading,
    read_driver,
)

BUSY_LOAD_FRACTION = 0.5
"""Of the cores, runnable processes before from which on the host's times are not its own."""
OTHERS_FRACTION = {"cuda": 0.5, "cpu": 0.15}
"""Of the cores, what others may take meanwhile. A GPU's host needs one core; a CPU that is measured
needs all, and on two cores two busy processes leave it half (others: 0.55 of the cores)."""
MOST_SPREAD = {"cuda": 0.10, "cpu": 0.25}
"""Of a time, how far the rounds of one measurement may lie apart in the median of all. A device of
its own repeats itself within a few percent."""
LEAST_MEASUREMENTS = 5
AGAIN = "measure again when idle"
SLOWED = "the GPU's clock was held down by heat or its power supply: measure again when cool"


class Disturbance:
    """Looks before and after a measurement."""

    def __init__(self, *, is_cpu: bool) -> None:
        self._device = "cpu" if is_cpu else "cuda"
        self._before = read_driver()
        self.seen_before = tuple(self._find_before())
        """What keeps a measurement from being kept, known before it begins."""
        self._began = time.monotonic()
        self._busy_seconds = _read_busy_seconds()
        self._own_seconds = _read_own_seconds()

    def find(self, spreads: Sequence[float]) -> tuple[str, ...]:
        """What was seen; `spreads` are those of the measured times, as fractions of them."""
        return (
            *self.seen_before,
            *self._find_on_host(),
            *(() if self._device == "cpu" else self._find_on_cards()),
            *_find_spread(spreads, MOST_SPREAD[self._device]),
        )

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

    def _find_on_host(self) -> Iterator[str]:
        cores = _count_cores()
        took = max(time.monotonic() - self._began, 1e-9)
        own = _read_own_seconds() - self._own_seconds
        others = (_read_busy_seconds() - self._busy_seconds - own) / took
        if others > OTHERS_FRACTION[self._device] * cores:
            yield f"others kept {others:.1f} of {cores} cores busy meanwhile: {AGAIN}"

    def _find_on_cards(self) -> Iterator[str]:
        """Ours is on a card by now, under a number that a container does not know it by."""
        before, after = self._before, read_driver()
        was_used = any(gpu.processes for gpu in before.gpus)
        if not was_used and any(len(gpu.processes) > 1 for gpu in after.gpus):
            yield f"another process came to the GPU meanwhile: {AGAIN}"
        if _is_slowed(after) and not _is_slowed(before):
            yield SLOWED


def _count_cores() -> int:
    return max(read_machine().num_usable_cores, os.cpu_count() or 1)


def _is_slowed(reading: DriverReading) -> bool:
    slowed = SLOWED_BY_HEAT | SLOWED_BY_POWER_BRAKE
    return any(gpu.slowdown_reasons & slowed for gpu in reading.gpus)


def _find_spread(spreads: Sequence[float], most: float) -> Iterator[str]:
    if len(spreads) < LEAST_MEASUREMENTS:
        return
    usual = statistics.median(spreads)
    if usual > most:
        yield f"the same work took {usual:.0%} more or less from one time to the next: {AGAIN}"


def _read_busy_seconds() -> float:
    """Core seconds that all processes of the machine have taken; what a host took away counts."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is in the users' already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)


def _read_own_seconds() -> float:
    """This process's and its ended children's."""
    mine = psutil.Process().cpu_times()
    return float(mine.user + mine.system + mine.children_user + mine.children_system)
