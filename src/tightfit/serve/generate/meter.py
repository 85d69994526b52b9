"""What the machine says of a run: disk reads, memory held, energy, core time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.hardware.nvml import read_driver
from tightfit.hardware.own_memory import read_peak_bytes
from tightfit.serve.generate.statistics import Measured

SAMPLE_SECONDS = 0.1


class Reading(NamedTuple):
    """Counters at one moment."""

    moment_s: float
    disk_bytes: int | None
    core_seconds: float
    energy_joules: float | None


class RunMeter:
    """Counters around loading and answering, and the cards' memory watched meanwhile."""

    def __init__(self) -> None:
        self._cards = _Cards()
        self._readings: dict[str, Reading] = {}

    def __enter__(self) -> RunMeter:
        self.mark("start")
        self._cards.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cards.stop()

    def mark(self, name: str) -> None:
        """Keep the counters of now under a name: `start`, `loaded`, `answered`."""
        self._readings[name] = Reading(
            time.monotonic(), read_disk_bytes(), time.process_time(), self._cards.read_energy()
        )

    def measure(self, *, device: str, num_threads: int) -> Measured:
        """What became of the run between its marks."""
        start, loaded, answered = (self._readings[k] for k in ("start", "loaded", "answered"))
        wall = max(answered.moment_s - loaded.moment_s, 1e-9)
        is_cpu = device == "cpu"
        allocated, reserved = (None, None) if is_cpu else _torch_peaks()
        seen = [size for size in (self._cards.peak_bytes, reserved) if size is not None]
        return Measured(
            load_seconds=loaded.moment_s - start.moment_s,
            load_disk_bytes=_less(loaded.disk_bytes, start.disk_bytes),
            answer_disk_bytes=_less(answered.disk_bytes, loaded.disk_bytes),
            device_peak_bytes=read_peak_bytes() if is_cpu else max(seen, default=None),
            allocated_peak_bytes=allocated,
            host_peak_bytes=read_peak_bytes(),
            energy_joules=None
            if answered.energy_joules is None or loaded.energy_joules is None
            else answered.energy_joules - loaded.energy_joules,
            idle_gpu=self._cards.first_name if is_cpu else None,
            is_offloaded="cuda" in device and "cpu" in device,
            cores_fraction=(answered.core_seconds - loaded.core_seconds) / wall / num_threads
            if is_cpu
            else None,
        )


def read_disk_bytes(path: Path = Path("/proc/self/io")) -> int | None:
    """Bytes that this process made storage read; what the page cache had is not among them."""
    try:
        for line in path.read_text("ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "read_bytes":
                return int(value)
    except (OSError, ValueError):
        return None  # not Linux, or a container that hides it
    return None


def count_threads(asked: int | None) -> int:
    """Threads that compute on a CPU."""
    if asked is not None:
        return asked
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    with contextlib.suppress(ValueError):
        return max(1, int(os.environ.get("OMP_NUM_THREADS", "")))
    from tightfit.hardware.machine import read_machine

    return read_machine().num_usable_cores


def _torch_peaks() -> tuple[int | None, int | None]:
    """Most tensors and most reserve, over all cards, where torch manages them."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None, None
    cards = range(torch.cuda.device_count())
    allocated = sum(torch.cuda.max_memory_allocated(card) for card in cards)
    reserved = sum(torch.cuda.max_memory_reserved(card) for card in cards)
    return (allocated, reserved) if allocated else (None, None)


def _less(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


class _Cards:
    """The NVIDIA cards of this machine, by NVML; nothing where there are none."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """Over what was in use before us, all cards together."""
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._handles: list[Any] = []
        self._nvml: Any = None
        reading = read_driver()
        self.first_name = reading.gpus[0].name if reading.gpus else None
        if reading.gpus:
            import pynvml

            self._nvml = pynvml
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._handles = [
                    pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in reading.gpus
                ]
        self._before = self._read_used()

    def start(self) -> None:
        if self._handles:
            self._thread = threading.Thread(target=self._watch, name="gpu-meter", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._handles = []

    def read_energy(self) -> float | None:
        """Joules since the driver was loaded; older cards do not count them."""
        total = 0.0
        for handle in self._handles:
            try:
                total += self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            except self._nvml.NVMLError:
                return None
        return total if self._handles else None

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            used = self._read_used() - self._before
            self.peak_bytes = max(self.peak_bytes or 0, used)

    def _read_used(self) -> int:
        used = 0
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                used += int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used
