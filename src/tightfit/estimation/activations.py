"""Activations: tensors that autograd keeps per layer, those of its backward pass, and their
sum over the micro-batch; logits and loss.

Counted tensor by tensor as transformers 5 layers make them; `docs/formulas.md` lists each with
its origin, and `benchmarks/results/h200_steps.json` holds the measurements behind them.
"""

from __future__ import annotations

from math import lcm
from typing import Literal, NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import Objective
from tightfit.core.settings import Loss, Method
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import skips_masked_pairs
from tightfit.estimation.weights import (
    augmented_token_bytes,
    is_dora,
    is_lora_target,
    packs_experts,
)
from tightfit.models.families.registry import find_family
from tightfit.models.spec import Block, Linear, ModelSpec, Role

# Bytes per value


class ValueWidths(NamedTuple):
    """Bytes per value in the parts of a model, for one strategy."""

    value: int
    """Results of matrix products."""
    residual: int
    """The residual stream: fp32 where weights or norms are, else as `value`."""
    is_autocast: bool
    is_full: bool
    adapter: int
    """Inputs of adapters."""
    is_cpu: bool = False


def find_value_widths(spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False) -> ValueWidths:
    # A quantized matrix returns the dtype it was given: fp32, where norms are, and where
    # autocast runs LayerNorm in fp32. Source: bitsandbytes Linear4bit; torch autocast's fp32 ops.
    is_uniform = _has_one_dtype(strategy)
    is_autocast = strategy.is_autocast and not is_uniform
    is_wide_norm = strategy.upcast_unquantized or (is_autocast and not spec.is_rms_norm)
    is_upcast = strategy.weights.is_quantized and is_wide_norm
    value = 4 if is_upcast else strategy.compute.value_bytes
    return ValueWidths(
        value=value,
        residual=4 if strategy.casts_weights or is_upcast else value,
        is_autocast=is_autocast,
        is_full=strategy.method is Method.FULL,
        # Autocast casts an adapter's input to the compute dtype, whatever the adapter is in.
        adapter=(
            strategy.compute if is_autocast or is_uniform else strategy.adapter_dtype
        ).value_bytes,
        is_cpu=is_cpu,
    )


def _has_one_dtype(strategy: Strategy) -> bool:
    """Whether modules see weights and adapters in the compute dtype only, without casts.

    DeepSpeed knows no autocast and wants one dtype throughout; FSDP casts fp32 shards as it
    gathers them, adapters among them.
    """
    is_half = strategy.compute.value_bytes == 2
    is_gathered_half = strategy.sharding.is_fsdp and strategy.weights is Dtype.FP32
    return is_half and (strategy.sharding.is_zero or is_gathered_half)


COMPOSED_ACTIVATIONS = {
    "gelu_new": 3,
    "gelu_fast": 3,
    "gelu_python": 2,
    "quick_gelu": 1,
    "xielu": 3,
}
"""Extra kept tensors of activations written as several ops. Source: transformers activations.py."""


class LayerBytes(NamedTuple):
    """One layer's activations, in bytes per token of the micro-batch."""

    saved: int
    """Kept from forward to backward when nothing is recomputed."""
    checkpoint: int
    """Kept when the layer is recomputed: its input."""
    working: int
    """On top of `saved` at the peak of this layer's own backward pass."""
    adapted_weights: int
    """Total bytes, whatever the tokens: sums of weights and adapters that the graph keeps."""
    offloaded: int = 0
    """The part of `checkpoint` that goes to host memory."""


def estimate_layer_bytes(
    spec: ModelSpec, block: Block, strategy: Strategy, *, is_cpu: bool = False
) -> LayerBytes:
    """Activations of one layer of `block`, per token.

    Scope: decoder and encoder layers of the families in `models/families`,
    dense or with experts, eager or fused attention. Leaves out dropout masks
    and padding masks, and the scan of linear attention and Mamba.
    """
    numerics = find_value_widths(spec, strategy, is_cpu=is_cpu)
    norms = _norm_bytes(spec, block, strategy, numerics)
    attention = _attention_bytes(spec, block, strategy, numerics)
    attention += _mixer_bytes(block, strategy, numerics)
    mlp = wide = _mlp_bytes(spec, block, strategy, numerics)
    if strategy.mlp_tiles > 1:  # its input alone is kept
        mlp = numerics.value * spec.hidden_size
    inputs = _context_bytes(spec, block, strategy, numerics)
    held = _held_input_bytes(block, strategy, numerics, is_recomputed=False)
    saved = norms + attention + mlp + held + _outlier_bytes(block, strategy)
    saved += _dora_bytes(block, strategy, numerics) + augmented_token_bytes(spec, block, strategy)
    router_loss = _router_loss_bytes(block, strategy, numerics)
    saved += router_loss
    mlp_peak = saved + _mlp_working(spec, block, numerics)
    if strategy.mlp_tiles > 1:
        tile = wide + _mlp_working(spec, block, numerics)
        mlp_peak = saved + tile // strategy.mlp_tiles + 2 * numerics.residual * spec.hidden_size
    attention_peak = saved - mlp + _attention_working(spec, block, strategy, numerics)
    return LayerBytes(
        saved=saved,
        checkpoint=numerics.residual * spec.hidden_size
        + inputs
        + _held_input_bytes(block, strategy, numerics, is_recomputed=True)
        + router_loss,
        working=max(mlp_peak, attention_peak) - saved,
        adapted_weights=_adapted_weight_bytes(block, strategy) + _tile_sum_bytes(block, strategy),
        # On a CPU the copy is as large as what it replaces.
        offloaded=0 if is_cpu else offloaded_input_bytes(spec, strategy),
    )


def offloaded_input_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """A recomputed layer's input per token, where it goes to host memory."""
    if not (strategy.checkpointing and strategy.offloaded_inputs):
        return 0
    return find_value_widths(spec, strategy).residual * spec.hidden_size


def _router_loss_bytes(block: Block, strategy: Strategy, numerics: ValueWidths) -> int:
    """Probabilities of all experts, also of recomputed layers; then the gradients of the logits,
    in their place, until the backward pass reaches the layer.

    Leaves out the logits themselves, which are gone before the head's. Source: transformers
    `load_balancing_loss_func`, whose softmax keeps its result; counted in traced steps.
    """
    if not strategy.router_loss_weight:
        return 0
    return (4 if numerics.is_autocast else numerics.value) * block.num_experts


def cache_bytes(spec: ModelSpec, block: Block, strategy: Strategy) -> int:
    """Keys and values that one layer leaves in the cache, per token.

    Views of a fused projection keep all of it. Source: transformers 4.48 modeling_gpt_bigcode,
    which fills the cache under gradient checkpointing too.
    """
    if not strategy.quirks.use_cache or not block.attends:
        return 0
    first = next((part for part in block.linears if part.role is Role.ATTENTION), None)
    if first is None:
        return 0
    keys = 2 * spec.num_kv_heads * spec.head_dim
    is_fused = first.out_features > spec.num_heads * spec.head_dim
    return find_value_widths(spec, strategy).value * (first.out_features if is_fused else keys)


def _adapted_weight_bytes(block: Block, strategy: Strategy) -> int:
    """peft adapts bare parameters by adding the adapter's product, which makes a copy of each.
    Experts that we multiply keep the adapter itself, scaled and by experts.

    Source: peft ParamWrapper; h200_steps.json, Mixtral and Qwen3-MoE under `all-linear`.
    """
    if strategy.method is not Method.LORA:
        return 0
    total = 0
    for part in block.linears:
        if part.is_module or not is_lora_target(part, strategy.lora_targets):
            continue
        if part.is_grouped and not strategy.quirks.plain_modelling:
            is_cast = strategy.adapter_dtype is not strategy.compute
            width = part.out_features + (part.in_features if is_cast else 0)
            total += part.copies * part.lora_rank_factor * strategy.lora_rank * width
        else:
            total += part.copies * part.in_features * part.out_features
    return strategy.compute.value_bytes * total


def _tile_sum_bytes(block: Block, strategy: Strategy) -> int:
    """Gradients of a tiled MLP's trained weights, added up over its tiles in fp32."""
    if strategy.mlp_tiles == 1 or strategy.method is not Method.FULL:
        return 0
    parts = (part for part in block.linears if part.role in (Role.MLP, Role.EXPERT))
    return 4 * sum(part.num_params for part in parts)


def _dora_bytes(block: Block, strategy: Strategy, numerics: ValueWidths) -> int:
    """Outputs of base and adapter that DoRA keeps per target, for the magnitude's gradient.

    With dropout the base's result is computed again from the dropped input, which the adapter
    keeps already. Source: peft `DoraLinearLayer.forward`, counted by saved-tensor hooks.
    """
    if not is_dora(strategy):
        return 0
    wide = max(numerics.value, numerics.adapter)
    return sum(
        (numerics.value + wide) * part.out_features
        for part in block.linears
        if part.is_module and is_lora_target(part, strategy.lora_targets)
    )


def _outlier_bytes(block: Block, strategy: Strategy) -> int:
    """Columns that LLM.int8 multiplies in 16 bit and keeps for its backward pass.

    Which they are depends on values: none here, or all of an MLP's product.
    Source: bitsandbytes MatMul8bitLt `subA`; h200_steps.json, Llama-2-7b with random weights.
    """
    if strategy.weights is not Dtype.INT8 or not strategy.quirks.outlier_columns:
        return 0
    dense = [part for part in block.linears if part.role is Role.MLP]
    return strategy.compute.value_bytes * dense[-1].in_features if dense else 0


def _held_input_bytes(
    block: Block, strategy: Strategy, numerics: ValueWidths, *, is_recomputed: bool
) -> int:
    """Inputs that 4-bit matrices of old bitsandbytes keep on the autograd context.

    While the layer's own tensors live, those are left out that an adapter or fused attention
    keeps anyway. Only reentrant checkpointing drops them with the layer.
    Source: bitsandbytes #1270, which removed it from MatMul4Bit.
    """
    if strategy.weights is not Dtype.NF4 or not strategy.quirks.keeps_quantized_inputs:
        return 0
    if is_recomputed and strategy.quirks.reentrant:
        return 0
    shares = _shares_inputs(strategy, numerics)
    total = 0
    for role in (Role.ATTENTION, Role.MLP):
        parts = [part for part in block.linears if part.role is role]
        for group in filter(None, (parts[:-1], parts[-1:])):
            is_adapted = any(is_lora_target(part, strategy.lora_targets) for part in group)
            is_output = role is Role.ATTENTION and group == parts[-1:]
            if is_recomputed or not (is_output or (shares and is_adapted)):
                total += numerics.value * group[0].in_features
    return total


def _context_bytes(spec: ModelSpec, block: Block, strategy: Strategy, numerics: ValueWidths) -> int:
    """Inputs that LLM.int8 keeps even where the layer is recomputed.

    bitsandbytes holds them on the autograd context itself, where non-reentrant
    checkpointing cannot drop them. Source: bitsandbytes MatMul8bitLt; h200_trace_dev.json.
    """
    if strategy.weights is not Dtype.INT8 or strategy.method is not Method.LORA:
        return 0
    roles = {part.role: part.in_features for part in block.linears if part.is_module}
    widths = sum(spec.hidden_size + last for last in roles.values())
    return numerics.residual * widths + _outlier_bytes(block, strategy)


def fuses_pointwise(strategy: Strategy) -> bool:
    """Whether norms and activations keep only their inputs and are recomputed in backward.

    torch.compile cuts the graph so that pointwise results are recomputed. Counted on a Llama
    layer under full tuning, per token and hidden unit: 42 bytes eager, 29 compiled.
    Source: torch._functorch.partitioners `min_cut_rematerialization_partition`.
    """
    return strategy.fused_kernels or strategy.compile


def _norm_bytes(spec: ModelSpec, block: Block, strategy: Strategy, numerics: ValueWidths) -> int:
    """Tensors that the layer's norms keep; their outputs are counted as inputs of matrices.

    RMSNorm upcasts to fp32 and keeps that copy; where its weight is trained it
    keeps the normalised values too. LayerNorm and fused norms keep their input.
    """
    widths = sum(block.norm_widths)
    if spec.is_parallel_residual:
        widths = max(block.norm_widths)  # both norms read the same tensor
    family = find_family(spec.model_type)
    is_composed = spec.is_rms_norm or family.composes_norm
    if not is_composed or fuses_pointwise(strategy):
        return numerics.residual * widths
    kept = 4 * widths
    if numerics.is_full:
        kept += (4 if family.keeps_norm_output_fp32 else numerics.residual) * widths
    return kept


def _input_bytes(parts: list[Linear], width: int, strategy: Strategy, numerics: ValueWidths) -> int:
    """Copies of one input that its matrices keep.

    A trained matrix keeps its input; all matrices share one copy, except where autocast casts
    a wider one for each. A frozen one keeps nothing, its adapter does.
    """
    if numerics.is_full:
        is_cast = numerics.is_autocast and numerics.residual != numerics.value
        num_copies = len(parts) if is_cast else 1
        return num_copies * numerics.value * width
    num_targets = sum(is_lora_target(part, strategy.lora_targets) for part in parts)
    if strategy.method is not Method.LORA or not num_targets:
        return 0
    masks = num_targets * width if strategy.lora_dropout else 0
    copies = 1 if _shares_inputs(strategy, numerics) else num_targets
    return copies * numerics.adapter * width + masks


def _shares_inputs(strategy: Strategy, numerics: ValueWidths) -> bool:
    """Whether adapters read the same tensor as their matrices, without cast or dropout.

    Source: peft lora/layer.py; h200_steps.json, Llama-2-7b with and without `lora_dropout`.
    """
    is_wide = numerics.residual != numerics.value or strategy.adapter_dtype is not strategy.compute
    is_cast = numerics.adapter != numerics.value or (numerics.is_autocast and is_wide)
    return not is_cast and not strategy.lora_dropout


def _attention_bytes(
    spec: ModelSpec, block: Block, strategy: Strategy, numerics: ValueWidths
) -> int:
    total = 0
    for role in (Role.ATTENTION, Role.CROSS_ATTENTION):
        parts = [part for part in block.linears if part.role is role]
        if not parts:
            continue
        total += _shared_input_bytes(parts[:-1], strategy, numerics)
        total += _score_bytes(spec, block, strategy, numerics)
        context = parts[-1].in_features
        output = _input_bytes(parts[-1:], context, strategy, numerics)
        # Fused attention keeps its own output already; a copy cast for an adapter is another.
        is_fused = not _is_eager(spec, strategy)
        total += (
            max(output, numerics.value * context)
            if is_fused and not _casts(strategy, numerics)
            else output + (numerics.value * context if is_fused else 0)
        )
    if block.head_norm_params:
        heads = (spec.num_heads + spec.num_kv_heads) * (block.head_dim or spec.head_dim)
        total += (4 + (numerics.value if numerics.is_full else 0)) * heads
    return total


def _shared_input_bytes(parts: list[Linear], strategy: Strategy, numerics: ValueWidths) -> int:
    """As `_input_bytes`, of matrices that read the same tensor where their inputs are as wide."""
    return sum(
        _input_bytes([p for p in parts if p.in_features == width], width, strategy, numerics)
        for width in {part.in_features for part in parts}
    )


MIXER_COPIES = 3
"""Tensors kept of each value that a mixer projects: the convolution's input, its result and the
activation of that, which the scan reads. Source: transformers modeling_qwen3_next, modeling_bamba;
not measured."""


def _mixer_bytes(block: Block, strategy: Strategy, numerics: ValueWidths) -> int:
    """Inputs and outputs of the projections of linear attention, Mamba or a convolution."""
    parts = [part for part in block.linears if part.role is Role.MIXER]
    projected = sum(part.out_features for part in parts[:-1])
    inputs = _shared_input_bytes(parts, strategy, numerics)
    return inputs + MIXER_COPIES * numerics.value * projected


def _casts(strategy: Strategy, numerics: ValueWidths) -> bool:
    return strategy.method is Method.LORA and numerics.adapter != numerics.value


def _is_eager(spec: ModelSpec, strategy: Strategy) -> bool:
    has_fused = find_family(spec.model_type).has_fused_attention
    return strategy.attention.record.stores_scores or not has_fused


MATH_SCORE_BYTES = 4
"""Per query, key and head that SDPA's math kernel keeps: probabilities in fp32, beside
fp32 queries, keys, values. Source: torch `_scaled_dot_product_attention_math`; h200_steps.json."""
BIASED_SCORE_BYTES = 8
"""The same with a learned bias and dropout: the bias as a mask, and the dropout mask.
Source: h200_steps.json, t5-large."""


def _uses_math_kernel(spec: ModelSpec, strategy: Strategy, numerics: ValueWidths) -> bool:
    """Whether SDPA falls back to the math kernel, which keeps the scores.

    FlashAttention has no fp32; the memory-efficient kernel has no grouped heads. A CPU's kernel
    takes them all.
    Source: torch 2.13, `_scaled_dot_product_flash_attention_for_cpu` as the gradient's name.
    """
    family = find_family(spec.model_type)
    if numerics.is_cpu and not family.has_position_bias:
        return False
    is_grouped = spec.num_kv_heads < spec.num_heads and _repeated_fraction(spec, strategy) < 1
    has_no_flash = strategy.compute is Dtype.FP32 or _always_masks(spec, strategy)
    return strategy.attention is Attention.SDPA and (
        family.has_position_bias or (has_no_flash and is_grouped)
    )


def _always_masks(spec: ModelSpec, strategy: Strategy) -> bool:
    """Whether SDPA is given a mask, and broadcasts grouped keys, as Falcon's own code does."""
    return strategy.quirks.plain_modelling and find_family(spec.model_type).sdpa_always_masks


def has_padding_mask(strategy: Strategy) -> bool:
    """Whether padded rows come with a mask; not in tightfit's own jobs, see `collate_padded`."""
    several = strategy.sequences_per_micro_batch > 1
    return strategy.quirks.padding_mask and several and not strategy.packing


def _repeated_fraction(spec: ModelSpec, strategy: Strategy) -> float:
    """Share of layers where grouped keys and values are repeated before SDPA.

    transformers repeats them where there is a mask, as for a window that is no longer than
    the row. Source: transformers `use_gqa_in_sdpa`.
    """
    if strategy.attention is not Attention.SDPA or _always_masks(spec, strategy):
        return 0.0
    if strategy.repeat_keys or has_padding_mask(strategy):
        return 1.0
    is_windowed = not strategy.packing and not skips_masked_pairs(
        strategy.attention, window=spec.sliding_window, seq_len=strategy.seq_len
    )
    return spec.num_sliding_layers / spec.num_layers if is_windowed else 0.0


def find_unfused_attention(
    spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False
) -> Literal["eager", "math"] | None:
    """The attention implementation, if it writes its scores to memory; None for a fused kernel."""
    if _is_eager(spec, strategy):
        return "eager"
    numerics = find_value_widths(spec, strategy, is_cpu=is_cpu)
    return "math" if _uses_math_kernel(spec, strategy, numerics) else None


def _score_bytes(spec: ModelSpec, block: Block, strategy: Strategy, numerics: ValueWidths) -> int:
    """Queries, keys, values and, when eager, the S x S probabilities."""
    head_dim = block.head_dim or spec.head_dim
    query = spec.num_heads * head_dim
    # GPUs that share rows repeat grouped keys until each has equally many.
    kv_heads = lcm(spec.num_kv_heads, strategy.context_parallel)
    repeated = _repeated_fraction(spec, strategy) * (spec.num_heads - kv_heads)
    key = round((kv_heads + repeated) * head_dim)
    # The values are a view that keeps the whole projection alive, where queries and keys are
    # rotated copies. Falcon without grouped heads uses ALiBi instead.
    family = find_family(spec.model_type)
    is_grouped = spec.num_kv_heads < spec.num_heads
    is_split = family.splits_rotary and (family.alibi != "ungrouped" or is_grouped)
    is_split = is_split and strategy.context_parallel == 1  # what is exchanged is a copy
    projection = numerics.value * (query + key) if is_split else 0
    if not _is_eager(spec, strategy):
        inputs = numerics.value * (query + 2 * key) + projection
        if not _uses_math_kernel(spec, strategy, numerics):
            return inputs + 4 * spec.num_heads
        if family.has_position_bias:
            return inputs + BIASED_SCORE_BYTES * spec.num_heads * strategy.seq_len
        # With several rows, broadcast keys and values are copied to all heads.
        copied = 8 * (query if strategy.sequences_per_micro_batch > 1 else key)
        return (
            4 * query + copied + projection + MATH_SCORE_BYTES * spec.num_heads * strategy.seq_len
        )
    # softmax in fp32, kept; then the copy in the compute dtype that meets the values, kept too
    probability = 4 if numerics.value == 4 else 4 + numerics.value
    if spec.has_attention_softcap:
        probability += numerics.value
    scores = probability * spec.num_heads * strategy.seq_len
    return numerics.value * 3 * query + projection + scores


def _mlp_bytes(spec: ModelSpec, block: Block, strategy: Strategy, numerics: ValueWidths) -> int:
    dense = [part for part in block.linears if part.role is Role.MLP]
    experts = [part for part in block.linears if part.role is Role.EXPERT]
    total = 0
    if dense:
        width = dense[-1].in_features
        total += _input_bytes(dense[:-1], spec.hidden_size, strategy, numerics)
        total += _inner_bytes(spec, strategy, numerics) * width
        total += _input_bytes(dense[-1:], width, strategy, numerics)
    if experts:
        num_active = experts[-1].copies_per_token
        width = experts[-1].in_features
        per_expert = numerics.value * (2 if spec.is_gated_mlp else 1) * width
        is_compiled = strategy.compile and not packs_experts(strategy)
        if is_compiled or strategy.quirks.plain_modelling:
            # Tokens are gathered for each expert, and each expert's output is kept for the router.
            per_expert = _inner_bytes(spec, strategy, numerics) * width
            per_expert += numerics.value * spec.hidden_size
            if numerics.is_full:
                per_expert += numerics.value * (width + spec.hidden_size)
            if not dense:
                total += _input_bytes(experts[:1], spec.hidden_size, strategy, numerics)
        else:  # the first product and the input alone: runtime/kernels/experts.py
            total += numerics.value * spec.hidden_size
        total += num_active * per_expert
    return total


def _inner_bytes(spec: ModelSpec, strategy: Strategy, numerics: ValueWidths) -> int:
    """Kept per unit of MLP width, without the input of the last matrix.

    Gated: both branches and the activated one; a fused kernel recomputes the
    latter. Plain: the activation's input, more where it is composed of ops.
    """
    if spec.is_gated_mlp:
        return numerics.value * (2 if fuses_pointwise(strategy) else 3)
    is_composed = not strategy.compile
    return numerics.value * (1 + is_composed * COMPOSED_ACTIVATIONS.get(spec.activation, 0))


def _mlp_working(spec: ModelSpec, block: Block, numerics: ValueWidths) -> int:
    """Gradients of the two branches and of the residual stream."""
    parts = [part for part in block.linears if part.role in (Role.MLP, Role.EXPERT)]
    if not parts:
        return 2 * numerics.residual * spec.hidden_size
    width = parts[-1].in_features * parts[-1].copies_per_token
    return 2 * numerics.value * width + 2 * numerics.residual * spec.hidden_size


def _attention_working(
    spec: ModelSpec, block: Block, strategy: Strategy, numerics: ValueWidths
) -> int:
    """Gradients of queries, keys and values; eager adds those of the scores, in fp32."""
    if not block.attends:
        projected = sum(part.out_features for part in block.linears if part.role is Role.MIXER)
        return 2 * numerics.value * projected + 2 * numerics.residual * spec.hidden_size
    query = spec.num_heads * (block.head_dim or spec.head_dim)
    fused = 4 * numerics.value * query + 2 * numerics.residual * spec.hidden_size
    if not _is_eager(spec, strategy) and not _uses_math_kernel(spec, strategy, numerics):
        return fused
    of_probabilities = numerics.value if _is_eager(spec, strategy) else 4
    return fused + (of_probabilities + 8) * spec.num_heads * strategy.seq_len


# The whole micro-batch


class ActivationBytes(NamedTuple):
    """Activations of the whole micro-batch."""

    kept: int
    """Everything alive at the end of the forward pass."""
    in_layers: int
    """The part alive when the forward pass is in the last layer but one."""
    first_layer: int
    """The part alive at the end of the backward pass: the first layer's own."""
    recomputed: int
    """With selective checkpointing: all activations alive in the backward pass of the last
    recomputed layer, when those of the other layers are freed. 0 otherwise."""
    of_recomputed: int
    """Inputs of the recomputed layers, a part of `recomputed`."""
    dropped: int
    """Activations that recomputed layers freed in the forward pass."""
    working: int
    """Gradients of activations inside the worst layer, recomputed tensors included."""
    cache: int
    """Keys and values of all layers, until the model's output is dropped."""


def list_layers(
    spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False
) -> list[tuple[int, LayerBytes]]:
    """Number of layers of each kind, and the bytes of one per token."""
    return [
        (b.num_layers, estimate_layer_bytes(spec, b, strategy, is_cpu=is_cpu)) for b in spec.blocks
    ]


def estimate_activation_bytes(
    spec: ModelSpec, strategy: Strategy, layers: list[tuple[int, LayerBytes]]
) -> ActivationBytes:
    """Sum over all layers with their checkpointing, and the final norm."""
    tokens = strategy.tokens_per_micro_batch
    worst = max((layer for _, layer in layers), key=lambda layer: layer.saved + layer.working)
    final = _final_norm_bytes(spec, strategy, worst)

    def whole(layer: LayerBytes) -> int:
        return tokens * layer.saved + layer.adapted_weights

    num_recomputed_layers = num_left = strategy.count_recomputed(spec.num_layers)
    is_selective = 0 < num_recomputed_layers < spec.num_layers
    of_recomputed = of_others = dropped = 0
    for count, layer in layers:
        num_recomputed = min(count, num_left)
        num_left -= num_recomputed
        of_recomputed += num_recomputed * tokens * layer.checkpoint
        of_others += (count - num_recomputed) * whole(layer)
        dropped += num_recomputed * tokens * max(0, layer.saved - layer.checkpoint)
    # Of the inputs in host memory one is on its way out, then back.
    moved = tokens * worst.offloaded
    of_recomputed -= strategy.count_offloaded_inputs(spec.num_layers) * moved
    again = whole(worst) + moved if strategy.checkpointing else 0
    of_layers = of_recomputed + of_others
    first = tokens * worst.checkpoint if strategy.checkpointing else whole(worst)
    return ActivationBytes(
        kept=of_layers + tokens * final,
        in_layers=of_layers * (spec.num_layers - 1) // spec.num_layers + moved,
        first_layer=2 * of_layers if _pins_layer_inputs(strategy) else first,
        recomputed=of_recomputed + again + tokens * worst.working if is_selective else 0,
        of_recomputed=of_recomputed,
        dropped=dropped,
        # If the last layers are not recomputed, the backward pass begins without recomputation.
        working=(0 if is_selective else again) + tokens * worst.working,
        cache=tokens * sum(b.num_layers * cache_bytes(spec, b, strategy) for b in spec.blocks),
    )


def _pins_layer_inputs(strategy: Strategy) -> bool:
    """Whether each layer's input and its gradient outlive the layer's backward pass.

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


# Logits and loss: the memory that the vocabulary takes at the peak.

NUM_LOSS_CHUNKS = 8
"""Chunks of the chunked loss. Source: torchtune CEWithChunkedOutputLoss, num_output_chunks=8."""


def can_fuse_head_and_loss(spec: ModelSpec) -> bool:
    """Whether the loss can apply the head itself, which lets the fused loss work in chunks."""
    return not find_family(spec.model_type).scales_logits and not spec.is_encoder_decoder


class LossBytes(NamedTuple):
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
    output, and makes fp32 gradients one chunk at a time; torchtune compiles it, keeps
    the head's output alone and computes the rest again (`compile_loss`; counted
    under torch's min-cut partitioner: 2 bytes, 4 eager). Fused (Liger) never holds more
    than one chunk of logits, and writes the gradient of the hidden states at once.
    Where LoRA trains rows of new tokens, peft puts them into a copy of the head's matrix, which
    the head's backward pass reads; Liger's does not. The fused loss takes a head with an adapter
    as such a copy.
    Leaves out the shifted copy that transformers before 4.45 made.
    Source: transformers loss_utils.ForCausalLMLoss; liger fused_linear_cross_entropy; peft
    TrainableTokensLayer.
    """
    found = _estimate_loss(spec, strategy)
    if not strategy.copies_head:
        return found
    copy = spec.embedding_params * strategy.compute.value_bytes
    # In the backward pass Liger's loss holds that copy's gradient instead. Else the gradient comes
    # when the logits' own in fp32 are gone, and is not part of this peak.
    return LossBytes(forward=found.forward + copy, backward=found.backward + copy)


def _estimate_loss(spec: ModelSpec, strategy: Strategy) -> LossBytes:
    tokens = strategy.tokens_per_micro_batch
    table = tokens * spec.vocab_size
    value = strategy.compute.value_bytes
    softcap = value * table if spec.has_logit_softcap else 0
    dropped = 0 if strategy.quirks.keeps_logits else value * table
    is_head_fusible = can_fuse_head_and_loss(spec)
    if strategy.loss is Loss.FUSED and is_head_fusible:
        is_sft = strategy.objective is Objective.SFT
        return (_estimate_fused if is_sft else _estimate_log_probs)(spec, strategy)
    if strategy.loss is Loss.CHUNKED:
        if strategy.compile and strategy.trainer:  # ours compiles layers, not the loss
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


def count_chunk_tokens(*, tokens: int, hidden_size: int, vocab_size: int, factor: int) -> int:
    """Tokens of the fused loss's largest chunk: a power of two, or all there are.

    Source: liger-kernel 0.8.5, fused_linear_cross_entropy_forward, `chunk_mem_const`.
    """
    num_chunks = -(-vocab_size // (factor * hidden_size))
    return min(tokens, 1 << max(0, (-(-tokens // num_chunks) - 1).bit_length()))


def _count_chunk_tokens(spec: ModelSpec, strategy: Strategy) -> int:
    return count_chunk_tokens(
        tokens=strategy.tokens_per_micro_batch,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        factor=strategy.loss_chunk_factor,
    )


def _estimate_fused(spec: ModelSpec, strategy: Strategy) -> LossBytes:
    """One chunk of logits at a time; chunks shrink as the vocabulary grows."""
    tokens = strategy.tokens_per_micro_batch
    value = strategy.compute.value_bytes
    chunk_tokens = _count_chunk_tokens(spec, strategy)
    logits = 2 * chunk_tokens * spec.vocab_size * value
    hidden_gradient = tokens * spec.hidden_size * value
    head_gradient = 2 * spec.embedding_params * value if strategy.trains_head else 0
    total = logits + hidden_gradient + head_gradient
    return LossBytes(forward=total, backward=hidden_gradient)


TRL_TILE = (4096, 32768)
"""Tokens and words of a tile of logits. Source: trl 1.16, kernels/chunked_logprob.py, utils.py."""


def _estimate_log_probs(spec: ModelSpec, strategy: Strategy) -> LossBytes:
    """The fused loss of preferences: one chunk of logits at a time in both passes.

    The forward pass makes an fp32 chunk, and a copy of it for the sum of exponentials; it keeps one
    number per token. The backward pass makes the chunk again, and its gradient as the head takes
    it, beside the gradient of the hidden states and, where it is trained, the head's.
    """
    tokens = strategy.tokens_per_micro_batch
    value = strategy.compute.value_bytes
    head = spec.embedding_params if strategy.trains_head else 0
    gradients = tokens * spec.hidden_size + head
    if strategy.quirks.tiled_log_probs:
        tile = value * min(tokens, TRL_TILE[0]) * min(spec.vocab_size, TRL_TILE[1])
        return LossBytes(forward=tile, backward=tile + 4 * gradients)
    chunk_tokens = _count_chunk_tokens(spec, strategy)
    table = chunk_tokens * spec.vocab_size
    narrow = value if value < 4 else 0
    return LossBytes(forward=8 * table, backward=(4 + narrow) * table + value * gradients)
