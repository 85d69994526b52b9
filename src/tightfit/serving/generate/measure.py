"""Measurements around a `generate` run: disk reads, memory, energy, core time, device limits."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.dtypes import Dtype
from tightfit.core.units import MIB
from tightfit.hardware.machine import read_peak_memory_bytes
from tightfit.hardware.nvml import read_driver
from tightfit.hardware.types import Gpu
from tightfit.runtime.devices import is_out_of_memory
from tightfit.serving.generate.statistics import DeviceCeilings, RunMeasurements

SAMPLE_SECONDS = 0.1


class CounterReading(NamedTuple):
    """Counters at one moment."""

    moment_s: float
    disk_bytes: int | None
    core_seconds: float
    energy_joules: float | None


class RunMeter:
    """Counters around loading and answering, and the cards' memory watched meanwhile."""

    def __init__(self) -> None:
        self._cards = _GpuWatcher()
        self._readings: dict[str, CounterReading] = {}

    def __enter__(self) -> RunMeter:
        self.mark("start")
        self._cards.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cards.stop()

    def mark(self, name: str) -> None:
        """Keep the counters of now under a name: `start`, `loaded`, `answered`."""
        self._readings[name] = CounterReading(
            time.monotonic(), read_disk_bytes(), time.process_time(), self._cards.read_energy()
        )

    def measure(self, *, device: str, num_threads: int) -> RunMeasurements:
        """What became of the run between its marks."""
        start, loaded, answered = (self._readings[k] for k in ("start", "loaded", "answered"))
        wall = max(answered.moment_s - loaded.moment_s, 1e-9)
        is_cpu = device == "cpu"
        allocated, reserved = (None, None) if is_cpu else _torch_peaks()
        seen = [size for size in (self._cards.peak_bytes, reserved) if size is not None]
        return RunMeasurements(
            load_seconds=loaded.moment_s - start.moment_s,
            load_disk_bytes=_subtract(loaded.disk_bytes, start.disk_bytes),
            answer_disk_bytes=_subtract(answered.disk_bytes, loaded.disk_bytes),
            device_peak_bytes=read_peak_memory_bytes() if is_cpu else max(seen, default=None),
            allocated_peak_bytes=allocated,
            host_peak_bytes=read_peak_memory_bytes(),
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


def _subtract(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


class _GpuWatcher:
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


# Device limits: the measured rates of a copy and of a matrix product, and the data sheet.

PROBE_SECONDS = 0.25
CPU_COPY_BYTES = 64 * MIB
"""Of each thread: past its share of the last cache."""
MAX_COPY_THREADS = 32
GPU_COPY_BYTES = 512 * MIB
CPU_MATRIX, GPU_MATRIX = 1024, 8192
_WARMUP_ROUNDS = 2


def probe_ceilings(gpu: Gpu, device: str, compute: Dtype, *, num_threads: int) -> DeviceCeilings:
    """Measure both limits, after the model has left the device. Takes about a second."""
    is_cpu = device == "cpu"
    paper = None if is_cpu else gpu.memory_bytes_per_second  # unknown for RAM
    return DeviceCeilings(
        copy_bytes_per_second=probe_copy_bandwidth(device, num_threads=num_threads),
        paper_bytes_per_second=paper,
        matmul_flops_per_second=probe_matmul_flops(device, compute),
        paper_flops_per_second=gpu.flops(compute),
    )


def probe_copy_bandwidth(device: str, *, num_threads: int = 1) -> float | None:
    """Bytes read and written per second by a plain copy; None where it cannot be tried."""
    try:
        if device == "cpu":
            return _copy_on_cpu(min(num_threads, MAX_COPY_THREADS))
        return _copy_on_gpu(_first_device(device))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise


def probe_matmul_flops(device: str, compute: Dtype) -> float | None:
    """FLOP/s of a large square product in `compute`; None where it cannot be tried."""
    if device == "cpu" and "torch" not in sys.modules:
        return _multiply_with_numpy()  # llama.cpp runs without torch, which takes long to load
    if find_spec("torch") is None:
        return None
    import torch

    from tightfit.runtime.devices import torch_dtype

    size = CPU_MATRIX if device == "cpu" else GPU_MATRIX
    place = torch.device("cpu" if device == "cpu" else _first_device(device))
    try:
        left = torch.ones((size, size), dtype=torch_dtype(compute), device=place)
        out = torch.empty_like(left)
        rounds = _count_rounds(lambda: torch.mm(left, left, out=out), _waiter(place))
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    return 2.0 * size**3 * rounds


def _copy_on_cpu(num_threads: int) -> float:
    import numpy as np

    def make() -> Callable[[], object]:
        source = np.ones(CPU_COPY_BYTES, dtype=np.uint8)
        target = np.empty_like(source)
        target.fill(0)  # touched once, so that the kernel has given the pages
        return lambda: np.copyto(target, source)

    rates = [0.0] * num_threads
    copies = [make() for _ in range(num_threads)]
    ready = threading.Barrier(num_threads)

    def work(number: int) -> None:
        ready.wait()
        rates[number] = _count_rounds(copies[number], lambda: None)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 2.0 * CPU_COPY_BYTES * sum(rates)


def _copy_on_gpu(device: str) -> float:
    import torch

    place = torch.device(device)
    source = torch.ones(GPU_COPY_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return 2.0 * GPU_COPY_BYTES * _count_rounds(lambda: target.copy_(source), _waiter(place))


def _multiply_with_numpy() -> float:
    import numpy as np

    left = np.ones((CPU_MATRIX, CPU_MATRIX), dtype=np.float32)
    out = np.empty_like(left)
    return 2.0 * CPU_MATRIX**3 * _count_rounds(lambda: np.matmul(left, left, out=out), lambda: None)


def _waiter(place: Any) -> Callable[[], None]:
    if place.type == "cpu":
        return lambda: None

    def wait() -> None:
        import torch

        torch.cuda.synchronize(place)

    return wait


def _count_rounds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Rounds per second of the best of several short stretches: other work only takes away."""
    for _ in range(_WARMUP_ROUNDS):
        work()
    wait()
    best, num_rounds = 0.0, 1
    end = time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(num_rounds):
            work()
        wait()
        took = max(time.perf_counter() - began, 1e-9)
        best = max(best, num_rounds / took)
        if took < PROBE_SECONDS / 10:  # a GPU starts its work and returns at once
            num_rounds *= 2
    return best


def _first_device(device: str) -> str:
    """`cuda:0-3` computes on one card at a time: the first one's limits are the limits."""
    return "cuda:0" if device == "cuda" else device.partition("-")[0]
