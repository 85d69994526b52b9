"""Gpu, Node, NodeGroup, Cluster, and the rates that `tightfit calibrate` measured for a device."""

from __future__ import annotations

from typing import Any

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import FiniteFrozen, Frozen

MAX_COUNT = 65_536
"""Of nodes or GPUs; more is a slip of the keyboard."""

# MeasuredRates: what `tightfit calibrate` found one device to sustain, as estimates read it.

MatmulRow = tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat]
"""m, n, k and seconds of an (m x k) by (k x n) product."""
AttentionRow = tuple[PositiveInt, PositiveInt, PositiveFloat, PositiveFloat]
"""Head width, length, and causal FLOP/s forward and backward."""
BandwidthRow = tuple[PositiveInt, PositiveFloat]
"""Bytes of one tensor, and bytes per second read and written together."""
FP8, FP8_EXACT = "fp8", "fp8-exact"
FP8_KINDS = (FP8, FP8_EXACT)
"""No dtypes that a strategy stores or computes in: products alone are in them. The forward pass
keeps fewer bits of its long sums, which is faster; the backward pass keeps all."""


class MeasuredRates(FiniteFrozen):
    """Rates of one device; what was not measured is None or empty and stays the catalogue's.

    Times are the device's own: the gap to the next kernel is not in them.
    """

    date: str
    """UTC, the day alone."""
    matmuls: dict[str, tuple[MatmulRow, ...]] = Field(default_factory=dict)
    """By dtype; fp32 is true fp32. After a rest."""
    sustained_fraction: PositiveFloat | None = None
    """Of those rates, what is left when a card does nothing but products: its power limit."""
    attention: tuple[AttentionRow, ...] = ()
    """SDPA, in values as wide as the device trains in."""
    masked_attention: tuple[AttentionRow, ...] = ()
    """Likewise with a mask as a matrix, over all pairs."""
    document_attention: tuple[AttentionRow, ...] = ()
    """Likewise over documents laid end to end, by their length."""
    attention_value_bytes: PositiveInt = 2
    score_seconds: dict[str, tuple[PositiveFloat, PositiveFloat]] = Field(default_factory=dict)
    """Seconds per query, key and head, forward and backward, where scores are written out:
    `eager` as transformers does, `math` as SDPA does without a fused kernel."""
    copies: tuple[BandwidthRow, ...] = ()
    elementwise: tuple[BandwidthRow, ...] = ()
    indexed_values_per_second: PositiveFloat | None = None
    """Values of broadcast and widened tensors."""
    loss_bytes_per_second: PositiveFloat | None = None
    """Cross entropy in fp32 over 16-bit logits, by the traffic that the estimate counts."""
    adamw_seconds_per_param: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Fused, by the dtype of weights and state."""
    adamw_kernel_seconds_per_param: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Likewise by our kernel, clipping included; empty where it does not run or errs."""
    nf4_weights_per_second: PositiveFloat | None = None
    kernel_gap_seconds: NonNegativeFloat | None = None
    host_forward_seconds: PositiveFloat | None = None
    """Per kernel as the estimate counts them, over a decoder layer of transformers."""
    host_backward_seconds: PositiveFloat | None = None
    host_checkpoint_seconds: NonNegativeFloat | None = None
    """Per recomputed layer, beyond its kernels."""
    host_adapter_forward_seconds: NonNegativeFloat | None = None
    """Per LoRA module in the model's own dtype, its kernels included."""
    host_adapter_backward_seconds: float | None = None
    """Likewise; below nothing where frozen weights save more than the adapter costs."""
    context_bytes: PositiveInt | None = None
    """A process's memory on the card outside torch's allocator."""
    host_link_bytes_per_second: PositiveFloat | None = None
    """Pinned copies, the slower direction."""
    link_bytes_per_second: PositiveFloat | None = None
    """What a ring between the node's GPUs moves."""
    link_latency_seconds: NonNegativeFloat | None = None


class Price(Frozen):
    """What one GPU costs per hour at one place, on demand."""

    cloud: str
    usd_per_gpu_hour: PositiveFloat
    """The median over that cloud's offers."""
    usd_per_gpu_hour_min: PositiveFloat | None = None
    usd_per_gpu_hour_spot: PositiveFloat | None = None
    includes_host: bool = True
    """False where the machine around the GPU is billed apart."""
    date: str
    source: str


class Gpu(Frozen):
    """One GPU model. Rates are the vendor's dense peaks unless measured."""

    name: str
    marketing_gb: PositiveFloat
    memory_bytes: PositiveInt
    """What torch can see: the smallest total that was reported for this card."""
    compute_capability: tuple[int, int] | None
    """None for cards that are not NVIDIA's, and for CPUs."""
    peak_flops: dict[str, float]
    """By `fp32`, `tf32`, `fp16`, `bf16`, `fp8`; a missing key means the card has no such units."""
    memory_bytes_per_second: PositiveFloat
    nvlink_bytes_per_second: PositiveFloat | None = None
    """One direction, all links together. None: PCIe only."""
    nvlink_needs_bridge: bool = False
    """A pair of cards needs a bridge bought apart: counted only where a node says it has one."""
    pcie_bytes_per_second: PositiveFloat
    """One direction, on paper."""
    peer_bytes_per_second: PositiveFloat | None = None
    """One direction between two cards over PCIe, where it was measured and is far from what PCIe
    gives others: GeForce cards without peer access go through host memory."""
    supports_bf16: bool
    is_cpu: bool = False
    """Not a card but one process's share of a machine's cores and free RAM."""
    achievable_bf16_flops: PositiveFloat | None = None
    """The best matrix multiplication that was measured, where someone did."""
    tdp_watts: PositiveFloat | None = None
    measured: MeasuredRates | None = None
    """What `tightfit calibrate` found this very device to sustain; estimates then go by it."""
    prices: tuple[Price, ...] = ()
    source: str
    notes: str = ""

    @model_serializer(mode="wrap")
    def _leave_out_what_was_not_measured(
        self, serialize: SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        """Plans and catalogues of uncalibrated devices say nothing of it."""
        found: dict[str, Any] = serialize(self)
        for name in ("measured", "peer_bytes_per_second"):
            if getattr(self, name) is None:
                found.pop(name, None)
        return found

    @property
    def measured_context_bytes(self) -> int | None:
        """A process's memory outside torch's allocator, where it was measured."""
        return None if self.measured is None else self.measured.context_bytes

    @property
    def cheapest(self) -> Price | None:
        """The offer of the cloud whose median is the lowest: what a plan is priced by."""
        return self.cheapest_at(None)

    def cheapest_at(self, clouds: frozenset[str] | None) -> Price | None:
        """The same among `clouds` alone, where they are named."""
        offers = [price for price in self.prices if clouds is None or price.cloud in clouds]
        return min(offers, key=lambda price: (price.usd_per_gpu_hour, price.cloud), default=None)

    def flops(self, dtype: Dtype) -> float:
        """Dense peak for arithmetic in `dtype`; fp32 where the card has no faster units for it."""
        return self.peak_flops.get(dtype.value, self.peak_flops["fp32"])


class Node(Frozen):
    """One machine with identical GPUs. A None was not stated and is assumed by the planner."""

    gpu: Gpu
    num_gpus: PositiveInt
    host_memory_bytes: PositiveInt | None = None
    num_cores: PositiveInt | None = None
    shm_bytes: PositiveInt | None = None
    disk_bytes: PositiveInt | None = None
    free_gpu_memory_bytes: PositiveInt | None = None
    """Measured free memory of the fullest GPU, where a probe saw it."""
    has_nvlink: bool | None = None
    """None: as the GPU model usually comes."""

    @property
    def link_bytes_per_second(self) -> float:
        """GPU to GPU inside the node, one direction."""
        usual = not self.gpu.nvlink_needs_bridge
        wants_nvlink = self.has_nvlink if self.has_nvlink is not None else usual
        if wants_nvlink and self.gpu.nvlink_bytes_per_second is not None:
            return self.gpu.nvlink_bytes_per_second
        return self.gpu.pcie_bytes_per_second


class NodeGroup(Frozen):
    """Identical nodes under one name: a partition, a node pool, or a phrase like `2n x 4xA100`."""

    name: str
    node: Node
    num_nodes: PositiveInt
    num_free_nodes: int | None = None
    max_seconds: NonNegativeFloat | None = None
    """Time limit of the partition."""
    num_free_gpus: int | None = None
    """GPUs no job holds, on nodes that take jobs, where a probe saw it."""


class Cluster(Frozen):
    """Groups of nodes; jobs run inside one group."""

    groups: tuple[NodeGroup, ...]
    network_bytes_per_second: PositiveFloat | None = None
    """Between nodes, one direction. None was not stated."""
    source: str
    """`words`, `here`, `slurm`, `k8s` or a file name."""
    warnings: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(group.num_nodes * group.node.num_gpus for group in self.groups)
