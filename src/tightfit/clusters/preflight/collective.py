"""torch on one node: what it sees, and all-reduce with the other nodes, for a bounded time."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from tightfit.clusters.preflight.messages import AllReduceResult, TorchFacts

FIRST_BYTES = 1 << 20
MOST_BYTES = 64 << 20
AIM_SECONDS = 0.5
"""Of one all-reduce that is measured."""
NUM_ROUNDS = 3
NUM_SMALL = 10


def main() -> int:
    """One line with what torch sees; then, for each line that comes, an all-reduce."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what torch or NCCL print is not an answer
    answers.write(probe_torch().model_dump_json() + "\n")
    requests: list[str] = []
    has_request = threading.Semaphore(0)

    def listen() -> None:
        for line in sys.stdin:
            requests.append(line)
            has_request.release()
        os._exit(0)  # nobody waits any more, be it in the middle of a collective

    threading.Thread(target=listen, daemon=True).start()
    while True:
        has_request.acquire()
        answers.write(measure_all_reduce(json.loads(requests.pop(0))).model_dump_json() + "\n")


def probe_torch() -> TorchFacts:
    begin = time.monotonic()
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchFacts(error=str(error).splitlines()[0][:300])
    took = time.monotonic() - begin
    has_cuda = bool(torch.cuda.is_available())
    count = int(torch.cuda.device_count()) if has_cuda else 0
    nccl = None
    if has_cuda:
        with suppress(Exception):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=nccl,
        num_gpus=count,
        gpu_names=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        import_seconds=took,
    )


def measure_all_reduce(request: dict[str, Any]) -> AllReduceResult:
    """As `train` does it: a store at the rendezvous port, then gloo or NCCL over the device."""
    from torch import distributed

    dist: Any = distributed
    backend = str(request["backend"])
    if request["device"]:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = request["device"]
    try:
        store = dist.TCPStore(
            request["address"],
            int(request["port"]),
            int(request["world_size"]),
            is_master=request["rank"] == 0,
            timeout=timedelta(seconds=request["seconds"]),
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=int(request["rank"]),
            world_size=int(request["world_size"]),
            timeout=timedelta(seconds=request["seconds"]),
        )
        return _measure(backend, int(request["world_size"]))
    except Exception as error:
        # torch's errors have many types, and any of them is an answer here.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return AllReduceResult(backend=backend, error=lines[0][:300])


def _measure(backend: str, world_size: int) -> AllReduceResult:
    import torch

    device = "cuda" if backend == "nccl" else "cpu"
    _time(torch.zeros(8, device=device), 2)
    latency = _time(torch.zeros(8, device=device), NUM_SMALL)
    _time(torch.zeros(FIRST_BYTES // 4, device=device), 1)
    first = _max_over_ranks(_time(torch.zeros(FIRST_BYTES // 4, device=device), 1), device)
    scale = max(1.0, min(AIM_SECONDS / max(first, 1e-6), MOST_BYTES / FIRST_BYTES))
    num_bytes = FIRST_BYTES * int(scale)
    seconds = _time(torch.zeros(num_bytes // 4, device=device), NUM_ROUNDS)
    crossing = 2 * (world_size - 1) / world_size * num_bytes
    return AllReduceResult(
        backend=backend,
        num_bytes=num_bytes,
        seconds=seconds,
        latency_seconds=latency,
        bus_bytes_per_second=crossing / seconds,
    )


def _time(data: Any, times: int) -> float:
    """Seconds of one all-reduce; ready only when the GPU is."""
    import torch
    import torch.distributed as dist

    def finish() -> None:
        if data.is_cuda:
            torch.cuda.synchronize()

    finish()
    begin = time.monotonic()
    for _ in range(times):
        dist.all_reduce(data)
    finish()
    return (time.monotonic() - begin) / times


def _max_over_ranks(seconds: float, device: str) -> float:
    """The slowest node's figure on every node, so that all choose the same size."""
    import torch
    import torch.distributed as dist

    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


if __name__ == "__main__":
    sys.exit(main())
