"""Traffic between GPUs, between nodes, and between a GPU and its host, in seconds."""

from __future__ import annotations

from functools import partial
from math import lcm
from typing import NamedTuple

from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy
from tightfit.hardware.types import Node
from tightfit.models.spec import ModelSpec

NVLINK_FRACTION = 0.80
"""Ring collectives over NVLink, of one direction on paper: 235 of 300e9 on 8xA100, 361 to 367
of 450e9 on 8xH200. Source: ml-engineering, network/README.md."""
PCIE_FRACTION = 0.40
"""Ring collectives over PCIe. NCCL's own topology model counts 24e9 of 31.5e9 behind one host
bridge and 10e9 between sockets (log in github NVIDIA/nccl-tests issue 307); cards without
peer-to-peer go through host memory."""
NETWORK_FRACTION = 0.80
"""Collectives between nodes, of the adapters' speed. Source: ml-engineering, as above."""
HOST_COPY_FRACTION = 0.87
"""Pinned copies over PCIe: 55.4 of 63e9. Source: ml-engineering, as above."""
INSIDE_LATENCY_SECONDS = 20e-6
"""A gather of next to no bytes: half an all-reduce, 32 KiB at 0.82e9 B/s over 8 GPUs. As above."""
NETWORK_LATENCY_SECONDS = 35e-6
"""The same over 4 nodes: 32 KiB at 0.48e9 B/s. As above."""
ASSUMED_NETWORK_BYTES_PER_SECOND = 1.25e9
"""10 Gbit/s Ethernet: a lower bound for a cluster that states nothing."""
UNSTATED_NETWORK = (
    "the network between nodes was not stated: 10 Gbit/s is assumed (--network 100Gb/s states it)"
)

OVERLAP_FRACTION = 0.80
"""Share of the compute time that can hide transfers. Assumed: prefetching is one layer deep."""
LEAST_EXPOSED_FRACTION = 0.20
"""Share of a transfer that is never hidden: the first and last layers, and the slower kernels
beside which a collective runs."""

HOST_BYTES_PER_SECOND_PER_CORE = 8e9
"""Assumed."""
MOST_HOST_BYTES_PER_SECOND = 150e9
"""Assumed: two sockets of DDR4, as a streaming program sees them."""
ASSUMED_HOST_BYTES_PER_SECOND = 100e9
"""Where the number of cores is unknown."""
HOST_ADAM_BYTES = 30.0
"""Weight, gradient and two moments in fp32 read, all but the gradient written, a 16-bit copy made.
Source: ZeRO-Offload, arXiv:2101.06840."""


class Links(NamedTuple):
    """Bytes per second that a GPU gets, after protocol losses."""

    inside: float
    """To its neighbour in the node."""
    network: float
    """One node to another, shared by the node's GPUs."""
    host: float
    """To host memory."""
    host_memory: float
    """Host memory itself, shared by the node's GPUs."""
    inside_latency: float = INSIDE_LATENCY_SECONDS
    """Seconds of a gather of next to no bytes inside the node."""


class Payload(NamedTuple):
    """Bytes to move for one whole copy of the model."""

    weight_bytes: float
    """As gathered for one pass."""
    gradient_bytes: float
    updated_bytes: float
    """Trained values as they are sent back after an update."""
    num_trainable: int
    num_units: int
    """Layers, which are gathered one by one."""
    checkpoint_bytes: float = 0.0
    """Inputs of recomputed layers that one rank copies to the host in each forward pass, and back
    in each backward pass."""


class Exchange(NamedTuple):
    """All-to-alls of attention over rows that several GPUs share, of one micro-batch."""

    num_bytes: float = 0.0
    """What each GPU sends to others."""
    num_calls: float = 0.0


class Transfers(NamedTuple):
    """Seconds of transfers, before any overlap with compute."""

    forward: float = 0.0
    """In each forward pass."""
    backward: float = 0.0
    """In each backward pass."""
    last_backward: float = 0.0
    """Beside the last backward pass of the step only."""
    update: float = 0.0
    """After the backward pass, without overlap."""


def find_links(node: Node, *, network_bytes_per_second: float | None) -> Links:
    """Effective speeds of a node's links; an unstated network is assumed (`describe_network`)."""
    paper, measured = node.link_bytes_per_second, node.gpu.measured
    over_nvlink = paper == node.gpu.nvlink_bytes_per_second
    network = network_bytes_per_second or ASSUMED_NETWORK_BYTES_PER_SECOND
    host_memory = ASSUMED_HOST_BYTES_PER_SECOND
    if node.num_cores is not None:
        host_memory = min(
            node.num_cores * HOST_BYTES_PER_SECOND_PER_CORE, MOST_HOST_BYTES_PER_SECOND
        )
    inside = paper * (NVLINK_FRACTION if over_nvlink else PCIE_FRACTION)
    if not over_nvlink:
        inside = node.gpu.peer_bytes_per_second or inside
    host = node.gpu.pcie_bytes_per_second * HOST_COPY_FRACTION
    latency = INSIDE_LATENCY_SECONDS
    if measured is not None:
        inside = measured.link_bytes_per_second or inside
        host = measured.host_link_bytes_per_second or host
        latency = measured.link_latency_seconds or latency
    return Links(
        inside=inside,
        network=network * NETWORK_FRACTION,
        host=host,
        host_memory=host_memory,
        inside_latency=latency,
    )


def describe_network(strategy: Strategy, network_bytes_per_second: float | None) -> str | None:
    """The note for plans over several nodes whose network is assumed."""
    if strategy.num_nodes == 1 or network_bytes_per_second is not None:
        return None
    return UNSTATED_NETWORK


def gather_seconds(
    num_bytes: float, links: Links, *, num_nodes: int, gpus_per_node: int, num_calls: int = 1
) -> float:
    """All-gather to, or reduce-scatter of, `num_bytes` in total, as a ring.

    Each rank passes on all but its own share; between nodes the ring crosses
    each node's adapters once, so the slower of link and network sets the pace.
    Scope: rings; NVLink SHARP and trees are faster for all-reduce.
    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009).
    """
    ranks = num_nodes * gpus_per_node
    if ranks == 1:
        return 0.0
    moved = num_bytes * (ranks - 1) / ranks
    seconds = moved / links.inside if gpus_per_node > 1 else 0.0
    latency = links.inside_latency
    if num_nodes > 1:
        seconds = max(seconds, moved / links.network)
        latency = NETWORK_LATENCY_SECONDS
    return seconds + num_calls * latency


BUCKET_BYTES = 25e6
"""Gradients travel in buckets of this size. Source: torch DistributedDataParallel."""


def estimate_transfers(strategy: Strategy, links: Links, payload: Payload) -> Transfers:
    """Collectives of one step.

    DDP and ZeRO-1 reduce gradients beside the last backward pass, ZeRO-2 beside
    each; ZeRO-1 and 2 then share out the updated values. FSDP and ZeRO-3 gather
    every weight, frozen or not, for each forward and again for each backward
    pass, and reduce-scatter gradients each time. Grad-op sharding keeps the
    weights after the forward pass. Hybrid does all that inside the node and
    reduces the shards' gradients between nodes. LoRA has gradients of its
    adapters only, but its frozen weights are gathered all the same.
    Source: ZeRO arXiv:1910.02054 section 7; PyTorch FSDP arXiv:2304.11277.
    """
    sharding = strategy.sharding
    nodes, gpus = strategy.num_nodes, strategy.gpus_per_node
    everywhere = partial(gather_seconds, links=links, num_nodes=nodes, gpus_per_node=gpus)
    buckets = 1 + int(payload.gradient_bytes / BUCKET_BYTES)
    if strategy.world_size == 1 or sharding is Sharding.SINGLE:
        return Transfers()
    if not sharding.shards_weights:
        # An all-reduce is a reduce-scatter, then an all-gather.
        reduced = 2.0 * everywhere(payload.gradient_bytes, num_calls=buckets)
        if sharding is Sharding.DDP:
            return Transfers(last_backward=reduced)
        each = {"backward" if sharding is Sharding.ZERO2 else "last_backward": reduced / 2}
        return Transfers(**each, update=everywhere(payload.updated_bytes))
    hybrid = sharding is Sharding.FSDP_HYBRID
    shard_nodes = 1 if hybrid else nodes
    units = payload.num_units
    gathered, scattered = (
        gather_seconds(num_bytes, links, num_nodes=shard_nodes, gpus_per_node=gpus, num_calls=units)
        for num_bytes in (payload.weight_bytes, payload.gradient_bytes)
    )
    if not strategy.is_trained:
        return Transfers(forward=gathered)
    between = 0.0
    if hybrid and nodes > 1:
        # All GPUs of a node send their own shard at once: together, one gradient per node.
        between = 2.0 * gather_seconds(
            payload.gradient_bytes, links, num_nodes=nodes, gpus_per_node=1, num_calls=units
        )
    again = 0.0 if sharding is Sharding.FSDP_GRAD_OP else gathered
    return Transfers(forward=gathered, backward=again + scattered + between)


EXCHANGES_PER_LAYER = 4
"""Queries, keys, values, and the output back."""


def count_exchanged_bytes(
    spec: ModelSpec, strategy: Strategy, *, tokens: float, num_passes: float
) -> Exchange:
    """What context parallel sends: `tokens` are those of a GPU's slice.

    Each GPU keeps one part of every tensor and sends the others. Grouped keys and values are
    repeated until the heads are a multiple of the GPUs. A backward pass sends as much as a forward
    pass, and recomputed layers send theirs again.
    Source: DeepSpeed Ulysses, arXiv:2309.14509; training/context_parallel.py.
    """
    size = strategy.context_parallel
    if size == 1:
        return Exchange()
    heads = 2 * spec.num_heads + 2 * lcm(spec.num_kv_heads, size)
    values = calls = 0
    for block in spec.blocks:
        if block.attends:
            values += block.num_layers * heads * (block.head_dim or spec.head_dim)
            calls += block.num_layers * EXCHANGES_PER_LAYER
    sent = tokens * values * strategy.compute.value_bytes * (size - 1) / size
    return Exchange(num_bytes=num_passes * sent, num_calls=num_passes * calls)


def exchange_seconds(strategy: Strategy, links: Links, exchange: Exchange) -> float:
    """Nothing hides it: attention waits for its heads, and what follows for its tokens.

    Inside a node each GPU sends to all others over its own link. Between nodes all GPUs of a node
    send at once through its adapters.
    """
    size, gpus = strategy.context_parallel, strategy.gpus_per_node
    if size == 1:
        return 0.0
    near = min(size, gpus)
    inside = exchange.num_bytes * (near - 1) / (size - 1)
    seconds = inside / links.inside
    latency = links.inside_latency
    if size > near:
        between = gpus * (exchange.num_bytes - inside)
        seconds = max(seconds, between / links.network)
        latency = NETWORK_LATENCY_SECONDS
    return seconds + exchange.num_calls * latency


def estimate_offload(strategy: Strategy, links: Links, payload: Payload) -> Transfers:
    """Copies to and from the host, and the update done there.

    An offloaded optimizer takes the gradients down beside each backward pass,
    updates in host memory (all ranks of a node share its bandwidth), and sends
    the new values up. Offloaded weights come up for each pass.
    Inputs of recomputed layers go down beside the forward pass and come up beside the backward
    pass, over the bus of each GPU and the memory that they share.
    Source: ZeRO-Offload arXiv:2101.06840.
    """
    shards = strategy.num_shards
    shared = min(links.host, links.host_memory / strategy.gpus_per_node)
    inputs = payload.checkpoint_bytes / shared
    weights = payload.weight_bytes / shards / links.host if strategy.offload.moves_params else 0.0
    if not strategy.is_trained:
        return Transfers(forward=weights)
    down = update = 0.0
    if strategy.offload.moves_optimizer:
        down = payload.gradient_bytes / shards / links.host
        copies_per_node = strategy.gpus_per_node / shards
        adam = payload.num_trainable * copies_per_node * HOST_ADAM_BYTES / links.host_memory
        up = 0.0 if strategy.offload.moves_params else payload.updated_bytes / shards / links.host
        update = adam + up
    return Transfers(forward=weights + inputs, backward=weights + down + inputs, update=update)


def exposed_seconds(transfer: float, *, compute: float) -> float:
    """The part of a transfer that does not overlap with compute."""
    return max(transfer - OVERLAP_FRACTION * compute, LEAST_EXPOSED_FRACTION * transfer)
