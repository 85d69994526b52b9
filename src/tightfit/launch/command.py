"""The worker's command line and environment, built from the plan alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tightfit.core.training import MEMORY_VARIABLE
from tightfit.launch.rendezvous import Rendezvous
from tightfit.planning.plan import Plan

WORKER = "tightfit.train.worker"
RUN_VARIABLE = "TIGHTFIT_RUN"
"""Marks every process of a run, so that leftovers of a killed launcher can be told apart."""
LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 3600
"""How long a node waits for the others, at the start and after one was lost."""


def worker_command(
    plan: Plan,
    run: Path,
    rendezvous: Rendezvous | None = None,
    *,
    attempt: int = 0,
    worker: str = WORKER,
) -> list[str]:
    """Plain Python for one process, torchrun for several.

    `attempt` keeps nodes that still meet for an abandoned plan apart from those of the next.
    """
    strategy = plan.strategy
    if strategy.world_size == 1 and rendezvous is None:
        return [sys.executable, "-m", worker, str(run)]
    meet = rendezvous or Rendezvous(
        endpoint=f"{LOOPBACK}:0", local_address=LOOPBACK, max_restarts=0
    )
    options = {
        "--nnodes": strategy.num_nodes,
        "--nproc-per-node": strategy.gpus_per_node,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": meet.endpoint,
        "--rdzv-id": f"{run.name}-{attempt}",
        "--rdzv-conf": _rendezvous_settings(meet),
        "--max-restarts": meet.max_restarts,
    }
    if meet.local_address is not None:
        options["--local-addr"] = meet.local_address
    words = [word for name, value in options.items() for word in (name, str(value))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words]
    return [*torchrun, "-m", "tightfit.launch.elastic", worker, str(run)]


def _rendezvous_settings(meet: Rendezvous) -> str:
    settings = f"join_timeout={JOIN_SECONDS}"
    if meet.is_here is None:
        return settings
    return f"{settings},is_host={str(meet.is_here).lower()}"


def worker_environment(
    plan: Plan,
    rendezvous: Rendezvous | None = None,
    *,
    mark: str,
    num_cores: int,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """What is added to the inherited environment; what the user has set stays.

    `mark` names the run and, where there are several, the node.
    """
    strategy = plan.strategy
    wanted = {
        "OMP_NUM_THREADS": str(max(num_cores // strategy.gpus_per_node, 1)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # every file is local by now
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if plan.hardware.node.gpu.compute_capability is not None:
        # The older of two names: torch 2.9 to 2.11 read the newer one but pass over this setting
        # in it (github.com/pytorch/pytorch/issues/183387); 2.13 reads the older one first.
        if "PYTORCH_ALLOC_CONF" not in inherited:
            wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        wanted["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML and nvidia-smi count
    elif inherited.get(MEMORY_VARIABLE):
        # On ARM torch's allocator takes a gigabyte at once, within which no limit would hold.
        wanted["MIMALLOC_DISALLOW_ARENA_ALLOC"] = "1"
    if rendezvous is not None:
        # Without it a node that stayed keeps the first round's address to itself, and one that
        # came back waits a minute for it in vain (torch 2.13, dynamic_rendezvous.py).
        wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if rendezvous is not None and rendezvous.interface is not None:
        wanted["NCCL_SOCKET_IFNAME"] = rendezvous.interface
        wanted["GLOO_SOCKET_IFNAME"] = rendezvous.interface
    kept = {name: value for name, value in wanted.items() if name not in inherited}
    return {**kept, RUN_VARIABLE: mark}
