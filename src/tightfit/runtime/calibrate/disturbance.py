"""Detects other load on the machine during a measurement, which makes its rates invalid."""

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
        return (
            *self.seen_before,
            *self._find_on_host(),
            *(() if self._device == "cpu" else self._find_on_gpus()),
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

    def _find_on_gpus(self) -> Iterator[str]:
        """Our own process is on a GPU by now; in a container its pid is another."""
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
