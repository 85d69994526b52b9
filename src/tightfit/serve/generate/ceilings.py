"""A device's own limits: what a copy and a matrix product reach on it, and what its maker says."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.units import MIB
from tightfit.hardware.types import Gpu
from tightfit.runtime.devices import is_out_of_memory
from tightfit.serve.generate.statistics import Ceilings

PROBE_SECONDS = 0.25
CPU_COPY_BYTES = 64 * MIB
"""Of each thread: past its share of the last cache."""
MOST_COPY_THREADS = 32
GPU_COPY_BYTES = 512 * MIB
CPU_MATRIX, GPU_MATRIX = 1024, 8192
_WARMING_ROUNDS = 2


def probe_ceilings(gpu: Gpu, device: str, compute: Dtype, *, num_threads: int) -> Ceilings:
    """Measure both limits, after the model has left the device. Takes about a second."""
    is_cpu = device == "cpu"
    paper = None if is_cpu else gpu.memory_bytes_per_second  # of RAM, nobody tells us
    return Ceilings(
        copy_bytes_per_second=probe_copy_bandwidth(device, num_threads=num_threads),
        paper_bytes_per_second=paper,
        matmul_flops_per_second=probe_matmul_flops(device, compute),
        paper_flops_per_second=gpu.flops(compute),
    )


def probe_copy_bandwidth(device: str, *, num_threads: int = 1) -> float | None:
    """Bytes read and written per second by a plain copy; None where it cannot be tried."""
    try:
        if device == "cpu":
            return _copy_on_cpu(min(num_threads, MOST_COPY_THREADS))
        return _copy_on_gpu(_first(device))
    except (RuntimeError, MemoryError) as fault:
        if is_out_of_memory(fault):
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
    place = torch.device("cpu" if device == "cpu" else _first(device))
    try:
        left = torch.ones((size, size), dtype=torch_dtype(compute), device=place)
        out = torch.empty_like(left)
        rounds = _count_rounds(lambda: torch.mm(left, left, out=out), _waiter(place))
    except RuntimeError as fault:
        if is_out_of_memory(fault):
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
    for _ in range(_WARMING_ROUNDS):
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


def _first(device: str) -> str:
    """`cuda:0-3` computes on one card at a time: the first one's limits are the limits."""
    return "cuda:0" if device == "cuda" else device.partition("-")[0]
