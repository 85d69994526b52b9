"""The timeline of one training step: what stands in GPU memory at each moment that can peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tightfit.core.strategy import Method, Sharding, Strategy
from tightfit.estimate.activations import LayerBytes
from tightfit.estimate.allocator import (
    estimate_context_bytes,
    estimate_cpu_slack_bytes,
    estimate_slack_bytes,
)
from tightfit.estimate.buffers import BufferBytes, estimate_buffer_bytes
from tightfit.estimate.logits import LossBytes, estimate_loss_bytes
from tightfit.estimate.model_activations import (
    ActivationBytes,
    estimate_activation_bytes,
    list_layers,
)
from tightfit.estimate.state import StateBytes, estimate_state_bytes, trained_value_bytes
from tightfit.estimate.weights import as_loaded
from tightfit.models.spec import ModelSpec

BATCH_SIZED = ("activations", "logits")
"""Components whose size follows the batch."""
PERSISTENT = frozenset({"weights", "quantization", "adapters", "optimizer"})
"""Components that stay from step to step and so leave no holes in the allocator's segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One instant of the step. Components sum to what torch has allocated."""

    name: str
    components: dict[str, int]
    dropped_bytes: int = 0
    """Activations that were made and freed on the way here, because they are recomputed."""

    @property
    def allocated_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def transient_bytes(self) -> int:
        return sum(size for name, size in self.components.items() if name not in PERSISTENT)


class Standing(NamedTuple):
    """What does not follow the micro-batch: a search that tries several finds it once."""

    state: StateBytes
    buffers: BufferBytes
    """Under fp8 these do follow it, and are found anew."""
    layers: list[tuple[int, LayerBytes]]


def find_standing(spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False) -> Standing:
    """`strategy` at any micro-batch."""
    strategy = as_loaded(spec, strategy)
    return Standing(
        state=estimate_state_bytes(spec, strategy),
        buffers=estimate_buffer_bytes(spec, strategy),
        layers=list_layers(spec, strategy, is_cpu=is_cpu),
    )


def estimate_moments(
    spec: ModelSpec,
    strategy: Strategy,
    *,
    is_cpu: bool = False,
    standing: Standing | None = None,
) -> list[Moment]:
    """Each moment of a steady training step that can be its peak, on the fullest GPU.

    Scope: one micro-batch of full-length rows after the first optimizer step.
    Between two moments memory changes linearly in the number of layers done,
    so the peak is at one of them.
    """
    strategy = as_loaded(spec, strategy)
    state, buffers, layers = standing or find_standing(spec, strategy, is_cpu=is_cpu)
    if strategy.has_fp8:
        buffers = estimate_buffer_bytes(spec, strategy)
    activations = estimate_activation_bytes(spec, strategy, layers)
    loss = estimate_loss_bytes(spec, strategy)
    gradients = _estimate_gradients(spec, strategy, state)
    persistent = _persistent(_at_home(state) if is_cpu else state)

    def moment(name: str, **parts: int) -> Moment:
        return Moment(
            name=name,
            components=persistent | {k: v for k, v in parts.items() if v},
            dropped_bytes=activations.dropped,
        )

    return [
        *_list_forward(moment, strategy, gradients, activations, loss, buffers),
        *_list_backward(moment, strategy, gradients, activations, buffers),
        moment(
            "optimizer",
            gradients=gradients.step,
            optimizer_temporary=state.optimizer_temporary,
        ),
    ]


def _list_forward(
    moment: Callable[..., Moment],
    strategy: Strategy,
    gradients: _Gradients,
    activations: ActivationBytes,
    loss: LossBytes,
    buffers: BufferBytes,
) -> list[Moment]:
    """From the embedding to the gradient of the logits."""
    inside = {"dequantized": buffers.dequantized_forward, "weight_norms": buffers.weight_norms}
    gather = moment(
        "gather",
        gradients=gradients.start,
        activations=activations.in_layers,
        communication=buffers.forward,
        **inside,
    )
    return [
        *([gather] if strategy.sharding.is_fsdp else []),
        moment(
            "forward",
            gradients=gradients.start,
            activations=activations.kept,
            kv_cache=activations.cache,
            logits=loss.forward,
            communication=buffers.loss,
            autocast_copies=buffers.casts_forward,
            **inside,
        ),
        moment(
            "loss",
            gradients=gradients.start,
            activations=activations.kept,
            logits=loss.backward,
            communication=buffers.loss,
            autocast_copies=buffers.casts_loss,
        ),
    ]


def _list_backward(
    moment: Callable[..., Moment],
    strategy: Strategy,
    gradients: _Gradients,
    activations: ActivationBytes,
    buffers: BufferBytes,
) -> list[Moment]:
    """From the last layer to the embedding."""
    # The weight norms of one adapted matrix, where layers are computed.
    norms_again = buffers.weight_norms if strategy.checkpointing else 0
    recompute = moment(
        "recompute",
        gradients=gradients.recompute,
        activations=activations.recomputed,
        communication=buffers.backward,
        dequantized=buffers.dequantized,
        weight_norms=norms_again,
    )
    embedding = moment(
        "embedding",
        gradients=gradients.end + gradients.embedding,
        communication=buffers.embedding,
    )
    return [
        moment(
            "backward",
            gradients=gradients.backward,
            activations=activations.kept + activations.working,
            communication=buffers.backward,
            autocast_copies=buffers.casts_backward,
            dequantized=buffers.dequantized,
            weight_norms=0 if activations.recomputed else norms_again,
        ),
        *([recompute] if activations.recomputed else []),
        moment(
            "backward_end",
            gradients=gradients.end,
            activations=activations.first_layer + _last_working(activations),
            communication=buffers.backward_end,
            dequantized=buffers.dequantized,
            weight_norms=norms_again,
        ),
        *([embedding] if gradients.embedding or buffers.embedding else []),
    ]


def _at_home(state: StateBytes) -> StateBytes:
    """Offloaded state counted where it is: on a CPU, the host's memory is the device's."""
    return replace(
        state,
        weights=state.weights + state.host_weights,
        optimizer=state.optimizer + state.host_optimizer,
    )


def _last_working(activations: ActivationBytes) -> int:
    """What the first layer's own backward pass needs on top of its input."""
    if not activations.recomputed:
        return activations.working
    return activations.recomputed - activations.of_recomputed


def _persistent(state: StateBytes) -> dict[str, int]:
    parts = {
        "weights": state.weights,
        "quantization": state.quantization,
        "adapters": state.adapters,
        "optimizer": state.optimizer,
    }
    return {name: size for name, size in parts.items() if size}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """Weight gradients over the step."""

    start: int
    """Before the backward pass."""
    backward: int
    """When it reaches the layers."""
    recompute: int
    """When it reaches the last recomputed one."""
    end: int
    """When it reaches the first one."""
    embedding: int
    """On top, while the embedding's own is made."""
    step: int
    """In the optimizer's step."""


def _estimate_gradients(spec: ModelSpec, strategy: Strategy, state: StateBytes) -> _Gradients:
    """Gradients appear layer by layer; those of earlier micro-batches are there from the start.

    DDP's buckets stand throughout the step, and a gradient is copied into its place as soon as it
    is made; while micro-batches are accumulated without exchange, gradients stay beside them.
    ZeRO-3 has a place for its part's from start to end.
    Source: torch reducer.cpp, `initialize_buckets`, `mark_variable_ready_dense`; DeepSpeed stage3.
    """
    embedding = _embedding_gradient_bytes(spec, strategy)
    is_accumulating = strategy.grad_accum > 1
    if strategy.sharding in (Sharding.DDP, Sharding.ZERO3):
        is_twice = is_accumulating and strategy.sharding is Sharding.DDP
        held = state.gradients * (2 if is_twice else 1)
        return _Gradients(
            start=held,
            backward=held,
            recompute=held,
            end=held,
            embedding=embedding,
            step=state.gradients,
        )
    is_first_stage = strategy.sharding is Sharding.ZERO1
    accumulated = state.accumulated if is_accumulating else 0
    head = _head_gradient_bytes(spec, strategy, state)
    share = 1 - strategy.count_recomputed(spec.num_layers) / spec.num_layers
    return _Gradients(
        start=accumulated,
        backward=max(accumulated, head),
        recompute=max(accumulated, head + int(share * (state.gradients - head))),
        end=max(accumulated, state.gradients),
        embedding=embedding,
        # ZeRO-1 makes whole gradients, and keeps its own part of them.
        step=state.gradients // (strategy.num_shards if is_first_stage else 1),
    )


def _head_gradient_bytes(spec: ModelSpec, strategy: Strategy, state: StateBytes) -> int:
    """The head's weight gradient, made before any layer's."""
    if strategy.method is not Method.FULL or strategy.sharding.shards_gradients:
        return 0
    return state.gradients * spec.embedding_params // max(1, spec.num_params)


def _embedding_gradient_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Gradients of the embedding that exist beside those counted, at the end of the backward pass.

    Tied to the head: its own, and the sum of the two in 16 bit; in fp32 it is added in place.
    DDP: all of them on top of their place in a bucket.
    Source: h200_steps.json, Llama-3.2-1B full tuning in bf16 and fp32; torch InputBuffer.
    """
    if strategy.method is not Method.FULL or strategy.sharding.shards_gradients:
        return 0
    table = spec.embedding_params
    beside = table * trained_value_bytes(strategy) if strategy.sharding is Sharding.DDP else 0
    return beside + (4 * table if spec.tie_embeddings else 0)


def peak_moment(moments: list[Moment]) -> Moment:
    """The fullest one."""
    return max(moments, key=lambda moment: moment.allocated_bytes)


def hold(
    moment: Moment,
    moments: Sequence[Moment],
    strategy: Strategy,
    *,
    is_cpu: bool = False,
    measured_context_bytes: int | None = None,
) -> dict[str, int]:
    """Components of what the process holds on the card: tensors, slack and context."""
    context = estimate_context_bytes(
        strategy.world_size, is_cpu=is_cpu, measured_bytes=measured_context_bytes
    )
    if is_cpu:
        return moment.components | {
            "allocator_slack": estimate_cpu_slack_bytes(
                transient_bytes=moment.transient_bytes, dropped_bytes=moment.dropped_bytes
            ),
            "process": context,
        }
    return moment.components | {
        "allocator_slack": estimate_slack_bytes(
            transient_bytes=moment.transient_bytes,
            batch_bytes=sum(moment.components.get(name, 0) for name in BATCH_SIZED),
            idle_bytes=max((_missing_bytes(moment, other) for other in moments), default=0),
            stream_bytes=moment.components.get("communication", 0),
            varying_lengths=strategy.quirks.varying_lengths,
        ),
        "cuda_context": context,
    }


def _missing_bytes(moment: Moment, other: Moment) -> int:
    """What `other` holds beyond `moment` in tensors of the batch and gathered weights.

    Gradients are left out: they take the blocks that activations leave.
    """
    missing = 0
    for name in (*BATCH_SIZED, "communication"):  # no generator: a search asks this by the thousand
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
    standing: Standing | None = None,
) -> int:
    """What the process holds at the worst moment of the step: the planner's quick question."""
    moments = estimate_moments(spec, strategy, is_cpu=is_cpu, standing=standing)
    held = hold(
        peak_moment(moments),
        moments,
        strategy,
        is_cpu=is_cpu,
        measured_context_bytes=measured_context_bytes,
    )
    return sum(held.values())
