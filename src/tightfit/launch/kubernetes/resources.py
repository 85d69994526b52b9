"""What one pod asks for, by the plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tightfit.core.units import GIB, MIB
from tightfit.launch.margins import estimate_memory_request
from tightfit.planning.plan import Plan

CORES_PER_GPU = 4
"""One that feeds the GPU, the others for data, checkpoints and the network."""
DEFAULT_CORES = 4
"""Of a CPU job on a node whose cores nobody stated."""
NODE_SHARE = 0.9
"""Of a node's cores and memory; the rest is for the cluster's own pods on it."""
SHM_BYTES_PER_RANK = GIB
"""RAM disk for NCCL and gloo inside a pod; a container's own has 64 MiB."""
STAGED_FACTOR = 1.05
"""Files of a staged model beside its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """Requests of one pod, which are its limits too: such pods are evicted last."""

    num_gpus: int = 0
    num_cores: int
    memory_bytes: int
    """Of the processes."""
    shm_bytes: int = 0
    """RAM disk at /dev/shm; the kernel counts it as the pod's memory."""

    @property
    def total_memory_bytes(self) -> int:
        return self.memory_bytes + self.shm_bytes

    @property
    def num_threads(self) -> int:
        """Per process: a container sees all cores of its node, whatever it asked for."""
        return max(self.num_cores // max(self.num_gpus, 1), 1)


def read_resources(plan: Plan, *, staged_bytes: int = 0) -> PodResources:
    """One pod is one node of the plan. `staged_bytes` of a model go to the RAM disk."""
    strategy = plan.strategy
    is_cpu = plan.hardware.node.gpu.is_cpu
    ranks = strategy.gpus_per_node
    return PodResources(
        num_gpus=0 if is_cpu else ranks,
        num_cores=_count_cores(plan),
        memory_bytes=_round_up(_count_memory(plan)),
        shm_bytes=_round_up(ranks * SHM_BYTES_PER_RANK + int(staged_bytes * STAGED_FACTOR)),
    )


def _count_cores(plan: Plan) -> int:
    node, ranks = plan.hardware.node, plan.strategy.gpus_per_node
    stated = node.num_cores
    if node.gpu.is_cpu:
        return max(int((stated or DEFAULT_CORES) * NODE_SHARE), ranks, 1)
    wanted = ranks * CORES_PER_GPU
    if stated is None:
        return wanted
    share = int(stated * NODE_SHARE * ranks / node.num_gpus)
    return max(min(wanted, share), 1)


def _count_memory(plan: Plan) -> int:
    stated = plan.hardware.node.host_memory_bytes
    most = None if stated is None else int(stated * NODE_SHARE)
    return estimate_memory_request(plan, most_bytes=most)


def _round_up(num_bytes: int) -> int:
    """To 256 MiB: figures that people can read."""
    return ceil(num_bytes / (256 * MIB)) * 256 * MIB


def write_quantity(num_bytes: int) -> str:
    """Bytes as a quantity, without a rounding."""
    for factor, suffix in ((GIB, "Gi"), (MIB, "Mi")):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{suffix}"
    return str(num_bytes)
