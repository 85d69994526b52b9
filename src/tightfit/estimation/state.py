"""Training state on one GPU: weights, gradients, optimizer state, and the copies that sharding,
autocast and quantization make beside them.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.weights import (
    adapter_params,
    augmented_weight_bytes,
    count_params_outside_blocks,
    count_quantized_values,
    estimate_weight_bytes,
    group_fused_linears,
    is_dora,
    is_lora_target,
    largest_layer,
    layer_adapter_params,
    most_dequantized,
    num_trainable,
    retrained_params,
)
from tightfit.models.spec import ModelSpec

ZERO_MASTER_BYTES = 4
"""DeepSpeed keeps fp32 weights beside the 16-bit ones. Source: ZeRO, arXiv:1910.02054, K = 12."""
ZERO3_SUB_GROUP_VALUES = 1_000_000_000
"""Values that one optimizer call of ZeRO-3 takes: DeepSpeed `sub_group_size`, its default."""


class StateBytes(NamedTuple):
    """Training state of one GPU between steps, on the GPU and on the host."""

    weights: int
    quantization: int
    adapters: int
    gradients: int
    accumulated: int
    """Gradients between two micro-batches: unsharded where the reduction is delayed."""
    optimizer: int
    optimizer_temporary: int
    """Only during the optimizer step."""
    host_weights: int
    """Host memory of this rank: offloaded weights and their gradients."""
    host_optimizer: int
    reference: int
    """A frozen copy of the weights, where the objective needs one."""


def trained_value_bytes(strategy: Strategy) -> int:
    """Bytes of a trained value; torch keeps its gradient and moments in the same dtype."""
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
    record = strategy.optimizer.record
    moments = record.state_values * value if record.state_bytes is None else record.state_bytes
    return moments + (ZERO_MASTER_BYTES if is_zero else 0)


def estimate_state_bytes(spec: ModelSpec, strategy: Strategy) -> StateBytes:
    """Persistent training state of one GPU.

    Stage 1 shards optimizer state, 2 adds gradients, 3 and FSDP add weights.
    Leaves out gathered copies and buckets: see `estimate_buffer_bytes`.
    Source: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277.
    """
    sharding, offload = strategy.sharding, strategy.offload
    weights = estimate_weight_bytes(spec, strategy)
    weight_bytes, quantization_bytes = weights.packed + weights.plain, weights.quantization_state
    if sharding.is_zero and not strategy.weights.is_quantized:
        weight_bytes = spec.num_params * 2 if strategy.compute.value_bytes == 2 else weight_bytes
    weight_bytes += augmented_weight_bytes(spec, strategy)
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
    reference = on_gpu_weights if strategy.copies_reference else 0
    host_weights = 0
    if offload.moves_params:
        host_weights, on_gpu_weights, reference = on_gpu_weights + reference, 0, 0
    host_optimizer = 0
    if offload.moves_optimizer:
        host_optimizer, optimizer = optimizer, 0
    elif strategy.optimizer.record.is_paged:
        # Only the moments are paged: ZeRO's fp32 weights are ordinary tensors.
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
        reference=reference,
    )


def list_trained_values(spec: ModelSpec, strategy: Strategy) -> list[tuple[int, int]]:
    """(count, bytes of one) for each kind of trained value.

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
    """Whether frozen weights have gradients because they share a flat parameter with adapters."""
    is_flat = strategy.sharding.is_fsdp and strategy.quirks.flat_shards
    is_mixed = strategy.quirks.mixes_frozen and not strategy.weights.is_quantized
    return is_flat and is_mixed and strategy.method is Method.LORA


def _largest_share(spec: ModelSpec) -> float:
    """Share of all values in the largest group that a backward pass completes at once."""
    return max(largest_layer(spec), spec.embedding_params) / spec.num_params


def _gradient_bytes(spec: ModelSpec, strategy: Strategy, trained_bytes: int) -> float:
    """Gradients of all trained values, unsharded.

    A flat parameter has one gradient: for its frozen values too, where it mixes the two.
    Source: torch FullyShardedDataParallel docs, `use_orig_params`.
    """
    if strategy.quirks.optimizer_in_backward:
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
    temporary = strategy.optimizer.record.temporary
    if temporary == "all values":
        share = _largest_share(spec) if strategy.quirks.optimizer_in_backward else 1.0
        return trained_bytes * share / shards
    if temporary == "largest parameter":
        largest = min(num_trainable(spec, strategy), spec.embedding_params)
        wide = 8 if trained_value_bytes(strategy) == 4 else 16
        per_value = wide if strategy.quirks.wide_adafactor else trained_value_bytes(strategy)
        return per_value * largest / shards
    return 0.0


# Buffers: gathered weights, unsharded gradients, buckets, casts, dequantized copies

ZERO3_LIVE_VALUES = 1_000_000_000
"""DeepSpeed `stage3_max_live_parameters`, its default. Source: DeepSpeed configuration docs."""
ZERO_BUCKET_VALUES = 200_000_000
"""`reduce_bucket_size` and `allgather_bucket_size` that transformers' examples set."""


class BufferBytes(NamedTuple):
    """Unsharded copies on one GPU at the moments that can be the peak."""

    forward: int = 0
    """Inside the layers, in forward and evaluation."""
    loss: int = 0
    """When all layers are done."""
    backward: int = 0
    """While a layer's gradients are computed and reduced."""
    backward_end: int = 0
    """The same for the first layer, when no other is prefetched."""
    embedding: int = 0
    """While a tied embedding's gradient is added to the head's; 0 where that cannot be the peak."""
    casts_forward: int = 0
    """16-bit copies of fp32 weights alive while the loss is computed."""
    casts_loss: int = 0
    """The same in the loss's backward pass."""
    casts_backward: int = 0
    """The same when the backward pass reaches the layers."""
    dequantized: int = 0
    """One dequantized matrix at a time; with fp8, one that is cast and the other operand."""
    dequantized_forward: int = 0
    """The same in forward and evaluation, where fp8 for gradients only casts nothing."""
    weight_norms: int = 0
    """DoRA's norm of one adapted matrix."""


def estimate_buffer_bytes(spec: ModelSpec, strategy: Strategy) -> BufferBytes:
    """Copies that sharding, autocast and quantization make.

    FSDP2 with one group per layer: the layer in use and the next one, gathered, in
    the forward pass with the flat results of both gathers; the group of embeddings
    and head stays gathered, and its gradients unsharded until the very end; a
    layer's gradients exist unsharded, and once more as the reduce-scatter's input.
    With `reshard_after_forward=False` a layer stays gathered until its own backward
    pass is over.
    ZeRO-3 keeps up to `stage3_max_live_parameters` gathered.
    Leaves out DDP's buckets: they are counted as gradients.
    Source: torch fully_shard notes; DeepSpeed configuration docs.
    """
    casts_forward, casts_loss, casts_backward = _cast_bytes(spec, strategy)
    dequantized = 2 * most_dequantized(spec, strategy) if strategy.weights.is_quantized else 0
    if strategy.has_fp8:
        dequantized = _fp8_bytes(spec, strategy)
    return _gathered_bytes(spec, strategy)._replace(
        casts_forward=casts_forward,
        casts_loss=casts_loss,
        casts_backward=casts_backward,
        dequantized=dequantized,
        dequantized_forward=0 if strategy.fp8_gradients else dequantized,
        weight_norms=_weight_norm_bytes(spec, strategy),
    )


def _fp8_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """fp8 copies of the largest product's operands: a matrix and rows of the batch; for the
    gradient of a trained matrix, rows on both sides. Fused projections count as one matrix."""
    tokens = strategy.tokens_per_micro_batch
    groups = [g for block in spec.blocks for g in group_fused_linears(spec, block, strategy)]
    widths = [(g[0].in_features, sum(part.out_features for part in g)) for g in groups]
    sizes = [n * k + tokens * max(n, k) for n, k in widths]
    if not strategy.stores_fp8:
        sizes += [tokens * (n + k) for n, k in widths]
    return max(sizes)


def _weight_norm_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Temporaries of DoRA's weight norm, at the largest target.

    The adapter is applied to an identity as wide as the input, which gives its product. That is
    cast to the compute dtype if needed, scaled, and added to the base: three tensors of the
    matrix's size. The dequantized base is counted as `dequantized`.
    Source: peft `DoraLinearLayer.get_lora_weight`, `get_weight_norm`.
    """
    if not is_dora(strategy):
        return 0
    adapter, value = strategy.adapter_dtype.value_bytes, strategy.compute.value_bytes
    num_copies = 2 if strategy.adapter_dtype is strategy.compute else 3
    return max(
        (
            adapter * part.in_features * (part.in_features + part.out_features)
            + num_copies * value * part.in_features * part.out_features
            for block in spec.blocks
            for part in block.linears
            if part.is_module and is_lora_target(part, strategy.lora_targets)
        ),
        default=0,
    )


def _cast_bytes(spec: ModelSpec, strategy: Strategy) -> tuple[int, int, int]:
    """16-bit copies alive in the forward pass, in the loss's backward pass, and when it reaches
    the layers.

    Autocast keeps each copy: of trained weights until its context ends, of frozen weights
    in the graph until their layer's backward, and then only if the layer is not recomputed. The
    head, which never is, has its copy until its own.
    """
    head = 2 * spec.embedding_params
    if strategy.weights.is_quantized and strategy.upcast_unquantized:
        return head, head, head
    if not strategy.casts_weights:
        return 0, 0, 0
    of_layers = 2 * sum(block.num_params for block in spec.blocks)
    kept_share = 1 - strategy.count_recomputed(spec.num_layers) / spec.num_layers
    kept = int(kept_share * of_layers)
    return (of_layers if strategy.method is Method.FULL else kept) + head, kept + head, kept


def _layer_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """One gathered layer in the dtype that modules see."""
    num_values = largest_layer(spec)
    if not strategy.weights.is_quantized:
        return num_values * strategy.compute.value_bytes
    weights = estimate_weight_bytes(spec, strategy)
    num_packed = max(1, count_quantized_values(spec, strategy))
    in_layer = min(num_values, num_packed // spec.num_layers)
    packed = (weights.packed + weights.quantization_state) * in_layer // num_packed
    return packed + 2 * (num_values - in_layer)


def _gathered_bytes(spec: ModelSpec, strategy: Strategy) -> BufferBytes:
    sharding = strategy.sharding
    value = strategy.compute.value_bytes
    if sharding in (Sharding.ZERO1, Sharding.ZERO2):
        bucket = value * ZERO_BUCKET_VALUES
        return BufferBytes(backward=bucket, backward_end=bucket)
    if not sharding.shards_weights:
        return BufferBytes()
    layer = _layer_bytes(spec, strategy)
    gradients = 2 * _layer_gradient_bytes(spec, strategy)
    whole = _model_bytes(spec, strategy)
    if sharding is Sharding.ZERO3:
        live = min(whole, ZERO3_LIVE_VALUES * value + layer)
        # `training/zero.py` sets reduce buckets of hidden_size ** 2 values.
        reduced = live + gradients // 2 + 2 * spec.hidden_size**2 * value
        return BufferBytes(forward=live, loss=live, backward=reduced, backward_end=reduced)
    outside = count_params_outside_blocks(spec) * value
    if strategy.method is Method.FULL:
        gradients += outside
    one = min(whole, outside + layer)
    forward, loss, backward = one + 2 * layer, one, min(whole, outside + 2 * layer)
    if sharding is Sharding.FSDP_GRAD_OP:
        forward, loss, backward = whole + layer, whole + layer, whole - layer
    return BufferBytes(
        forward=forward,
        loss=loss,
        backward=backward + gradients,
        backward_end=one + gradients,
        embedding=_embedding_bytes(spec, strategy),
    )


def _embedding_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Buffers of parameters outside the layers when all layers are done, less their reduced shard.

    Tied: the head's gradient, the embedding's and their sum beside the gathered weights, while
    the first layer's reduce-scatter is under way. Then all but the sum are freed, and the
    gradients exist beside the input of their own reduce-scatter.
    Source: torch FSDPParamGroup `post_backward`, `foreach_reduce`.
    """
    if strategy.method is not Method.FULL:
        return 0
    value, reduced = strategy.compute.value_bytes, trained_value_bytes(strategy)
    outside = count_params_outside_blocks(spec)
    fullest = (value + reduced) * outside
    if spec.tie_embeddings:
        summed = (outside + 3 * spec.embedding_params) * value
        fullest = max(fullest, summed + largest_layer(spec) * reduced)
    return fullest - reduced * outside // strategy.num_shards


def _model_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    if strategy.weights.is_quantized or strategy.compute is Dtype.FP32:
        return estimate_weight_bytes(spec, strategy).total
    return spec.num_params * strategy.compute.value_bytes


def _layer_gradient_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    if strategy.method is Method.FULL or mixes_frozen(strategy):
        return largest_layer(spec) * strategy.compute.value_bytes
    if strategy.method is Method.LORA:
        values = max(layer_adapter_params(block, strategy) for block in spec.blocks)
        return values * strategy.adapter_dtype.value_bytes
    return 0


# The well-known six-row ZeRO-3 table: model states only, per offload choice

BUFFER_FACTOR = 1.5
"""Head-room DeepSpeed adds to host memory for its pinned staging buffers."""


class ZeroRow(NamedTuple):
    """One line of the table."""

    offload_param: str
    offload_optimizer: str
    zero_init: int
    gpu_bytes: int
    host_bytes: int


def largest_layer_params(spec: ModelSpec) -> int:
    """Parameters of the largest single module, the unit ZeRO-3 gathers.

    A module's own parameters, children left out, as DeepSpeed's live estimator
    takes them; for most models that is the embedding.
    """
    linears = (part for block in spec.blocks for part in block.linears)
    largest_linear = max(
        part.num_params // (part.copies if part.is_module else 1) for part in linears
    )
    return max(spec.embedding_params, spec.lm_head_params, largest_linear)


def estimate_zero_table(
    *, total_params: int, largest_layer_params: int, gpus_per_node: int, num_nodes: int
) -> list[ZeroRow]:
    """Model states of 16-bit training with Adam under ZeRO-3, per GPU and per node.

    18 bytes a parameter: 2 weights, 4 fp32 weights, 8 moments, 4 gradients in
    fp32. Leaves out activations, logits, buckets and the CUDA context; for
    those see `memory.py`. Without `zero_init`, every rank first builds the
    whole fp32 model in host memory.
    Source: deepspeed.runtime.zero.stage3, estimate_zero3_model_states_mem_needs.
    """
    num_gpus = gpus_per_node * num_nodes
    gathered = 4 * largest_layer_params
    whole_models = 4 * gpus_per_node

    def host(bytes_per_param: float, *, zero_init: int) -> int:
        share = bytes_per_param / num_nodes
        per_param = share if zero_init else max(whole_models, share)
        return int(total_params * per_param * BUFFER_FACTOR)

    rows = []
    for param, optimizer, gpu_bytes_per_param, host_bytes_per_param in (
        ("cpu", "cpu", 0, 18),
        ("none", "cpu", 2, 16),
        ("none", "none", 18, 0),
    ):
        for zero_init in (1, 0):
            host_bytes = host(host_bytes_per_param, zero_init=zero_init)
            if not host_bytes:
                host_bytes = int(largest_layer_params * whole_models * BUFFER_FACTOR)
            rows.append(
                ZeroRow(
                    offload_param=param,
                    offload_optimizer=optimizer,
                    zero_init=zero_init,
                    gpu_bytes=gathered + int(gpu_bytes_per_param * total_params / num_gpus),
                    host_bytes=host_bytes,
                )
            )
    return rows
