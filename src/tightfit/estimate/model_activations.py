"""Activations of the whole micro-batch: what layers, the final norm and recomputing leave."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.core.strategy import Method, Strategy
from tightfit.estimate.activations import (
    LayerBytes,
    cache_bytes,
    estimate_layer_bytes,
    fuses_pointwise,
)
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Activations of the whole micro-batch."""

    kept: int
    """Everything alive at the end of the forward pass."""
    in_layers: int
    """Of it, what is there when the forward pass is in the last layer but one."""
    first_layer: int
    """What is left of it at the end of the backward pass: the first layer's own."""
    recomputed: int
    """With some layers recomputed and some not: all that is alive in the backward pass of the
    last recomputed one, when the others' activations are gone. 0 otherwise."""
    of_recomputed: int
    """The inputs of the recomputed layers among it."""
    dropped: int
    """What recomputed layers made and freed in the forward pass."""
    working: int
    """Gradients of activations inside the worst layer, recomputed tensors included."""
    cache: int
    """Keys and values of all layers, until the model's output is dropped."""


def list_layers(
    spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False
) -> list[tuple[int, LayerBytes]]:
    """How many layers there are of each kind, and the bytes of one per token."""
    return [
        (b.num_layers, estimate_layer_bytes(spec, b, strategy, is_cpu=is_cpu)) for b in spec.blocks
    ]


def estimate_activation_bytes(
    spec: ModelSpec, strategy: Strategy, layers: list[tuple[int, LayerBytes]]
) -> ActivationBytes:
    """Sum over layers of what checkpointing keeps of each, and of the final norm."""
    tokens = strategy.tokens_per_micro_batch
    worst = max((layer for _, layer in layers), key=lambda layer: layer.saved + layer.working)
    final = _final_norm_bytes(spec, strategy, worst)

    def whole(layer: LayerBytes) -> int:
        return tokens * layer.saved + layer.adapted_weights

    left = strategy.count_recomputed(spec.num_layers)
    is_selective = 0 < left < spec.num_layers
    of_recomputed = of_others = dropped = 0
    for count, layer in layers:
        num_recomputed = min(count, left)
        left -= num_recomputed
        of_recomputed += num_recomputed * tokens * layer.checkpoint
        of_others += (count - num_recomputed) * whole(layer)
        dropped += num_recomputed * tokens * max(0, layer.saved - layer.checkpoint)
    again = whole(worst) if strategy.checkpointing else 0
    of_layers = of_recomputed + of_others
    first = tokens * worst.checkpoint if strategy.checkpointing else whole(worst)
    return ActivationBytes(
        kept=of_layers + tokens * final,
        in_layers=of_layers * (spec.num_layers - 1) // spec.num_layers,
        first_layer=2 * of_layers if _pins_layer_inputs(strategy) else first,
        recomputed=of_recomputed + again + tokens * worst.working if is_selective else 0,
        of_recomputed=of_recomputed,
        dropped=dropped,
        # Where the last layers are not recomputed, the backward pass begins without.
        working=(0 if is_selective else again) + tokens * worst.working,
        cache=tokens * sum(b.num_layers * cache_bytes(spec, b, strategy) for b in spec.blocks),
    )


def _pins_layer_inputs(strategy: Strategy) -> bool:
    """Whether each layer's input, and its gradient beside it, outlives the layer's backward.

    FSDP1 frees a frozen layer's gathered weights by a hook on the layer's inputs, and holds
    that hook until the whole backward pass is over. A reentrant checkpoint hands the layer
    detached inputs, which are leaves: the hook then holds the leaf and the gradient in it.
    Source: torch.distributed.fsdp._runtime_utils `_register_post_backward_reshard_only_hook`,
    torch.utils.checkpoint `CheckpointFunction`; counted on two CPU ranks: 2 x 2 bytes x hidden
    per layer at the end of the backward pass, and nothing of it without reentrance.
    """
    is_wrapped = strategy.sharding.is_fsdp and strategy.quirks.flat_shards
    is_nested = (
        strategy.checkpointing and strategy.quirks.reentrant and strategy.quirks.recomputes_shards
    )
    return is_wrapped and is_nested and strategy.method is Method.LORA


def _final_norm_bytes(spec: ModelSpec, strategy: Strategy, layer: LayerBytes) -> int:
    """The last norm's fp32 copy, its output, and the stream it read."""
    value = strategy.compute.value_bytes
    kept = (4 + value) if spec.is_rms_norm and not fuses_pointwise(strategy) else value
    return kept * spec.hidden_size + layer.checkpoint
