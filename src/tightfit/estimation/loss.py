"""Logits and loss: the memory that the vocabulary takes at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Loss, Method, Strategy
from tightfit.models.families.registry import find_family
from tightfit.models.spec import ModelSpec

NUM_LOSS_CHUNKS = 8
"""Chunks of the chunked loss. Source: torchtune CEWithChunkedOutputLoss, num_output_chunks=8."""


def can_fuse_head_and_loss(spec: ModelSpec) -> bool:
    """Whether the loss can apply the head itself, which lets the fused loss work in chunks."""
    return not find_family(spec.model_type).scales_logits and not spec.is_encoder_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBytes:
    """Bytes of head and loss at the two moments that can be the peak."""

    forward: int
    """While the loss is computed."""
    backward: int
    """While its gradient is computed."""


def estimate_loss_bytes(spec: ModelSpec, strategy: Strategy) -> LossBytes:
    """Tensors of the size tokens x vocabulary during loss and its backward.

    Plain, as transformers 5 does it: the head's output in the compute dtype,
    its upcast to fp32, and log-softmax's fp32 output, which autograd keeps. Once
    the model's output is dropped, only the last remains; the backward adds the
    gradients of the loss and of log-softmax, both fp32: 12 bytes at the peak.
    Kernel writes the gradient into the fp32 copy and casts it down: 4 + 2.
    Chunked keeps all log-softmax chunks, until the backward pass beside the head's
    output, and makes fp32 gradients one chunk at a time; compiled, it keeps the
    head's output alone and computes the rest again (torchtune `compile_loss`; counted
    under torch's min-cut partitioner: 2 bytes, 4 eager). Fused (Liger) never holds more
    than one chunk of logits, and writes the gradient of the hidden states at once.
    Leaves out the shifted copy that transformers before 4.45 made.
    Source: transformers loss_utils.ForCausalLMLoss; liger fused_linear_cross_entropy.
    """
    tokens = strategy.tokens_per_micro_batch
    table = tokens * spec.vocab_size
    value = strategy.compute.value_bytes
    softcap = value * table if spec.has_logit_softcap else 0
    dropped = 0 if strategy.quirks.keeps_logits else value * table
    is_head_fusible = can_fuse_head_and_loss(spec)
    if strategy.loss is Loss.FUSED and is_head_fusible:
        return _estimate_fused(spec, strategy)
    if strategy.loss is Loss.CHUNKED:
        if strategy.compile:
            kept = value * table + softcap
            return LossBytes(forward=kept, backward=kept + value * table // NUM_LOSS_CHUNKS)
        wide = value if strategy.quirks.narrow_loss else 4
        kept = (value + wide) * table + softcap
        return LossBytes(
            forward=kept + wide * table // NUM_LOSS_CHUNKS,
            backward=kept - dropped + (value + 2 * wide) * table // NUM_LOSS_CHUNKS,
        )
    if strategy.quirks.narrow_loss:
        return _estimate_without_upcast(strategy, table=table, softcap=softcap)
    upcast = 0 if strategy.compute is Dtype.FP32 else 4 * table
    if strategy.loss is Loss.KERNEL:
        kept = value * table + upcast + softcap
        cast = value * table if upcast else 0
        return LossBytes(forward=kept, backward=kept + cast - (dropped if upcast else 0))
    copied = 0 if is_head_fusible else value * table
    return LossBytes(
        forward=value * table + copied + upcast + 4 * table + softcap,
        backward=12 * table + softcap,
    )


def _estimate_without_upcast(strategy: Strategy, *, table: int, softcap: int) -> LossBytes:
    """Loss without an upcast: the logits and their shifted copy stay in the compute dtype.

    Autocast runs log-softmax in fp32, with a cast copy before it, and a kernel's logits leave
    the model as an fp32 copy. A kernel writes the gradient into the shifted copy.
    Source: transformers 4.48 modeling_gpt_bigcode; torch autocast's fp32 ops; accelerate
    `convert_outputs_to_fp32`.
    """
    value = strategy.compute.value_bytes
    wide = 4 if strategy.is_autocast else value
    if strategy.loss is Loss.KERNEL:
        output = 4 * table if strategy.is_autocast and value != 4 else 0
        return LossBytes(
            forward=2 * value * table + output + softcap, backward=2 * value * table + softcap
        )
    cast = wide * table if wide != value else 0
    return LossBytes(
        forward=(2 * value + wide) * table + cast + softcap, backward=3 * wide * table + softcap
    )


def count_chunk_tokens(spec: ModelSpec, *, tokens: int, factor: int) -> int:
    """Tokens of the fused loss's largest chunk: a power of two, or all there are.

    Source: liger-kernel 0.8.5, fused_linear_cross_entropy_forward, `chunk_mem_const`.
    """
    num_chunks = -(-spec.vocab_size // (factor * spec.hidden_size))
    return min(tokens, 1 << max(0, (-(-tokens // num_chunks) - 1).bit_length()))


def _estimate_fused(spec: ModelSpec, strategy: Strategy) -> LossBytes:
    """One chunk of logits at a time; chunks shrink as the vocabulary grows."""
    tokens = strategy.tokens_per_micro_batch
    value = strategy.compute.value_bytes
    chunk_tokens = count_chunk_tokens(spec, tokens=tokens, factor=strategy.loss_chunk_factor)
    logits = 2 * chunk_tokens * spec.vocab_size * value
    hidden_gradient = tokens * spec.hidden_size * value
    trains_head = strategy.method is Method.FULL or strategy.train_embeddings
    head_gradient = 2 * spec.embedding_params * value if trains_head else 0
    total = logits + hidden_gradient + head_gradient
    return LossBytes(forward=total, backward=hidden_gradient)
