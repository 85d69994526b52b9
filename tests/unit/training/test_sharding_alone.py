"""Sharding on one process: without torchrun there is no group to join."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy
from tightfit.training.distributed import DistContext, destroy_dist_context
from tightfit.training.sharding import make_mesh

CONTEXT = DistContext(
    rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu")
)


def test_a_mesh_of_one_needs_no_torchrun() -> None:
    assert not dist.is_initialized()
    try:
        assert make_mesh(Strategy(sharding=Sharding.FSDP), CONTEXT).size() == 1
    finally:
        destroy_dist_context()
