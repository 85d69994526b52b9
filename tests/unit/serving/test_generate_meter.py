"""What is read from the machine: counters, cards, and the limits that are measured."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tightfit.core.dtypes import Dtype
from tightfit.hardware.machine import DriverReading, GpuReading
from tightfit.serving.generate import run as meters
from tightfit.serving.generate.run import RunMeter, count_threads, read_disk_bytes
from tightfit.serving.generate.statistics import (
    CPU_COPY_BYTES,
    probe_copy_bandwidth,
    probe_matmul_flops,
)


def test_disk_reads_are_those_of_storage_not_of_the_page_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = read_disk_bytes()
    assert found is not None
    assert int(kernel["read_bytes"]) <= found < int(kernel["rchar"])

    def refuse() -> None:
        raise PermissionError("hidden by the container")

    monkeypatch.setattr(psutil.Process, "io_counters", lambda _: refuse())
    assert read_disk_bytes() is None


class FakeNvml:
    """One card whose memory and energy are what the test says."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.used, self.millijoules = 2 * 10**9, 1000
        self.num_reads = 0

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:  # noqa: N802
        self.num_reads += 1
        return SimpleNamespace(used=self.used)

    def nvmlDeviceGetTotalEnergyConsumption(self, _: int) -> int:  # noqa: N802
        return self.millijoules


def test_a_cards_peak_is_what_came_on_top_and_energy_is_of_answering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml()
    card = GpuReading(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-1",
        total_bytes=10**11,
        free_bytes=10**11,
        compute_capability=(9, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(meters, "read_driver", lambda: DriverReading(gpus=(card,)))
    monkeypatch.setattr(meters, "SAMPLE_SECONDS", 0.005)

    with RunMeter() as meter:
        nvml.millijoules = 5000
        meter.mark("loaded")
        nvml.used = 9 * 10**9
        # The second reading from now begins when the first, which is of the peak, was kept.
        num_reads, end = nvml.num_reads, time.monotonic() + 60
        while nvml.num_reads < num_reads + 2 and time.monotonic() < end:
            time.sleep(0.005)
        nvml.used, nvml.millijoules = 3 * 10**9, 8500
        meter.mark("answered")
        on_card = meter.measure(device="cuda:0", num_threads=1)
        on_cpu = meter.measure(device="cpu", num_threads=1)

    assert on_card.device_peak_bytes == 7 * 10**9
    assert on_card.energy_joules == 3.5
    assert on_card.idle_gpu is None
    assert on_cpu.idle_gpu == "NVIDIA H200"
    assert on_cpu.device_peak_bytes == on_cpu.host_peak_bytes > 0


def test_threads_are_those_asked_for_or_those_that_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert count_threads(3) == 3
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 7))
    assert count_threads(None) == 7
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert count_threads(None) == 5


def test_the_copy_rate_is_that_of_a_copy_by_hand() -> None:
    """Against Python's own memcpy on the same machine; it is shared, so within a wide band."""
    source = b"x" * CPU_COPY_BYTES
    target = memoryview(bytearray(len(source)))
    best = 0.0
    for _ in range(12):
        began = time.perf_counter()
        target[:] = source
        best = max(best, 2 * len(source) / (time.perf_counter() - began))

    found = probe_copy_bandwidth("cpu", num_threads=1)

    assert found is not None
    assert best / 5 < found < best * 5


def test_a_product_runs_at_a_rate_that_processors_have() -> None:
    found = probe_matmul_flops("cpu", Dtype.FP32)
    assert found is not None
    assert 1e8 < found < 1e14
