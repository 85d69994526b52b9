"""Kernels of a pass, and what the host takes to start them."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Strategy
from tightfit.estimate import efficiency as eff
from tightfit.estimate.flops import Adapters, Workload

ADAPTER_KERNELS = 4
"""Of a LoRA module in the model's own dtype: two products, a scaling, a sum."""
FOLDED_KERNELS = 2
"""Of a folded one: the two products."""


def count_forward_kernels(
    work: Workload, adapters: Adapters, strategy: Strategy, *, is_rms_norm: bool
) -> float:
    """Kernels of one forward pass through the blocks."""
    fused = strategy.fused_kernels or strategy.compile
    norm = 1 if fused or not is_rms_norm else 6
    rotary = 1 if fused else 10
    attention = 8 if strategy.attention is Attention.EAGER else 2
    around = 2 if strategy.compile else 4
    is_plain = strategy.weights is strategy.compute and not strategy.stores_fp8
    linear = 1 if is_plain else 3  # unpacked, or its input cast, which triton starts
    if strategy.has_fp8 and not strategy.stores_fp8:
        linear = 8  # its weight too; backward, what its gradient is made of
    return (
        norm * (work.num_norms + work.num_head_norms)
        + (rotary + attention) * work.num_attentions
        + around * work.num_layers
        + linear * work.num_linears_used
        + count_adapter_kernels(strategy) * adapters.num_used
        + 20 * work.num_expert_layers
    )


def count_adapter_kernels(strategy: Strategy) -> int:
    """Of one LoRA module in a forward pass; another dtype needs three casts."""
    if strategy.folded_adapters:
        return FOLDED_KERNELS
    if strategy.compile:
        return 3
    return ADAPTER_KERNELS if strategy.adapter_dtype is not Dtype.FP32 else 7


def host_launch_seconds(
    kernels: float, adapters: Adapters, strategy: Strategy, rates: eff.Rates
) -> tuple[float, float]:
    """The host's time to start the kernels of a forward pass, and of its backward pass."""
    told = rates.measured
    each = count_adapter_kernels(strategy)
    beyond = eff.HOST_FOLDED_KERNELS if strategy.folded_adapters else eff.HOST_ADAPTER_KERNELS
    if (
        told is None
        or told.host_adapter_forward_seconds is None
        or told.host_adapter_backward_seconds is None
    ):
        calls = kernels + beyond * adapters.num_used
        return calls * rates.host_forward_seconds, 2 * calls * rates.host_backward_seconds
    plain = kernels - each * adapters.num_used
    # Measured of peft's own forward without casts, whose Python stays the same.
    wider = (each + beyond) / (ADAPTER_KERNELS + eff.HOST_ADAPTER_KERNELS)
    times = wider * adapters.num_used
    forward = plain * rates.host_forward_seconds + times * told.host_adapter_forward_seconds
    backward = 2 * plain * rates.host_backward_seconds
    return forward, max(0.0, backward + times * told.host_adapter_backward_seconds)
