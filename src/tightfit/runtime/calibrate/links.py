"""What needs processes of its own: bandwidth between GPUs, and memory of a CUDA context; and copies
between host and GPU.

`python -m` of this module runs one rank of a collective, or prints the bytes of its context.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.nn import functional

from tightfit.core.files import temporary_folder
from tightfit.core.import_path import module_words
from tightfit.core.units import GIB, MIB
from tightfit.hardware.calibration import CollectiveTime, HostLink
from tightfit.hardware.machine import read_driver
from tightfit.runtime.calibrate.bench import Bench

HOST_LINK_BYTES = (256 * MIB, 32 * MIB)
"""The smaller one if so much memory cannot be pinned."""


def measure_host_link(bench: Bench) -> HostLink | None:
    if bench.is_cpu:
        return None
    for size in HOST_LINK_BYTES:
        try:
            there = torch.empty(size, dtype=torch.uint8, device=bench.device)
            here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            up = bench.seconds(partial(there.copy_, here, non_blocking=True))
            down = bench.seconds(partial(here.copy_, there, non_blocking=True))
        except RuntimeError:
            continue
        return HostLink(
            to_device_bytes_per_second=size / up, from_device_bytes_per_second=size / down
        )
    bench.skipped.append("copies from pinned memory: none could be pinned")
    return None


# Collectives, with one process per GPU

MODULE = "tightfit.runtime.calibrate.links"
COLLECTIVE_BYTES = {"nccl": (MIB, 16 * MIB, 256 * MIB), "gloo": (MIB // 4, 4 * MIB)}
"""Bytes of the whole tensor."""
NUM_CALLS = 8
START_SECONDS = 60


def measure_collectives(
    num_ranks: int, *, backend: str = "nccl", timeout_seconds: float = START_SECONDS
) -> tuple[list[CollectiveTime], str]:
    """Measured rows, and the reason if there are none."""
    with (
        temporary_folder() as folder,
        ThreadPoolExecutor(num_ranks) as pool,
    ):

        def run(rank: int) -> subprocess.CompletedProcess[str]:
            words = module_words(MODULE, str(folder), backend, str(num_ranks), str(rank))
            return subprocess.run(
                [sys.executable, *words],
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )

        try:
            done = list(pool.map(run, range(num_ranks)))
        except subprocess.TimeoutExpired:
            return [], f"collectives: no answer within {timeout_seconds:.0f} s"
        failed = [one.stderr.strip().splitlines()[-1:] for one in done if one.returncode != 0]
        result = folder / "rows.json"
        if not result.exists():
            error = next((lines[0][:200] for lines in failed if lines), "a worker failed")
            return [], f"collectives: {error}"
        return [CollectiveTime.model_validate(row) for row in json.loads(result.read_text())], ""


def run_worker(folder: Path, backend: str, num_ranks: int, rank: int) -> None:
    """One rank; rank 0 writes the rows."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=START_SECONDS),
    )
    rows = []
    for size in COLLECTIVE_BYTES[backend]:
        whole = torch.ones(size // 2 // num_ranks * num_ranks, dtype=torch.bfloat16, device=device)
        share = torch.ones(whole.numel() // num_ranks, dtype=torch.bfloat16, device=device)
        works: dict[str, Callable[[], object]] = {
            "all_reduce": partial(distributed.all_reduce, whole),
            "all_gather": partial(distributed.all_gather_into_tensor, whole, share),
        }
        if backend == "nccl":
            works["reduce_scatter"] = partial(distributed.reduce_scatter_tensor, share, whole)
        for kind, work in works.items():
            fields = {"kind": kind, "num_ranks": num_ranks, "num_bytes": 2 * whole.numel()}
            rows.append(fields | {"seconds": _time(work, device)})
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def _time(work: Callable[[], object], device: torch.device) -> float:
    """Median wall time over groups of calls: long compared with a launch, or latency itself."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        work()
    wait()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            work()
        wait()
        times.append((time.perf_counter() - start) / NUM_CALLS)
    return statistics.median(times)


# Memory of a CUDA process outside torch's allocator

CONTEXT_TIMEOUT_SECONDS = 60.0
LEAST_BYTES, MOST_BYTES = 32 * MIB, 4 * GIB
"""Outside of this range, another process allocated or freed memory meanwhile."""


def measure_context() -> tuple[int | None, str]:
    """The bytes, or None and the reason."""
    # NVML orders GPUs by PCI bus; CUDA must do so too.
    environ = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = subprocess.run(
            [sys.executable, *module_words(MODULE, "context")],
            capture_output=True,
            text=True,
            env=environ,
            timeout=CONTEXT_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"the CUDA context: {error}"
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode != 0 or not last[0].isdecimal():
        lines = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return None, f"the CUDA context: {lines[0][:200]}"
    size = int(last[0])
    if not LEAST_BYTES <= size <= MOST_BYTES:
        return None, "the CUDA context: the GPU is in use by others"
    return size, ""


def probe_context_bytes() -> int:
    """GPU memory of this process outside torch's allocator after a training step."""
    before = _read_free_bytes()
    device = torch.device("cuda", 0)
    _train_once(device)
    torch.cuda.synchronize(device)
    return before - _read_free_bytes() - torch.cuda.memory_reserved(device)


def _read_free_bytes() -> int:
    reading = read_driver()
    if not reading.gpus:
        raise RuntimeError(reading.error or "NVML shows no GPU")
    return reading.gpus[0].free_bytes


def _train_once(device: torch.device) -> None:
    """Load the kinds of kernels of a step: products, attention, norms, loss, update."""
    is_new = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if is_new else torch.float16
    layer = torch.nn.Linear(256, 256, device=device, dtype=dtype)
    plain = torch.nn.Linear(256, 256, device=device)
    weights = [*layer.parameters(), *plain.parameters()]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for _ in range(2):
        x = torch.randn(2, 4, 64, 64, device=device, dtype=dtype, requires_grad=True)
        y = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        z = layer(functional.silu(y.transpose(1, 2).reshape(2, 64, 256)))
        z = functional.layer_norm(z.float(), (256,)) + plain(z.float())
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
        labels = torch.zeros(128, dtype=torch.long, device=device)
        loss = functional.cross_entropy(z.reshape(128, 256), labels)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        optimizer.step()


def main(words: list[str]) -> None:
    """`context`, or FOLDER BACKEND NUM_RANKS RANK."""
    if words == ["context"]:
        print(probe_context_bytes())
        return
    folder, backend, num_ranks, rank = words
    run_worker(Path(folder), backend, int(num_ranks), int(rank))


if __name__ == "__main__":
    main(sys.argv[1:])
