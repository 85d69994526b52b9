"""Buffers: gathered weights, unsharded gradients, buckets, casts and dequantized copies."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Sharding, Strategy
from tightfit.estimate.activations import uses_autocast
from tightfit.estimate.weights import (
    estimate_weight_bytes,
    largest_layer,
    largest_matrix,
    layer_adapter_params,
    outside_params,
)
from tightfit.models.spec import ModelSpec

ZERO3_LIVE_VALUES = 1_000_000_000
"""DeepSpeed `stage3_max_live_parameters`, its default. Source: DeepSpeed configuration docs."""
ZERO_BUCKET_VALUES = 200_000_000
"""`reduce_bucket_size` and `allgather_bucket_size` that transformers' examples set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferBytes:
    """Unsharded copies on one GPU at the moments that can set the peak."""

    forward: int
    """From the first layer to the loss."""
    backward: int
    """While a layer's gradients are made and reduced."""
    step: int
    """During the optimizer step."""
    casts_forward: int
    """16-bit copies of fp32 weights alive at the loss."""
    casts_backward: int
    dequantized: int
    """One unpacked matrix at a time."""


def estimate_buffer_bytes(spec: ModelSpec, strategy: Strategy) -> BufferBytes:
    """Copies that sharding, autocast and quantization make.

    FSDP2 with one group per layer: the layer in use and the next one, gathered;
    the group of embeddings and head stays gathered; a layer's gradients exist
    unsharded, and once more as the reduce-scatter's input.
    ZeRO-3 keeps up to `stage3_max_live_parameters` gathered.
    Leaves out DDP's buckets: gradients are views into them.
    Source: torch fully_shard notes; DeepSpeed configuration docs.
    """
    casts_forward, casts_backward = _cast_bytes(spec, strategy)
    dequantized = 2 * largest_matrix(spec) if strategy.weights.is_quantized else 0
    forward, backward, step = _gathered_bytes(spec, strategy)
    return BufferBytes(
        forward=forward,
        backward=backward,
        step=step,
        casts_forward=casts_forward,
        casts_backward=casts_backward,
        dequantized=dequantized,
    )


def _cast_bytes(spec: ModelSpec, strategy: Strategy) -> tuple[int, int]:
    """Autocast keeps each 16-bit copy: of trained weights until its context ends, of frozen ones
    in the graph until their layer's backward, and then only if the layer is not recomputed."""
    if not uses_autocast(strategy):
        return 0, 0
    copies = 2 * (sum(block.num_params for block in spec.blocks) + spec.embedding_params)
    kept = 0 if strategy.checkpointing else copies
    return (copies if strategy.method is Method.FULL else kept), kept


def _layer_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """One gathered layer in the dtype that modules see."""
    num_values = largest_layer(spec)
    if strategy.weights.is_quantized:
        weights = estimate_weight_bytes(spec, strategy)
        blocks = max(1, spec.linear_params)
        return int((weights.packed + weights.quantization_state) * num_values / blocks)
    return num_values * strategy.compute.value_bytes


def _gathered_bytes(spec: ModelSpec, strategy: Strategy) -> tuple[int, int, int]:
    sharding = strategy.sharding
    value = strategy.compute.value_bytes
    if sharding in (Sharding.ZERO1, Sharding.ZERO2):
        bucket = 2 * ZERO_BUCKET_VALUES
        return 0, bucket, bucket
    if not sharding.shards_weights:
        return 0, 0, 0
    outside = outside_params(spec) * value
    layer = _layer_bytes(spec, strategy)
    gradients = _layer_gradient_bytes(spec, strategy)
    whole = _model_bytes(spec, strategy)
    if sharding is Sharding.ZERO3:
        live = min(whole, ZERO3_LIVE_VALUES * value + layer)
        bucket = 2 * spec.hidden_size**2 * value
        return live, live + gradients + bucket, 0
    if sharding is Sharding.FSDP_GRAD_OP:
        return whole, whole + 2 * gradients, 0
    forward = min(whole, 2 * layer + outside)
    return forward, forward + 2 * gradients, 0


def _model_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    if strategy.weights.is_quantized or strategy.compute is Dtype.FP32:
        return estimate_weight_bytes(spec, strategy).total
    return spec.num_params * strategy.compute.value_bytes


def _layer_gradient_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    if strategy.method is Method.FULL:
        return largest_layer(spec) * strategy.compute.value_bytes
    if strategy.method is Method.LORA:
        values = max(layer_adapter_params(block, strategy) for block in spec.blocks)
        return values * strategy.adapter_dtype.value_bytes
    return 0
