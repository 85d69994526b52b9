"""DistContext: rank, world size and device of this process, and the process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tightfit.runtime.libraries import local_device

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longer than the slowest wait of one rank for another: rank 0 reading the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistContext:
    """One process of the job, as torchrun numbers it; without torchrun, rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    context_parallel: int = 1
    """Ranks that share each row, and so have the same batches: consecutive ones."""

    @property
    def batch_rank(self) -> int:
        """Of the ranks that share its rows, among all that take batches."""
        return self.rank // self.context_parallel

    @property
    def num_batch_ranks(self) -> int:
        return max(1, self.world_size // self.context_parallel)

    @property
    def counts_batch(self) -> bool:
        """Whether sums over ranks take a batch's counts from this one of those that have it."""
        return self.rank % self.context_parallel == 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files for all."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()


def init_dist_context(*, on_cpu: bool) -> DistContext:
    """Read torchrun's environment, choose the device, and init the process group if there are
    several ranks. Ranks on GPUs also get gloo, for tensors in host memory."""
    environ = os.environ
    local_rank = int(environ.get("LOCAL_RANK", 0))
    device = local_device(local_rank, is_cpu=on_cpu)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    context = DistContext(
        rank=int(environ.get("RANK", 0)),
        local_rank=local_rank,
        world_size=int(environ.get("WORLD_SIZE", 1)),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
        device=device,
    )
    if context.world_size > 1 and not dist.is_initialized():
        dist.init_process_group(
            context.backend, timeout=COLLECTIVE_TIMEOUT, device_id=device if on_gpu else None
        )
    return context


def init_single_process_group(context: DistContext) -> None:
    """Init a group of one rank: FSDP with offload is useful on a single GPU too."""
    store: Any = vars(dist)["HashStore"]()  # torch leaves it out of its typed names
    dist.init_process_group(
        context.backend, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
    )


def destroy_dist_context() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(*values: float, device: torch.device) -> list[float]:
    """Each value summed over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor)
    summed: list[float] = tensor.tolist()
    return summed


def broadcast_object(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
