"""Bandwidth of this machine's links: host to GPU, and collectives between GPUs."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import distributed

from tightfit.core.units import MIB
from tightfit.hardware.calibration import CollectiveTime, HostLink
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


# Collectives, with one process per GPU (`python -m` of this module)

MODULE = "tightfit.runtime.calibrate.links"
COLLECTIVE_BYTES = {"nccl": (MIB, 16 * MIB, 256 * MIB), "gloo": (MIB // 4, 4 * MIB)}
"""Bytes of the whole tensor."""
NUM_CALLS = 8
START_SECONDS = 60


def measure_collectives(
    num_ranks: int, *, backend: str = "nccl", timeout_seconds: float = START_SECONDS
) -> tuple[list[CollectiveTime], str]:
    """Measured rows, and the reason if there are none."""
    with tempfile.TemporaryDirectory(prefix="tightfit-calibrate-") as folder:
        command = [sys.executable, "-m", MODULE, folder, backend, str(num_ranks)]
        workers = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        error = _wait(workers, timeout_seconds)
        result = Path(folder) / "rows.json"
        if not result.exists():
            return [], f"collectives: {error or 'the workers left no result'}"
        return [CollectiveTime.model_validate(row) for row in json.loads(result.read_text())], ""


def _wait(workers: Sequence[subprocess.Popen[str]], timeout_seconds: float) -> str:
    """Wait for all workers, killing those left; returns the first error."""
    end = time.monotonic() + timeout_seconds
    error = ""
    try:
        for worker in workers:
            try:
                _, stderr = worker.communicate(timeout=max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                return f"no answer within {timeout_seconds:.0f} s"
            if worker.returncode != 0 and not error:
                error = (stderr.strip().splitlines()[-1:] or ["a worker failed"])[0][:200]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.communicate()
    return error


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
        for kind, work in _list_works(whole, share).items():
            seconds = _time(work, device)
            rows.append(
                {"kind": kind, "num_ranks": num_ranks, "num_bytes": 2 * whole.numel()}
                | {"seconds": seconds}
            )
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def _list_works(whole: torch.Tensor, share: torch.Tensor) -> dict[str, Callable[[], object]]:
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, share),
    }
    if distributed.get_backend() == "nccl":
        works["reduce_scatter"] = lambda: distributed.reduce_scatter_tensor(share, whole)
    return works


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("backend", choices=tuple(COLLECTIVE_BYTES))
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("rank", type=int)
    arguments = parser.parse_args()
    run_worker(arguments.folder, arguments.backend, arguments.num_ranks, arguments.rank)


if __name__ == "__main__":
    main()
