"""State: gradients and optimizer, with their sharding, offload and temporaries."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tightfit.core.strategy import Method, Optimizer, Sharding, Strategy
from tightfit.estimate.spare_columns import spare_weight_bytes
from tightfit.estimate.weights import (
    adapter_params,
    estimate_weight_bytes,
    largest_layer,
    num_trainable,
    retrained_params,
)
from tightfit.models.spec import ModelSpec

BLOCKWISE_STATE_BYTES = 2 + 2 * 4 / 256
"""Two 8-bit moments, each with an fp32 scale per 256 values. Source: arXiv:2110.02861."""
ZERO_MASTER_BYTES = 4
"""DeepSpeed keeps fp32 weights beside the 16-bit ones. Source: ZeRO, arXiv:1910.02054, K = 12."""
ZERO3_SUB_GROUP_VALUES = 1_000_000_000
"""Values that one optimizer call of ZeRO-3 takes: DeepSpeed `sub_group_size`, its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What one GPU holds between steps, and what the host holds for it."""

    weights: int
    quantization: int
    adapters: int
    gradients: int
    accumulated: int
    """The same between two micro-batches: unsharded where their reduction waits."""
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


def optimizer_bytes_per_value(strategy: Strategy, trained_bytes: int) -> float:
    """Moments of one trained value of `trained_bytes`, and its fp32 master copy under ZeRO.

    torch keeps moments in the parameter's dtype. Adafactor's row and column
    sums are three orders of magnitude smaller and count as nothing here.
    """
    is_zero = strategy.sharding.is_zero
    value = 4 if is_zero else trained_bytes
    moments = {
        Optimizer.ADAMW: 2.0 * value,
        Optimizer.ADAMW_KERNEL: 2.0 * value,
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
    weight_bytes += spare_weight_bytes(spec, strategy)
    trained = list_trained_values(spec, strategy)
    trained_bytes = sum(count * width for count, width in trained)

    shards = strategy.num_shards
    weight_shards = shards if sharding.shards_weights else 1
    whole_gradients = _gradient_bytes(spec, strategy, trained_bytes)
    gradients = ceil(whole_gradients / (shards if sharding.shards_gradients else 1))
    accumulated = ceil(whole_gradients) if strategy.quirks.no_sync else gradients
    optimizer = ceil(
        sum(count * optimizer_bytes_per_value(strategy, width) for count, width in trained) / shards
    )
    adapter_bytes = trained_bytes if strategy.method is Method.LORA else 0

    on_gpu_weights = ceil(weight_bytes / weight_shards)
    host_weights = 0
    if offload.moves_params:
        host_weights, on_gpu_weights = on_gpu_weights, 0
    host_optimizer = 0
    if offload.moves_optimizer:
        host_optimizer, optimizer = optimizer, 0
    elif strategy.optimizer is Optimizer.ADAMW_PAGED_8BIT:
        # The moments alone are paged: ZeRO's fp32 weights are torch's.
        masters = ZERO_MASTER_BYTES if sharding.is_zero else 0
        kept = ceil(sum(count * masters for count, _ in trained) / shards)
        host_optimizer, optimizer = optimizer - kept, kept
    if offload.moves_optimizer and sharding.shards_gradients:
        host_optimizer, gradients = host_optimizer + gradients, 0
    return StateBytes(
        weights=on_gpu_weights,
        quantization=ceil(quantization_bytes / weight_shards) if host_weights == 0 else 0,
        adapters=0 if offload.moves_params else ceil(adapter_bytes / weight_shards),
        gradients=gradients,
        accumulated=max(accumulated, gradients) if gradients else 0,
        optimizer=optimizer,
        optimizer_temporary=0
        if offload.moves_optimizer
        else ceil(_temporary_bytes(spec, strategy, trained_bytes)),
        host_weights=host_weights,
        host_optimizer=host_optimizer,
    )


def list_trained_values(spec: ModelSpec, strategy: Strategy) -> list[tuple[int, int]]:
    """(how many, bytes of one) for each kind of trained value.

    Embeddings retrained beside adapters are copies in the base's own dtype.
    """
    if not strategy.is_trained:
        return []
    if strategy.sharding.is_zero and strategy.compute.value_bytes == 2:
        return [(num_trainable(spec, strategy), 2)]
    if strategy.method is Method.FULL:
        return [(spec.num_params, trained_value_bytes(strategy))]
    base = 2 if strategy.weights.is_quantized else strategy.weights.value_bytes
    return [
        (adapter_params(spec, strategy), strategy.adapter_dtype.value_bytes),
        (retrained_params(spec, strategy), base),
    ]


def mixes_frozen(strategy: Strategy) -> bool:
    """Whether frozen weights get gradients for sharing a flat parameter with adapters."""
    is_flat = strategy.sharding.is_fsdp and strategy.quirks.flat_shards
    return is_flat and strategy.quirks.mixes_frozen and strategy.method is Method.LORA


def _largest_share(spec: ModelSpec) -> float:
    """Share of all values in the largest group that a backward pass completes at once."""
    return max(largest_layer(spec), spec.embedding_params) / spec.num_params


def _gradient_bytes(spec: ModelSpec, strategy: Strategy, trained_bytes: int) -> float:
    """Gradients of all trained values, unsharded.

    A flat parameter has one gradient: for its frozen values too, where it mixes the two.
    Source: torch FullyShardedDataParallel docs, `use_orig_params`.
    """
    if strategy.optimizer_in_backward:
        return trained_bytes * _largest_share(spec)
    if mixes_frozen(strategy):
        return spec.num_params * strategy.weights.value_bytes + trained_bytes
    return trained_bytes


def _temporary_bytes(spec: ModelSpec, strategy: Strategy, trained_bytes: int) -> float:
    """Tensors that live only inside the optimizer's step.

    foreach AdamW takes the square root of all second moments at once; fused
    takes none. Adafactor works on one parameter at a time: its update, as wide
    as the parameter. transformers' own has the update and its square in fp32,
    and fp32 copies of weight and gradient where they are 16 bit. ZeRO
    joins a rank's gradients in one flat copy and makes them fp32: stage 3 a subgroup
    at a time.
    Source: torch.optim `_multi_tensor_adamw`, `_single_tensor_adafactor`; transformers Adafactor;
    DeepSpeed stage_1_and_2.
    """
    shards = strategy.num_shards
    if strategy.sharding.is_zero:
        is_half = strategy.compute.value_bytes == 2
        own = trained_bytes / shards / (2 if is_half else 4)
        if strategy.sharding is Sharding.ZERO3:
            own = min(own, ZERO3_SUB_GROUP_VALUES)
        return (6 if is_half else 4) * own
    if strategy.optimizer is Optimizer.ADAMW_FOREACH:
        share = _largest_share(spec) if strategy.optimizer_in_backward else 1.0
        return trained_bytes * share / shards
    if strategy.optimizer is Optimizer.ADAFACTOR:
        largest = min(num_trainable(spec, strategy), spec.embedding_params)
        wide = 8 if trained_value_bytes(strategy) == 4 else 16
        per_value = wide if strategy.quirks.wide_adafactor else trained_value_bytes(strategy)
        return per_value * largest / shards
    return 0.0
