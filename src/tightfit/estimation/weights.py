"""Weights: values and bytes of the base model, its adapters and fused projections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import ALL_LINEAR, EXPERTS, Method
from tightfit.core.strategy import Strategy
from tightfit.models.families.registry import find_family
from tightfit.models.spec import Block, Linear, ModelSpec

NF4_BLOCK = 64
"""Values per fp32 scale. Source: bitsandbytes `quantize_4bit`, QLoRA arXiv:2305.14314 section 3."""
NF4_OUTER_BLOCK = 256
"""Scales per fp32 scale-of-scales under double quantization. Source: as above."""
GPTQ_GROUP = 128
"""Values per fp16 scale and packed zero. Source: GPTQ arXiv:2210.17323; the usual group size."""


def as_loaded(spec: ModelSpec, strategy: Strategy) -> Strategy:
    """The strategy with the weight format that loading produces.

    Families that quantized loading skips stay in the dtype of unquantized parameters. A dequantized
    base trains in the compute dtype; `dequantized_base` still says that its files are nf4.
    """
    # bitsandbytes loading takes nn.Linear itself and no subclass: `replace_with_bnb_linear`.
    is_packed = find_family(spec.model_type).quantizes_linears or strategy.quirks.packs_subclasses
    if not is_packed and strategy.weights in (Dtype.NF4, Dtype.INT8):
        plain = Dtype.FP32 if strategy.upcast_unquantized else strategy.compute
        return strategy.model_copy(update={"weights": plain, "dequantized_base": False})
    if strategy.dequantized_base and strategy.weights is Dtype.NF4:
        return strategy.model_copy(update={"weights": strategy.compute})
    return strategy


def as_used_for_inference(strategy: Strategy) -> Strategy:
    """The loaded strategy as its result is used for inference: with the base as stored, that is
    without dequantization and without fp8."""
    changes: dict[str, object] = {"fp8": False, "fp8_gradients": False} if strategy.has_fp8 else {}
    if strategy.dequantized_base:
        changes |= {"weights": Dtype.NF4, "dequantized_base": False}
    return strategy.model_copy(update=changes) if changes else strategy


class WeightBytes(NamedTuple):
    """The base model in memory, unsharded."""

    packed: int
    """Quantized matrices, or all values where nothing is quantized."""
    plain: int
    """Unquantized values beside them: embeddings, head, norms."""
    quantization_state: int
    """Scales, zeros and indices of quantized matrices."""

    @property
    def total(self) -> int:
        return self.packed + self.plain + self.quantization_state


def estimate_weight_bytes(spec: ModelSpec, strategy: Strategy) -> WeightBytes:
    """Base weights as loaded for `strategy`, before any sharding.

    Quantized loading packs the linear layers of the blocks: embeddings, head and
    norms stay in 16 bit. Bare experts are packed in nf4 where the runtime multiplies
    them itself, and in GPTQ checkpoints. fp8 keeps linear layers at one byte per value
    where they are frozen; their scales are negligible.
    Source: transformers `replace_with_bnb_linear`; bitsandbytes Linear4bit, Linear8bitLt.
    """
    if strategy.stores_fp8:
        plain = 2 * (spec.num_params - spec.linear_params)
        return WeightBytes(packed=spec.linear_params, plain=plain, quantization_state=0)
    if not strategy.weights.is_quantized:
        return WeightBytes(
            packed=spec.num_params * strategy.weights.value_bytes, plain=0, quantization_state=0
        )
    packed, state = _quantized_bytes(spec, strategy)
    plain_value = 4 if strategy.upcast_unquantized else 2
    return WeightBytes(
        packed=packed,
        plain=(spec.num_params - count_quantized_values(spec, strategy)) * plain_value,
        quantization_state=state,
    )


def packs_experts(strategy: Strategy) -> bool:
    """Whether nf4 takes experts that we multiply ourselves. Other trainers' loading does not."""
    return strategy.weights is Dtype.NF4 and not strategy.quirks.plain_modelling


def count_quantized_values(spec: ModelSpec, strategy: Strategy) -> int:
    """Number of values that quantized loading packs."""
    if strategy.weights is not Dtype.GPTQ4:
        return spec.linear_params + packs_experts(strategy) * spec.grouped_params
    return sum(
        b.num_layers * sum(p.copies * p.in_features * p.out_features for p in b.linears)
        for b in spec.blocks
    )


def _quantized_bytes(spec: ModelSpec, strategy: Strategy) -> tuple[int, int]:
    dtype, num_values = strategy.weights, count_quantized_values(spec, strategy)
    if dtype is Dtype.INT8:
        rows = sum(
            b.num_layers * sum(p.copies * p.out_features for p in b.linears) for b in spec.blocks
        )
        return num_values, 4 * rows
    if dtype is Dtype.NF4:
        num_scales = num_values // NF4_BLOCK
        doubly = num_scales + 4 * num_scales // NF4_OUTER_BLOCK
        state = doubly if strategy.double_quant else 4 * num_scales
        return num_values // 2, state
    num_groups = num_values // GPTQ_GROUP
    columns = sum(
        b.num_layers * sum(p.copies * p.in_features for p in b.linears) for b in spec.blocks
    )
    return num_values // 2, 2 * num_groups + num_groups // 2 + 4 * columns


def is_lora_target(part: Linear, targets: tuple[str, ...]) -> bool:
    """Whether LoRA attaches to this matrix, by peft's rule of matching the end of the name."""
    if not part.takes_adapter:
        return False
    if ALL_LINEAR in targets:
        return part.lora_rank_factor > 0 and (part.is_module or EXPERTS in targets)
    return part.is_module and part.name in targets


def is_dora(strategy: Strategy) -> bool:
    """Whether LoRA is DoRA: adapters with a separate magnitude."""
    return strategy.dora and strategy.method is Method.LORA


@lru_cache(maxsize=1024)
def _count_adapter_values(block: Block, targets: tuple[str, ...], rank: int, *, dora: bool) -> int:
    chosen = [part for part in block.linears if is_lora_target(part, targets)]
    magnitudes = sum(part.copies * part.out_features for part in chosen) if dora else 0
    return magnitudes + rank * sum(
        part.lora_rank_factor * part.copies * (part.in_features + part.out_features)
        for part in chosen
    )


def layer_adapter_params(block: Block, strategy: Strategy) -> int:
    """LoRA values of one layer: `rank * (in + out)` for each targeted matrix, DoRA's `out` more."""
    s = strategy
    return _count_adapter_values(block, s.lora_targets, s.lora_rank, dora=is_dora(s))


def adapter_params(spec: ModelSpec, strategy: Strategy) -> int:
    """LoRA values of the whole model and rows of new tokens, retrained embeddings left out."""
    if strategy.method is not Method.LORA:
        return 0
    outer = strategy.lora_rank * sum(
        part.in_features + part.out_features
        for part in spec.outer_linears
        if is_lora_target(part, strategy.lora_targets)
    )
    of_layers = sum(b.num_layers * layer_adapter_params(b, strategy) for b in spec.blocks)
    return outer + of_layers + new_row_params(spec, strategy) + _embedding_adapter(spec, strategy)


def _embedding_adapter(spec: ModelSpec, strategy: Strategy) -> int:
    """LoRA values of embeddings and head, which share one adapter where they share a matrix."""
    if not strategy.adapts_embeddings:
        return 0
    width = spec.embedding_width or spec.hidden_size
    return strategy.lora_rank * (spec.vocab_size + width) * (1 if spec.tie_embeddings else 2)


def new_row_params(spec: ModelSpec, strategy: Strategy) -> int:
    """Values of the rows that LoRA trains for new tokens: of embeddings, and of an untied head."""
    width = spec.embedding_width or spec.hidden_size
    return strategy.num_new_rows * width * (1 if spec.tie_embeddings else 2)


def retrained_params(spec: ModelSpec, strategy: Strategy) -> int:
    """Embedding and head values that LoRA retrains whole, in copies of their own."""
    if strategy.method is not Method.LORA or not strategy.train_embeddings:
        return 0
    return spec.embedding_params + spec.lm_head_params


def num_trainable(spec: ModelSpec, strategy: Strategy) -> int:
    """Values that receive a gradient."""
    if strategy.method is Method.FULL:
        return spec.num_params
    return adapter_params(spec, strategy) + retrained_params(spec, strategy)


@lru_cache(maxsize=256)
def largest_matrix(spec: ModelSpec) -> int:
    """Values of the largest matrix inside the blocks: the most that is dequantized at once."""
    return max(p.in_features * p.out_features for b in spec.blocks for p in b.linears)


def most_dequantized(spec: ModelSpec, strategy: Strategy) -> int:
    """Values that are dequantized at once: one matrix, or one of all experts of a layer."""
    experts = [
        part.copies * part.in_features * part.out_features
        for block in spec.blocks
        for part in block.linears
        if part.is_grouped and packs_experts(strategy)
    ]
    return max(largest_matrix(spec), *experts, 0)


@lru_cache(maxsize=256)
def largest_layer(spec: ModelSpec) -> int:
    """Values of the largest layer: the unit that FSDP gathers."""
    return max(block.layer_params for block in spec.blocks)


def count_params_outside_blocks(spec: ModelSpec) -> int:
    """Values outside the blocks: embeddings, head, positions, final norms."""
    return spec.num_params - sum(block.num_params for block in spec.blocks)


# Fused projections: linear layers that read the same norm output and run as one product.

AUGMENTED_COLUMNS_MULTIPLE = 64
"""Added columns come in multiples of it: on an H200, 64 columns slow a product of 4096 inputs
down by 2%, 16 columns by 5% (h200_fused_kernels.json)."""
FUSED_PROJECTION_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that read the output of one norm, in the order of the norms."""


def uses_augmented_weights(model_type: str, strategy: Strategy) -> bool:
    """Whether fused LoRA uses augmented weights: our norm kernels leave room behind their outputs,
    and the frozen matrices are whole and in the compute dtype. Not in compiled layers: writing
    behind `x` breaks their graph."""
    is_plain = strategy.weights is strategy.compute or strategy.dequantized_base
    return (
        is_plain
        and not strategy.has_fp8
        and not strategy.compile
        and strategy.fused_lora
        and strategy.fused_kernels
        and not strategy.sharding.shards_optimizer
        and find_family(model_type).fuses_projections
    )


def count_augmented_columns(total_rank: int) -> int:
    """Columns for projections with this rank in total."""
    return -(-total_rank // AUGMENTED_COLUMNS_MULTIPLE) * AUGMENTED_COLUMNS_MULTIPLE


def augmented_weight_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Bytes of the added columns of all frozen matrices."""
    return strategy.compute.value_bytes * sum(
        block.num_layers * columns * sum(part.out_features for part in projections)
        for block in spec.blocks
        for columns, projections in find_fused_projections(spec, block, strategy)
    )


def augmented_token_bytes(spec: ModelSpec, block: Block, strategy: Strategy) -> int:
    """Bytes behind the outputs of a layer's norms, per token."""
    found = find_fused_projections(spec, block, strategy)
    return strategy.compute.value_bytes * sum(columns for columns, _ in found)


class SavedTraffic(NamedTuple):
    """Values per token, over all layers, that adapters do not read or write again."""

    outputs: int
    """Outputs to which no second product is added."""
    inputs: int
    """Inputs that another projection of the same norm reads already."""


def count_saved_traffic(spec: ModelSpec, strategy: Strategy) -> SavedTraffic:
    found = [
        (block.num_layers, part, number)
        for block in spec.blocks
        for _, projections in find_fused_projections(spec, block, strategy)
        for number, part in enumerate(projections)
    ]
    return SavedTraffic(
        outputs=sum(count * part.out_features for count, part, _ in found),
        inputs=sum(count * part.in_features for count, part, number in found if number),
    )


def has_augmented_weight(spec: ModelSpec, part: Linear, strategy: Strategy) -> bool:
    """Whether this matrix's product includes its adapter's second product."""
    is_projection = any(part.name in names for names in FUSED_PROJECTION_NAMES)
    return is_projection and uses_augmented_weights(spec.model_type, strategy)


def find_fused_projections(
    spec: ModelSpec, block: Block, strategy: Strategy
) -> Iterator[tuple[int, list[Linear]]]:
    """Added columns behind each norm, and the adapted projections that use them."""
    if not uses_augmented_weights(spec.model_type, strategy):
        return
    for names in FUSED_PROJECTION_NAMES:
        projections = [
            part
            for part in block.linears
            if part.name in names and is_lora_target(part, strategy.lora_targets)
        ]
        if projections:
            yield count_augmented_columns(len(projections) * strategy.lora_rank), projections


def can_fuse_trained_projections(model_type: str, strategy: Strategy) -> bool:
    """Whether projections of one norm are trained whole and in the compute dtype. The compiler
    fuses on its own."""
    return (
        strategy.method is Method.FULL
        and strategy.fused_kernels
        and strategy.weights is strategy.compute
        and not strategy.compile
        and not strategy.sharding.shards_optimizer
        and find_family(model_type).fuses_projections
    )


def group_fused_linears(
    spec: ModelSpec, block: Block, strategy: Strategy
) -> Iterator[list[Linear]]:
    """A block's matrices: fused projections together, every other by itself."""
    groups = (
        FUSED_PROJECTION_NAMES if can_fuse_trained_projections(spec.model_type, strategy) else ()
    )
    for names in groups:
        if projections := [part for part in block.linears if part.name in names]:
            yield projections
    fused = {name for names in groups for name in names}
    yield from ([part] for part in block.linears if part.name not in fused)
