"""torch on one node: what it sees, and all-reduce with the other nodes, for a bounded time."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from tightfit.clusters.preflight.observations import AllReduceResult, TorchFacts
from tightfit.core.child_process import Message, open_output, read_messages

FIRST_BYTES = 1 << 20
MOST_BYTES = 64 << 20
AIM_SECONDS = 0.5
"""Of one all-reduce that is measured."""
NUM_ROUNDS = 3
NUM_SMALL = 10


def main() -> int:
    """Send what torch sees; then answer each request with an all-reduce."""
    send = open_output()
    send(probe_torch().model_dump(mode="json"))
    requests: queue.Queue[Message] = queue.Queue()

    def listen() -> None:
        for request in read_messages():
            requests.put(request)
        os._exit(0)  # nobody waits any more, even in the middle of a collective

    threading.Thread(target=listen, daemon=True).start()
    while True:
        send(measure_all_reduce(requests.get()).model_dump(mode="json"))


def probe_torch() -> TorchFacts:
    begin = time.monotonic()
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchFacts(error=str(error).splitlines()[0][:300])
    took = time.monotonic() - begin
    has_cuda = bool(torch.cuda.is_available())
    count = int(torch.cuda.device_count()) if has_cuda else 0
    return TorchFacts(
        version=str(torch.__version__),
        num_gpus=count,
        gpu_names=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        import_seconds=took,
    )


def measure_all_reduce(request: Message) -> AllReduceResult:
    """As `train` does it: a store at the rendezvous port, then gloo or NCCL over the device."""
    from torch import distributed

    dist: Any = distributed
    backend = str(request["backend"])
    if request["device"]:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = request["device"]
    world_size, rank = int(request["world_size"]), int(request["rank"])
    limit = timedelta(seconds=request["seconds"])
    try:
        store = dist.TCPStore(
            request["address"], int(request["port"]), world_size, is_master=rank == 0, timeout=limit
        )
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
        return _measure(backend, world_size)
    except Exception as error:
        # torch's errors have many types, and any of them is an answer here.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return AllReduceResult(backend=backend, error=lines[0][:300])


def _measure(backend: str, world_size: int) -> AllReduceResult:
    import torch
    import torch.distributed as dist

    device = "cuda" if backend == "nccl" else "cpu"
    _time(torch.zeros(8, device=device), 2)
    latency = _time(torch.zeros(8, device=device), NUM_SMALL)
    _time(torch.zeros(FIRST_BYTES // 4, device=device), 1)
    took = _time(torch.zeros(FIRST_BYTES // 4, device=device), 1)
    # The slowest node's figure on every node, so that all choose the same size.
    slowest = torch.tensor([took], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    first = float(slowest.item())
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


if __name__ == "__main__":
    sys.exit(main())
