"""Weights: values and bytes of the base model and its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import ALL_LINEAR, Method, Strategy
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
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
    norms stay in 16 bit, and so do experts that are bare parameters, except in
    GPTQ checkpoints, which hold them packed. fp8 keeps the same layers at one byte per value where
    they are frozen; their scales are negligible.
    Source: transformers `replace_with_bnb_linear`; bitsandbytes Linear4bit, Linear8bitLt.
    """
    if strategy.stores_fp8:
        plain = 2 * (spec.num_params - spec.linear_params)
        return WeightBytes(packed=spec.linear_params, plain=plain, quantization_state=0)
    if not strategy.weights.is_quantized:
        return WeightBytes(
            packed=spec.num_params * strategy.weights.value_bytes, plain=0, quantization_state=0
        )
    packed, state = _quantized_bytes(spec, strategy.weights, strategy.double_quant)
    plain_value = 4 if strategy.upcast_unquantized else 2
    return WeightBytes(
        packed=packed,
        plain=(spec.num_params - count_quantized_values(spec, strategy.weights)) * plain_value,
        quantization_state=state,
    )


def count_quantized_values(spec: ModelSpec, dtype: Dtype) -> int:
    """Number of values that quantized loading packs."""
    if dtype is not Dtype.GPTQ4:
        return spec.linear_params
    return sum(
        b.num_layers * sum(p.copies * p.in_features * p.out_features for p in b.linears)
        for b in spec.blocks
    )


def _quantized_bytes(spec: ModelSpec, dtype: Dtype, double_quant: bool) -> tuple[int, int]:
    num_values = count_quantized_values(spec, dtype)
    if dtype is Dtype.INT8:
        rows = sum(
            b.num_layers * sum(p.copies * p.out_features for p in b.linears) for b in spec.blocks
        )
        return num_values, 4 * rows
    if dtype is Dtype.NF4:
        num_scales = num_values // NF4_BLOCK
        state = num_scales + 4 * num_scales // NF4_OUTER_BLOCK if double_quant else 4 * num_scales
        return num_values // 2, state
    num_groups = num_values // GPTQ_GROUP
    columns = sum(
        b.num_layers * sum(p.copies * p.in_features for p in b.linears) for b in spec.blocks
    )
    return num_values // 2, 2 * num_groups + num_groups // 2 + 4 * columns


def is_lora_target(part: Linear, targets: tuple[str, ...]) -> bool:
    """Whether LoRA attaches to this matrix, by peft's rule of matching the end of the name."""
    if targets == (ALL_LINEAR,):
        return part.lora_rank_factor > 0
    return part.is_module and part.name in targets


def is_dora(strategy: Strategy) -> bool:
    """Whether LoRA is DoRA: adapters with a separate magnitude."""
    return strategy.dora and strategy.method is Method.LORA


def layer_adapter_params(block: Block, strategy: Strategy) -> int:
    """LoRA values of one layer: `rank * (in + out)` for each targeted matrix, DoRA's `out` more."""
    targets = [part for part in block.linears if is_lora_target(part, strategy.lora_targets)]
    magnitudes = sum(part.copies * part.out_features for part in targets)
    return strategy.lora_rank * sum(
        part.lora_rank_factor * part.copies * (part.in_features + part.out_features)
        for part in targets
    ) + (magnitudes if is_dora(strategy) else 0)


def adapter_params(spec: ModelSpec, strategy: Strategy) -> int:
    """LoRA values of the whole model, retrained embeddings left out."""
    if strategy.method is not Method.LORA:
        return 0
    return sum(b.num_layers * layer_adapter_params(b, strategy) for b in spec.blocks)


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


@lru_cache(maxsize=256)
def largest_layer(spec: ModelSpec) -> int:
    """Values of the largest layer: the unit that FSDP gathers."""
    return max(block.layer_params for block in spec.blocks)


def count_params_outside_blocks(spec: ModelSpec) -> int:
    """Values outside the blocks: embeddings, head, positions, final norms."""
    return spec.num_params - sum(block.num_params for block in spec.blocks)
