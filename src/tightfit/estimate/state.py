"""State: gradients and optimizer, with their sharding, offload and temporaries."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tightfit.core.strategy import Method, Optimizer, Sharding, Strategy
from tightfit.estimate.weights import (
    adapter_params,
    estimate_weight_bytes,
    largest_layer,
    num_trainable,
    retrained_params,
)
from tightfit.models.spec import ModelSpec

BLOCKWISE_STATE_BYTES = 2 + 2 * 4 / 256
"""Two 8-bit moments with an fp32 scale per 256 values each. Source: arXiv:2110.02861, bitsandbytes."""
ZERO_MASTER_BYTES = 4
"""DeepSpeed keeps fp32 weights beside the 16-bit ones. Source: ZeRO, arXiv:1910.02054, K = 12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What one GPU holds between steps, and what the host holds for it."""

    weights: int
    quantization: int
    adapters: int
    gradients: int
    optimizer: int
    optimizer_temporary: int
    """Only inside the optimizer step."""
    host_weights: int
    """Host memory of this rank: offloaded weights and their gradients."""
    host_optimizer: int


def trained_value_bytes(strategy: Strategy) -> int:
    """Width of a trained value, its gradient and its moments: torch keeps the three alike."""
    if strategy.method is Method.LORA:
        return strategy.adapter_dtype.value_bytes
    return 2 if strategy.weights.is_quantized else strategy.weights.value_bytes


def optimizer_bytes_per_value(strategy: Strategy) -> float:
    """Moments of one trained value, and its fp32 master copy under ZeRO.

    torch keeps moments in the parameter's dtype. Adafactor's row and column
    sums are three orders of magnitude smaller and count as nothing here.
    """
    is_zero = strategy.sharding.is_zero
    value = 4 if is_zero else trained_value_bytes(strategy)
    moments = {
        Optimizer.ADAMW: 2.0 * value,
        Optimizer.ADAMW_FOREACH: 2.0 * value,
        Optimizer.ADAMW_8BIT: BLOCKWISE_STATE_BYTES,
        Optimizer.ADAMW_PAGED_8BIT: BLOCKWISE_STATE_BYTES,
        Optimizer.SGD_MOMENTUM: 1.0 * value,
        Optimizer.ADAFACTOR: 0.0,
    }[strategy.optimizer]
    return moments + (ZERO_MASTER_BYTES if is_zero else 0)


def estimate_state_bytes(spec: ModelSpec, strategy: Strategy) -> StateBytes:
    """Persistent training state of one GPU.

    Stage 1 shards optimizer state, 2 adds gradients, 3 and FSDP add weights.
    Leaves out gathered copies and buckets: see `communication buffers` in `buffers.py`.
    Source: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277.
    """
    sharding, offload = strategy.sharding, strategy.offload
    weights = estimate_weight_bytes(spec, strategy)
    weight_bytes, quantization_bytes = weights.packed + weights.plain, weights.quantization_state
    if sharding.is_zero and not strategy.weights.is_quantized:
        weight_bytes = spec.num_params * 2 if strategy.compute.value_bytes == 2 else weight_bytes
    value = 2 if sharding.is_zero and strategy.compute.value_bytes == 2 else None
    value = value or trained_value_bytes(strategy)
    # Retrained embeddings are copies in the base's own dtype.
    adapter_bytes = adapter_params(spec, strategy) * value
    adapter_bytes += retrained_params(spec, strategy) * 2

    shards = strategy.num_shards
    weight_shards = shards if sharding.shards_weights else 1
    trained = num_trainable(spec, strategy) if strategy.is_trained else 0
    gradients = ceil(_gradient_bytes(spec, strategy, trained, value))
    optimizer = ceil(trained * optimizer_bytes_per_value(strategy) / shards)

    on_gpu_weights = ceil(weight_bytes / weight_shards)
    host_weights = 0
    if offload.moves_params:
        host_weights, on_gpu_weights = on_gpu_weights, 0
    host_optimizer = 0
    if offload.moves_optimizer or strategy.optimizer is Optimizer.ADAMW_PAGED_8BIT:
        host_optimizer, optimizer = optimizer, 0
    if offload.moves_optimizer and sharding.shards_gradients:
        host_optimizer, gradients = host_optimizer + gradients, 0
    return StateBytes(
        weights=on_gpu_weights,
        quantization=ceil(quantization_bytes / weight_shards) if host_weights == 0 else 0,
        adapters=0 if offload.moves_params else ceil(adapter_bytes / weight_shards),
        gradients=gradients,
        optimizer=optimizer,
        optimizer_temporary=0
        if offload.moves_optimizer
        else ceil(_temporary_bytes(spec, strategy, trained, value)),
        host_weights=host_weights,
        host_optimizer=host_optimizer,
    )


def _gradient_bytes(spec: ModelSpec, strategy: Strategy, trained: int, value: int) -> float:
    if strategy.optimizer_in_backward and trained:
        share = largest_layer(spec) / spec.num_params
        trained = max(ceil(trained * share), min(trained, spec.embedding_params))
    return trained * value / (strategy.num_shards if strategy.sharding.shards_gradients else 1)


def _temporary_bytes(spec: ModelSpec, strategy: Strategy, trained: int, value: int) -> float:
    """Tensors that live only inside the optimizer's step.

    foreach AdamW takes the square root of all second moments at once; fused
    takes none. Adafactor upcasts one parameter at a time, with its update and
    its square. ZeRO-1 and 2 upcast their gradient partition to fp32.
    Source: torch.optim.adamw `_multi_tensor_adamw`; transformers Adafactor; DeepSpeed stage_1_and_2.
    """
    shards = strategy.num_shards
    if strategy.sharding in (Sharding.ZERO1, Sharding.ZERO2):
        return 4 * trained / shards
    if strategy.optimizer is Optimizer.ADAMW_FOREACH:
        whole = trained
        if strategy.optimizer_in_backward:
            whole = min(trained, max(largest_layer(spec), spec.embedding_params))
        return whole * value / shards
    if strategy.optimizer is Optimizer.ADAFACTOR:
        largest = min(trained, max(spec.embedding_params, largest_layer(spec) // 2))
        return 3 * 4 * largest / shards
    return 0.0
