"""MeasuredRates: what `tightfit calibrate` found one device to sustain, as estimates read it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

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


class MeasuredRates(BaseModel):
    """Rates of one device; what was not measured is None or empty and stays the catalogue's.

    Times are the device's own: the gap to the next kernel is not in them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    date: str
    """UTC, the day alone."""
    matmuls: dict[str, tuple[MatmulRow, ...]] = {}
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
    score_seconds: dict[str, tuple[PositiveFloat, PositiveFloat]] = {}
    """Seconds per query, key and head, forward and backward, where scores are written out:
    `eager` as transformers does, `math` as SDPA does without a fused kernel."""
    copies: tuple[BandwidthRow, ...] = ()
    elementwise: tuple[BandwidthRow, ...] = ()
    indexed_values_per_second: PositiveFloat | None = None
    """Values of broadcast and widened tensors."""
    loss_bytes_per_second: PositiveFloat | None = None
    """Cross entropy in fp32 over 16-bit logits, by the traffic that the estimate counts."""
    adamw_seconds_per_param: dict[str, PositiveFloat] = {}
    """Fused, by the dtype of weights and state."""
    adamw_kernel_seconds_per_param: dict[str, PositiveFloat] = {}
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
