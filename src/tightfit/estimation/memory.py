"""GPU memory of one training step: the moments that can be its peak, allocator slack, the CUDA
context, and the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB, MIB
from tightfit.estimation.activations import (
    LayerBytes,
    estimate_activation_bytes,
    estimate_loss_bytes,
    list_layers,
)
from tightfit.estimation.flops import count_forward_only_passes
from tightfit.estimation.result import Verdict
from tightfit.estimation.state import (
    BufferBytes,
    StateBytes,
    estimate_buffer_bytes,
    estimate_state_bytes,
    trained_value_bytes,
)
from tightfit.estimation.weights import as_loaded
from tightfit.models.spec import ModelSpec

# The allocator: slack above live tensors, the CUDA context, and the verdict

CONTEXT_BYTES = 3 * GIB // 4
"""CUDA context, loaded kernels and cuBLAS outside torch's allocator.
Source: benchmarks/results/h200_steps.json, memory of the process less torch's reserve."""
CPU_CONTEXT_BYTES = 400 * MIB
"""Python with torch 2.13 (CPU), transformers 5.22, peft 0.21, torch's distributed checkpoints and
TensorBoard imported: 395 MiB resident, before any model."""
NCCL_BYTES = GIB // 4
"""Channels and buffers of one NCCL communicator. Source: NCCL_BUFFSIZE 4 MiB x channels x peers."""
TRANSIENT_SLACK_FRACTION = 0.02
"""Rounding, as a share of the peak's tensors that live within a step.
Source of this and the next three: fit to reserved over allocated in
benchmarks/results/h200_steps.json, 150 training steps."""
BATCH_SLACK_FRACTION = 0.06
"""Fragmentation between tensors whose size depends on the batch."""
IDLE_SLACK_FRACTION = 0.7
"""Cached blocks of another moment's tensors, which mostly fit no tensor of the peak: the reserve of
a recomputing job holds both the loss and a recomputed layer."""
STREAM_SLACK_FRACTION = 0.75
"""Gathered weights live on a stream of their own, whose free blocks no other stream may use."""
OUTGROWN_SLACK_FRACTION = 1.0
"""Cached blocks of smaller batches where lengths vary and segments cannot expand.
Source: benchmarks/results/h200_fragmentation.json, 4096 tokens."""

CPU_SLACK_FRACTION = 0.6
"""On a CPU, as a share of the peak's tensors that live within a step: glibc keeps freed
blocks below 32 MiB, and holes between kept tensors do not fit the next layer's.
Source of this and the next: peak resident memory of SmolLM2-135M, table in docs/formulas.md."""
CPU_HOLES_FRACTION = 0.4
"""The same for activations that recomputed layers freed in the forward pass."""
MODEL_ERROR_FRACTION = 0.05
"""Error of the closed form within which the verdict is `tight`."""
OTHER_TRAINER_ERROR_FRACTION = 0.10
"""The same for other trainers: one published row in five needs at least so much more than is
predicted (benchmarks/results/published_memory.json)."""


def estimate_context_bytes(
    world_size: int, *, is_cpu: bool = False, measured_bytes: int | None = None
) -> int:
    """Memory of the process outside torch's allocator; `measured_bytes` is without NCCL's."""
    if is_cpu:
        return measured_bytes or CPU_CONTEXT_BYTES
    return (measured_bytes or CONTEXT_BYTES) + (NCCL_BYTES if world_size > 1 else 0)


def find_error_fraction(strategy: Strategy) -> float:
    """How far off the closed form may be."""
    return OTHER_TRAINER_ERROR_FRACTION if strategy.trainer else MODEL_ERROR_FRACTION


def judge_fit(
    *,
    allocated_bytes: int,
    reserved_bytes: int,
    capacity_bytes: int,
    error_fraction: float = MODEL_ERROR_FRACTION,
) -> Verdict:
    """`fits` if the whole reserve does, with a margin for the formula's error; `does_not_fit` if
    live tensors alone do not; `tight` between: the allocator may succeed by retrying, or fail."""
    if reserved_bytes * (1 + error_fraction) <= capacity_bytes:
        return Verdict.FITS
    if allocated_bytes * (1 - error_fraction) > capacity_bytes:
        return Verdict.DOES_NOT_FIT
    return Verdict.TIGHT


BATCH_SIZED = ("activations", "logits")
"""Components whose size depends on the batch."""
PERSISTENT = frozenset({"weights", "quantization", "adapters", "optimizer", "reference"})
"""Components that live from step to step and so cause no fragmentation."""


class Moment(NamedTuple):
    """One moment of the step. Components sum to torch's allocated bytes."""

    name: str
    components: dict[str, int]
    dropped_bytes: int = 0
    """Activations that were freed before this moment, because they are recomputed."""

    @property
    def allocated_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def transient_bytes(self) -> int:
        return sum(size for name, size in self.components.items() if name not in PERSISTENT)


class BatchIndependentBytes(NamedTuple):
    """Parts that do not depend on the micro-batch, but for one row against several: computed once
    for a search over sizes."""

    state: StateBytes
    buffers: BufferBytes
    """With fp8 these do depend on it, and are computed again."""
    layers: list[tuple[int, LayerBytes]]


# The buying guide asks the same of many cards.
@lru_cache(maxsize=4096)
def estimate_batch_independent_bytes(
    spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False
) -> BatchIndependentBytes:
    """The batch-independent parts of `strategy`."""
    strategy = as_loaded(spec, strategy)
    return BatchIndependentBytes(
        state=estimate_state_bytes(spec, strategy),
        buffers=estimate_buffer_bytes(spec, strategy),
        layers=list_layers(spec, strategy, is_cpu=is_cpu),
    )


def estimate_moments(
    spec: ModelSpec,
    strategy: Strategy,
    *,
    is_cpu: bool = False,
    independent: BatchIndependentBytes | None = None,
) -> list[Moment]:
    """Each moment of a steady training step that can be its peak, on the fullest GPU.

    Scope: one micro-batch of full-length rows after the first optimizer step.
    Between two moments memory changes linearly in the number of layers done,
    so the peak is at one of them.
    """
    strategy = as_loaded(spec, strategy)
    state, buffers, layers = independent or estimate_batch_independent_bytes(
        spec, strategy, is_cpu=is_cpu
    )
    if strategy.has_fp8:
        buffers = estimate_buffer_bytes(spec, strategy)
    activations = estimate_activation_bytes(spec, strategy, layers)
    loss = estimate_loss_bytes(spec, strategy)
    gradients = _estimate_gradients(spec, strategy, state)
    # On a CPU the host's memory is the device's: what is offloaded stays.
    weights, optimizer = state.weights, state.optimizer
    if is_cpu:
        weights, optimizer = weights + state.host_weights, optimizer + state.host_optimizer
    persistent = {
        "weights": weights,
        "quantization": state.quantization,
        "adapters": state.adapters,
        "optimizer": optimizer,
        "reference": state.reference,
    }
    # DoRA's weight norms are computed again where layers are recomputed.
    norms_again = buffers.weight_norms if strategy.checkpointing else 0
    in_forward = {"dequantized": buffers.dequantized_forward, "weight_norms": buffers.weight_norms}
    # Working memory of the first layer's backward pass on top of its input.
    last_working = activations.working
    if activations.recomputed:
        last_working = activations.recomputed - activations.of_recomputed

    moments: dict[str, dict[str, int]] = {}
    if strategy.sharding.is_fsdp:
        moments["gather"] = {
            "gradients": gradients.start,
            "activations": activations.in_layers,
            "communication": buffers.forward,
            **in_forward,
        }
    if any(count_forward_only_passes(strategy)):
        widest = max(layer.saved for _, layer in layers)
        is_late = strategy.quirks.late_reference and strategy.runs_reference
        kept = activations.kept if is_late else 0
        moments["reference"] = {
            "gradients": gradients.start,
            "activations": kept + strategy.tokens_per_micro_batch * widest,
            "logits": loss.forward,
            "communication": buffers.forward,
            **in_forward,
        }
    moments["forward"] = {
        "gradients": gradients.start,
        "activations": activations.kept,
        "kv_cache": activations.cache,
        "logits": loss.forward,
        "communication": buffers.loss,
        "autocast_copies": buffers.casts_forward,
        **in_forward,
    }
    moments["loss"] = {
        "gradients": gradients.start,
        "activations": activations.kept,
        "logits": loss.backward,
        "communication": buffers.loss,
        "autocast_copies": buffers.casts_loss,
    }
    moments["backward"] = {
        "gradients": gradients.backward,
        "activations": activations.kept + activations.working,
        "communication": buffers.backward,
        "autocast_copies": buffers.casts_backward,
        "dequantized": buffers.dequantized,
        "weight_norms": 0 if activations.recomputed else norms_again,
    }
    if activations.recomputed:
        moments["recompute"] = {
            "gradients": gradients.recompute,
            "activations": activations.recomputed,
            "communication": buffers.backward,
            "dequantized": buffers.dequantized,
            "weight_norms": norms_again,
        }
    moments["backward_end"] = {
        "gradients": gradients.end,
        "activations": activations.first_layer + last_working,
        "communication": buffers.backward_end,
        "dequantized": buffers.dequantized,
        "weight_norms": norms_again,
    }
    if gradients.embedding or buffers.embedding:
        moments["embedding"] = {
            "gradients": gradients.end + gradients.embedding,
            "communication": buffers.embedding,
        }
    moments["optimizer"] = {
        "gradients": gradients.step,
        "optimizer_temporary": state.optimizer_temporary,
    }
    return [
        Moment(
            name=name,
            components={part: size for part, size in (persistent | parts).items() if size},
            dropped_bytes=activations.dropped,
        )
        for name, parts in moments.items()
    ]


class _Gradients(NamedTuple):
    """Weight gradients over the step."""

    start: int
    """Before the backward pass."""
    backward: int
    """When the backward pass reaches the layers."""
    recompute: int
    """When it reaches the last recomputed layer."""
    end: int
    """When it reaches the first layer."""
    embedding: int
    """On top, while the embedding's gradient is computed."""
    step: int
    """In the optimizer step."""


def _estimate_gradients(spec: ModelSpec, strategy: Strategy, state: StateBytes) -> _Gradients:
    """Gradients appear layer by layer; those of earlier micro-batches exist from the start.

    DDP's buckets exist throughout the step, and each gradient is copied into its bucket; while
    micro-batches are accumulated without reduction, the gradients remain beside the buckets.
    ZeRO-3 keeps a buffer for its shard's gradients throughout.
    Source: torch reducer.cpp, `initialize_buckets`, `mark_variable_ready_dense`; DeepSpeed stage3.
    """
    is_accumulating = strategy.grad_accum > 1
    is_ddp = strategy.sharding is Sharding.DDP
    # Full tuning without sharded gradients: the head's is computed before any layer's; the
    # embedding's comes on top at the end. Tied to the head: its own, and the sum of the two in 16
    # bit; in fp32 it is added in place. DDP: in addition to their bucket.
    # Source: h200_steps.json, Llama-3.2-1B full tuning in bf16 and fp32; torch InputBuffer.
    head = embedding = 0
    if strategy.method is Method.FULL and not strategy.sharding.shards_gradients:
        head = state.gradients * spec.embedding_params // max(1, spec.num_params)
        width = trained_value_bytes(strategy) if is_ddp else 0
        embedding = spec.embedding_params * (width + (4 if spec.tie_embeddings else 0))
    if strategy.num_new_rows:  # the rows' gradient is cut out of one of the whole matrix
        embedding = spec.embedding_params * strategy.compute.value_bytes
    if is_ddp or strategy.sharding is Sharding.ZERO3:
        held = state.gradients * (2 if is_accumulating and is_ddp else 1)
        return _Gradients(held, held, held, held, embedding=embedding, step=state.gradients)
    is_first_stage = strategy.sharding is Sharding.ZERO1
    accumulated = state.accumulated if is_accumulating else 0
    share = 1 - strategy.count_recomputed(spec.num_layers) / spec.num_layers
    return _Gradients(
        start=accumulated,
        backward=max(accumulated, head),
        recompute=max(accumulated, head + int(share * (state.gradients - head))),
        end=max(accumulated, state.gradients),
        embedding=embedding,
        # ZeRO-1 computes whole gradients and keeps its own shard of them.
        step=state.gradients // (strategy.num_shards if is_first_stage else 1),
    )


def peak_moment(moments: list[Moment]) -> Moment:
    """The moment of most allocated bytes."""
    return max(moments, key=lambda moment: moment.allocated_bytes)


def list_reserved_components(
    moment: Moment,
    moments: Sequence[Moment],
    strategy: Strategy,
    *,
    is_cpu: bool = False,
    measured_context_bytes: int | None = None,
) -> dict[str, int]:
    """Components of the process's GPU memory: tensors, slack (reserved minus allocated) and
    context."""
    context = estimate_context_bytes(
        strategy.world_size, is_cpu=is_cpu, measured_bytes=measured_context_bytes
    )
    transient, parts = moment.transient_bytes, moment.components
    if is_cpu:  # resident memory minus live tensors, with glibc's malloc
        slack = CPU_SLACK_FRACTION * transient + CPU_HOLES_FRACTION * moment.dropped_bytes
        return parts | {"allocator_slack": int(slack), "process": context}
    batch_share = BATCH_SLACK_FRACTION
    if strategy.quirks.varying_lengths:
        batch_share += OUTGROWN_SLACK_FRACTION
    # Tensors of another moment that are not alive at this one leave cached blocks.
    idle = max((_missing_bytes(moment, other) for other in moments), default=0)
    slack = (
        TRANSIENT_SLACK_FRACTION * transient
        + batch_share * sum(parts.get(name, 0) for name in BATCH_SIZED)
        + IDLE_SLACK_FRACTION * idle
        + STREAM_SLACK_FRACTION * parts.get("communication", 0)
    )
    return parts | {"allocator_slack": int(slack), "cuda_context": context}


def _missing_bytes(moment: Moment, other: Moment) -> int:
    """Bytes of `other` beyond `moment` in batch-sized tensors and gathered weights.

    Gradients are left out: they reuse blocks of freed activations.
    """
    missing = 0
    for name in (*BATCH_SIZED, "communication"):  # no generator: a search calls this very often
        more = other.components.get(name, 0) - moment.components.get(name, 0)
        if more > 0:
            missing += more
    return missing


def estimate_step_peak_bytes(
    spec: ModelSpec,
    strategy: Strategy,
    *,
    is_cpu: bool = False,
    measured_context_bytes: int | None = None,
    independent: BatchIndependentBytes | None = None,
) -> int:
    """Memory of the process at the peak of the step, for searches."""
    moments = estimate_moments(spec, strategy, is_cpu=is_cpu, independent=independent)
    held = list_reserved_components(
        peak_moment(moments),
        moments,
        strategy,
        is_cpu=is_cpu,
        measured_context_bytes=measured_context_bytes,
    )
    return sum(held.values())
