"""Whether a calibration notices that it was not alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tightfit.hardware.machine import DriverReading, GpuProcess, GpuReading
from tightfit.runtime.calibrate import bench
from tightfit.runtime.calibrate.bench import Bench, Disturbance, _measure_spread

QUIET = [0.02] * 9


def make_driver(num_processes: int = 0, **fields: Any) -> DriverReading:
    processes = tuple(GpuProcess(pid=pid, memory_bytes=None) for pid in range(num_processes))
    reading = GpuReading(
        index=0, name="card", uuid="x", total_bytes=1, free_bytes=1, compute_capability=(9, 0),
        processes=processes, **fields,
    )  # fmt: skip
    return DriverReading(gpus=(reading,))


@pytest.fixture(autouse=True)
def _idle_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    for clock in ("_read_busy_seconds", "_read_own_seconds"):  # too coarse for a test's moment
        monkeypatch.setattr(bench, clock, lambda: 0.0)
    monkeypatch.setattr(bench, "read_driver", make_driver)


@contextmanager
def drivers(
    monkeypatch: pytest.MonkeyPatch, before: DriverReading, after: DriverReading
) -> Iterator[Disturbance]:
    monkeypatch.setattr(bench, "read_driver", lambda: before)
    found = Disturbance(is_cpu=False)
    monkeypatch.setattr(bench, "read_driver", lambda: after)
    yield found


@pytest.mark.parametrize("is_cpu", [True, False])
def test_alone_there_is_nothing_to_say(is_cpu: bool) -> None:
    assert Disturbance(is_cpu=is_cpu).find(QUIET) == ()


def test_load_before_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0.0, 0.0))
    found = Disturbance(is_cpu=True)
    (reported,) = found.find(QUIET)
    assert "busy before (load 10000.0" in reported
    assert found.seen_before == (reported,)


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (make_driver(1), make_driver(2), "1 of 1 GPUs were in use"),
        (make_driver(0), make_driver(2), "came to the GPU"),
        (make_driver(0), make_driver(1, slowdown_reasons=0x40), "clock was held down"),
    ],
)
def test_other_work_on_the_card_is_seen(
    monkeypatch: pytest.MonkeyPatch, before: DriverReading, after: DriverReading, word: str
) -> None:
    with drivers(monkeypatch, before, after) as found:
        (reported,) = found.find(QUIET)
    assert word in reported
    assert found.seen_before == ((reported,) if before.gpus[0].processes else ())


def test_a_card_that_was_slow_before_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = make_driver(0, slowdown_reasons=0x40)
    with drivers(monkeypatch, slow, slow) as found:
        (reported,) = found.find(QUIET)
    assert found.seen_before == (reported,)


def test_our_own_process_on_the_card_is_no_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    with drivers(monkeypatch, make_driver(0), make_driver(1)) as found:
        assert found.find(QUIET) == ()


def test_rounds_that_differ_are_seen() -> None:
    found = Disturbance(is_cpu=False)
    assert "30% more or less" in found.find([0.01, 0.3, 0.3, 0.3, 0.5])[0]
    assert found.find([0.01, 0.01, 0.01, 0.3, 0.5]) == ()
    assert found.find([0.9]) == ()  # too few to judge by


def test_the_spread_leaves_single_outliers_out_of_many() -> None:
    assert _measure_spread([1.0, 1.1, 0.9]) == pytest.approx(0.2)
    assert _measure_spread([1.0] * 20 + [50.0]) == 0.0


def test_the_bench_keeps_the_spread_of_each_time() -> None:
    torch = pytest.importorskip("torch", reason="pip install 'tightfit[train]'")
    bench = Bench(
        device=torch.device("cpu"), dtype=torch.float32, supports_bf16=False, deadline=1e18
    )
    waits = iter([0.001, 0.001, *(0.01 * (1 + number % 2) for number in range(100))])
    bench.seconds(lambda: time.sleep(next(waits)))
    assert bench.spreads[0] > 0.4  # half of them took twice as long


def test_work_of_other_processes_meanwhile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process that works, and the machine's real clocks."""
    monkeypatch.undo()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(bench, "read_machine", _one_core)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    found = Disturbance(is_cpu=True)
    other = multiprocessing.get_context("spawn").Process(target=_work, daemon=True)
    other.start()
    time.sleep(2.0)
    reported = found.find(QUIET)
    other.terminate()
    other.join()
    assert any("of 1 cores busy meanwhile" in line for line in reported)


def _one_core() -> object:
    class Machine:
        num_usable_cores = 1

    return Machine()


def _work() -> None:
    while True:
        sum(range(10_000))
