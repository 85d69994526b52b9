"""Floating point operations of one forward pass and of one training step."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import Objective
from tightfit.core.settings import Loss, Method
from tightfit.core.strategy import Strategy
from tightfit.estimation.weights import count_saved_traffic, is_lora_target, packs_experts
from tightfit.models.spec import Block, ModelSpec, Role


class AttentionLayers(NamedTuple):
    """Layers with the same attention mask."""

    num_layers: int
    causal: bool
    head_dim: int
    window: int | None = None
    """Positions a token sees at most, itself included."""


class Workload(NamedTuple):
    """Sums over a model's matrices that the time formulas need, computed once per spec.

    "Used" counts what one token passes through, "held" counts every expert.
    """

    num_layers: int
    num_norms: int
    """Norms over the hidden stream, all layers together."""
    norm_width: int
    """Their widths, summed."""
    num_head_norms: int
    head_norm_width: int
    """Widths of norms over single heads (query and key), summed over layers."""
    num_linears_used: int
    num_linears_held: int
    weights_used: int
    """Linear weights inside the blocks that one token is multiplied with."""
    weights_held: int
    inputs_used: int
    """Input widths of those matrices, summed."""
    outputs_used: int
    module_inputs_used: int
    """The same for modules only, a shared input counted once."""
    module_outputs_used: int
    num_expert_layers: int
    expert_weights_held: int
    grouped_weights_held: int
    """Of experts that the runtime multiplies itself."""
    mlp_weights_held: int
    """Of MLPs, experts among them."""
    mlp_width_used: int
    """Inner MLP values of one token, all layers together."""
    query_width: int
    key_width: int
    """Keys alone; values are as wide."""
    num_attentions: int
    """Attention calls of one pass: an encoder-decoder's decoder makes two in each layer."""
    attention: tuple[AttentionLayers, ...]
    head_weights: int
    hidden_size: int
    vocab_size: int
    num_params: int

    @property
    def module_weights(self) -> int:
        """Weights of modules: all but those of experts."""
        return self.weights_held - self.expert_weights_held

    def packed_weights(self, strategy: Strategy) -> int:
        """Weights that quantized loading packs."""
        if strategy.weights is Dtype.GPTQ4:
            return self.weights_held
        return self.module_weights + packs_experts(strategy) * self.grouped_weights_held


class AdapterSums(NamedTuple):
    """Sums over the matrices that LoRA attaches to, for one token."""

    num_used: int
    inputs_used: int
    outputs_used: int
    outputs_saved: int = 0
    """Outputs whose product includes the adapter (augmented weight)."""
    inputs_saved: int = 0
    """Inputs that a fused projection has read already."""


class PassFlops(NamedTuple):
    """One forward pass over `num_sequences` sequences, by part."""

    linear: float
    """Matrices inside the blocks; of experts, the chosen ones."""
    attention: float
    """Scores and weighted values."""
    head: float
    adapter: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head + self.adapter


class StepFlops(NamedTuple):
    """One optimizer step of all ranks."""

    model: float
    """FLOPs that the method needs; the numerator of MFU."""
    recomputed: float
    """FLOPs of activation recomputation; not part of `model`."""


@lru_cache(maxsize=64)
def sum_workload(spec: ModelSpec) -> Workload:
    """The spec's sums, computed once per spec."""
    parts = [(block.num_layers, part) for block in spec.blocks for part in block.linears]
    outer = [(1, part) for part in spec.outer_linears]
    used = [(n * part.copies_per_token, part) for n, part in parts]
    # The gate and up projections write the inner MLP values; the down projection reads them.
    inner = sum(
        n * part.in_features
        for n, part in used
        if part.role in (Role.MLP, Role.EXPERT) and part.out_features == spec.hidden_size
    )
    used += outer
    held = [(n * part.copies, part) for n, part in parts + outer]
    attention = _attention_layers(spec)
    num_attentions = sum(group.num_layers for group in attention)
    head_dims = sum(group.num_layers * group.head_dim for group in attention)
    return Workload(
        num_layers=spec.num_layers,
        num_norms=sum(b.num_layers * len(b.norm_widths) for b in spec.blocks),
        norm_width=sum(b.num_layers * sum(b.norm_widths) for b in spec.blocks),
        num_head_norms=sum(2 * b.num_layers for b in spec.blocks if b.head_norm_params),
        head_norm_width=sum(
            b.num_layers * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
            for b in spec.blocks
            if b.head_norm_params
        ),
        num_linears_used=sum(n for n, _ in used),
        num_linears_held=sum(n for n, _ in held),
        weights_used=sum(n * part.in_features * part.out_features for n, part in used),
        weights_held=sum(n * part.in_features * part.out_features for n, part in held),
        inputs_used=sum(n * part.in_features for n, part in used),
        outputs_used=sum(n * part.out_features for n, part in used),
        module_inputs_used=sum(b.num_layers * _sum_inputs(b) for b in spec.blocks),
        module_outputs_used=sum(n * part.out_features for n, part in used if part.is_module),
        num_expert_layers=sum(
            b.num_layers for b in spec.blocks if any(p.role is Role.EXPERT for p in b.linears)
        ),
        expert_weights_held=sum(
            n * part.in_features * part.out_features for n, part in held if part.role is Role.EXPERT
        ),
        grouped_weights_held=spec.grouped_params,
        mlp_weights_held=sum(
            n * part.in_features * part.out_features
            for n, part in held
            if part.role in (Role.MLP, Role.EXPERT)
        ),
        mlp_width_used=inner,
        query_width=spec.num_heads * head_dims,
        key_width=spec.num_kv_heads * head_dims,
        num_attentions=num_attentions,
        attention=attention,
        head_weights=spec.hidden_size * spec.vocab_size,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_params=spec.num_params,
    )


def _sum_inputs(block: Block) -> int:
    """Input widths of a layer's modules: in each part (attention, MLP) modules of one width share
    their input, and the last has its own."""
    total = 0
    for role in Role:
        parts = [part for part in block.linears if part.role is role and part.is_module]
        widths = {part.in_features: part.copies_per_token for part in parts[:-1]}
        total += sum(width * copies for width, copies in widths.items())
        total += sum(part.in_features * part.copies_per_token for part in parts[-1:])
    return total


def _attention_layers(spec: ModelSpec) -> tuple[AttentionLayers, ...]:
    """Encoder and cross attention see everything, decoder layers the past or a window of it."""
    blocks = [block for block in spec.blocks if block.attends]
    encoder = sum(b.num_layers for b in blocks if b.kind == "encoder")
    decoder = sum(b.num_layers for b in blocks) - encoder
    crossing = sum(
        b.num_layers for b in blocks if any(part.role is Role.CROSS_ATTENTION for part in b.linears)
    )
    sliding = min(spec.num_sliding_layers, decoder) if spec.sliding_window is not None else 0
    narrow = next((b.head_dim for b in blocks if b.head_dim is not None), spec.head_dim)
    groups = (
        AttentionLayers(num_layers=decoder - sliding, causal=True, head_dim=spec.head_dim),
        AttentionLayers(
            num_layers=sliding, causal=True, head_dim=narrow, window=spec.sliding_window
        ),
        AttentionLayers(num_layers=encoder + crossing, causal=False, head_dim=spec.head_dim),
    )
    return tuple(group for group in groups if group.num_layers)


@lru_cache(maxsize=64)
def _sum_targets(spec: ModelSpec, targets: tuple[str, ...]) -> AdapterSums:
    chosen = [
        (b.num_layers, part)
        for b in spec.blocks
        for part in b.linears
        if is_lora_target(part, targets)
    ]
    return AdapterSums(
        # Bare experts have one adapter each that is called once, whichever experts are chosen.
        num_used=sum(n * (part.copies_per_token if part.is_module else 1) for n, part in chosen),
        inputs_used=sum(n * part.copies_per_token * part.in_features for n, part in chosen),
        outputs_used=sum(n * part.copies_per_token * part.out_features for n, part in chosen),
    )


NO_ADAPTERS = AdapterSums(num_used=0, inputs_used=0, outputs_used=0)


def sum_adapters(spec: ModelSpec, strategy: Strategy) -> AdapterSums:
    """Widths that LoRA adds matrices for; nothing for other methods."""
    if strategy.method is not Method.LORA:
        return NO_ADAPTERS
    saved = count_saved_traffic(spec, strategy)
    found = _sum_targets(spec, strategy.lora_targets)
    return found._replace(outputs_saved=saved.outputs, inputs_saved=saved.inputs)


def count_pairs(seq_len: float, *, causal: bool, window: int | None = None) -> float:
    """(query, key) pairs of one head over one sequence: the whole square, or what a mask leaves."""
    if not causal:
        return seq_len * seq_len
    if window is None or seq_len <= window:
        return seq_len * (seq_len + 1) / 2
    return window * (window + 1) / 2 + (seq_len - window) * window


def estimate_forward_flops(
    spec: ModelSpec, *, num_sequences: float, seq_len: float, skip_masked: bool = True
) -> PassFlops:
    """Multiplications and additions of one forward pass; a matrix costs 2 per weight and token.

    Attention costs 4 per (query, key) pair and head channel. `skip_masked`
    leaves out pairs that the causal mask or the window hides; without it the
    whole square counts, as an eager implementation computes it and as the
    formulas of PaLM and Megatron count it. An encoder-decoder reads `seq_len`
    tokens on both sides. Leaves out norms, activations, softmax and rotations
    (well under 1%; they cost bytes, not FLOPs) and the embedding lookup.
    Source: PaLM arXiv:2204.02311 appendix B; Megatron-LM arXiv:2104.04473 eq. 2.
    """
    work = sum_workload(spec)
    tokens = num_sequences * seq_len
    products = sum(
        group.num_layers
        * spec.num_heads
        * group.head_dim
        * count_pairs(seq_len, causal=group.causal and skip_masked, window=group.window)
        for group in work.attention
    )
    return PassFlops(
        linear=2.0 * tokens * work.weights_used,
        attention=4.0 * num_sequences * products,
        head=2.0 * tokens * work.head_weights,
    )


def estimate_adapter_flops(spec: ModelSpec, strategy: Strategy, *, tokens: float) -> float:
    """Forward FLOPs of LoRA's two thin matrices beside each target."""
    adapters = sum_adapters(spec, strategy)
    return 2.0 * tokens * strategy.lora_rank * (adapters.inputs_used + adapters.outputs_used)


def estimate_step_flops(
    spec: ModelSpec, strategy: Strategy, *, seq_len: float | None = None
) -> StepFlops:
    """One optimizer step over all ranks and micro-batches.

    Backward costs twice the forward pass: gradients of inputs and of weights.
    LoRA needs no gradients of frozen weights, so those matrices cost once in
    the backward pass; attention has no weights and costs twice under any
    method. Method `load` is a forward pass. So is the reference in each step, without
    adapters, and the pass for KTO's divergence. Checkpointing repeats the blocks'
    forward pass, the head's not. `seq_len` stands in for the strategy's where
    batches are shorter on average.
    Leaves out that the first layer's inputs need no gradient under LoRA.
    Source: PaLM arXiv:2204.02311 appendix B; LoRA arXiv:2106.09685 section 4.
    """
    length = float(strategy.seq_len if seq_len is None else seq_len)
    sequences = strategy.examples_per_step * strategy.objective.record.num_sequences
    forward = estimate_forward_flops(spec, num_sequences=sequences, seq_len=length)
    if not strategy.is_trained:
        return StepFlops(model=forward.total, recomputed=0.0)
    adapter = estimate_adapter_flops(spec, strategy, tokens=sequences * length)
    if strategy.method is Method.FULL:
        model = 3.0 * forward.total
    else:
        head_passes = 3.0 if strategy.trains_head else 2.0
        model = 2.0 * forward.linear + 3.0 * forward.attention + 3.0 * adapter
        model += head_passes * forward.head
    with_adapters, without = count_forward_only_passes(strategy)
    model += with_adapters * (forward.total + adapter) + without * forward.total
    share = strategy.count_recomputed(spec.num_layers) / spec.num_layers
    repeated = share * (forward.linear + forward.attention + adapter)
    if recomputes_logits(strategy):
        repeated += forward.head
    return StepFlops(model=model, recomputed=repeated)


class ForwardOnlyPasses(NamedTuple):
    """Forward passes without gradients beside each pass that has them, over as many sequences."""

    with_adapters: int
    """Of mismatched prompts and answers, for KTO's divergence."""
    reference: int
    """Of the reference, where each step runs it."""


def count_forward_only_passes(strategy: Strategy) -> ForwardOnlyPasses:
    record = strategy.objective.record
    reference = count_reference_passes(strategy) if strategy.runs_reference else 0
    return ForwardOnlyPasses(record.num_kl_sequences // record.num_sequences, reference)


def count_reference_passes(strategy: Strategy) -> int:
    """Forward passes of the reference over a micro-batch's sequences, in a step or before."""
    record = strategy.objective.record
    return record.num_reference_sequences // record.num_sequences


def recomputes_logits(strategy: Strategy) -> bool:
    """Whether the backward pass computes each chunk of logits again.

    The fused loss of preferences does: how a token's gradient is scaled is known only when the
    whole answer's log-probability is. Source: training/log_probs.py.
    """
    return strategy.objective is not Objective.SFT and strategy.loss is Loss.FUSED


def skips_masked_pairs(attention: Attention, *, window: int | None, seq_len: float) -> bool:
    """Whether the kernel leaves masked pairs out instead of computing and discarding them.

    SDPA does for a plain causal mask; a window that is no longer than the
    sequence is passed to it as an explicit mask, and then it computes the whole
    square. Source: `_ignore_causal_mask_sdpa` in transformers' masking_utils.py.
    """
    skips = attention.record.skips
    if skips == "nothing":
        return False
    return skips == "windows" or window is None or seq_len < window
