"""What the planner takes for granted where the hardware was given as mere words."""

from __future__ import annotations

from tightfit.core.units import render_bytes
from tightfit.hardware.types import Node

HOST_BYTES_PER_GPU_BYTE = 2
"""Host memory of an unstated node, by the memory of its GPUs together.

Rented nodes have 0.7x (g5.xlarge) to 4x (g5.48xlarge, p3.8xlarge); 2x is a2-highgpu-1g.
Without an assumption, offload would seem to fit any model on any card.
"""


def assume_host(node: Node) -> Node:
    """The node with its host memory filled in, where it was not stated."""
    if node.host_memory_bytes is not None:
        return node
    assumed = HOST_BYTES_PER_GPU_BYTE * node.num_gpus * node.gpu.memory_bytes
    return node.model_copy(update={"host_memory_bytes": assumed})


def describe_assumption(stated: Node, assumed: Node) -> tuple[str, ...]:
    """The sentence that says so, where something was assumed."""
    if stated.host_memory_bytes is not None or assumed.host_memory_bytes is None:
        return ()
    size = render_bytes(assumed.host_memory_bytes)
    return (f"host memory was not stated: {size} per node is assumed (twice the GPUs' memory)",)
