"""Spread an Objective over ranks: replicated by DDP, or sharded by FSDP2."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Offload, Sharding, Strategy
from tightfit.runtime.devices import torch_dtype
from tightfit.train.place import Place, join_alone


def replicate(module: nn.Module, place: Place) -> DistributedDataParallel:
    """A copy on every rank, gradients averaged.

    Every rank has read the same files, so only what was drawn is sent: DDP by
    itself would send the whole frozen model.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), src=0)
    on_gpu = place.device.type == "cuda"
    buffers: dict[str, Any] = {_buffer_option(): False}
    return DistributedDataParallel(
        module,
        device_ids=[place.device.index] if on_gpu else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        **buffers,
    )


def _buffer_option() -> str:
    """torch 2.13 renamed it and warns of the old name."""
    known = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


class Sharder:
    """`fully_shard` with one plan's settings: first each layer, then what is left."""

    def __init__(self, strategy: Strategy, place: Place) -> None:
        self._settings: dict[str, Any] = {
            "mesh": make_mesh(strategy, place),
            "mp_policy": choose_precision(strategy),
            "offload_policy": choose_offload(strategy, place),
        }
        self._reshards = strategy.sharding is not Sharding.FSDP_GRAD_OP

    def shard_layer(self, layer: nn.Module) -> None:
        fully_shard(layer, reshard_after_forward=self._reshards, **self._settings)

    def shard_rest(self, module: nn.Module) -> None:
        """Embeddings, last norm and head; used first and last, they stay gathered in between."""
        fully_shard(module, reshard_after_forward=False, **self._settings)


def make_mesh(strategy: Strategy, place: Place) -> DeviceMesh:
    """All ranks in a row; for hybrid sharding a row of shards per node."""
    kind = place.device.type
    if not dist.is_initialized():
        join_alone(place)
    if strategy.sharding is Sharding.FSDP_HYBRID:
        shape = (place.num_nodes, place.local_world_size)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (place.world_size,), mesh_dim_names=("shard",))


def choose_precision(strategy: Strategy) -> MixedPrecisionPolicy:
    """fp32 weights with 16-bit arithmetic are cast as they are gathered, and reduced in fp32.

    Everything else computes in the dtype it is stored in, or under autocast.
    """
    is_mixed = strategy.weights is Dtype.FP32 and strategy.compute is not Dtype.FP32
    if not is_mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(strategy.compute), reduce_dtype=torch_dtype(Dtype.FP32)
    )


def choose_offload(strategy: Strategy, place: Place) -> OffloadPolicy:
    if strategy.offload is Offload.NONE:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=place.device.type == "cuda")
