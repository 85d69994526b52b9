"""Fused projections: linear layers that read the same norm output and run as one product.

With LoRA their weights are augmented: the frozen `W` has extra columns that hold the adapters'
`B`, and the norm writes room for `x A^T` behind its output. `runtime` does it; this module says
where it is possible and how many bytes it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tightfit.core.strategy import Method, Strategy
from tightfit.estimate.weights import is_lora_target
from tightfit.models.spec import Block, Linear, ModelSpec

AUGMENTED_COLUMNS_MULTIPLE = 64
"""Spare columns come in multiples of it: on an H200 64 more cost a product of 4096 inputs
2%, and 16 more 5% (h200_fused_kernels.json)."""
FUSED_PROJECTION_FAMILIES = frozenset({"gemma", "llama", "mistral", "qwen2", "qwen3"})
"""Whose norms feed the matrices of `FUSED_PROJECTION_NAMES` and nothing else.

Source: transformers 5.22."""
FUSED_PROJECTION_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that read the output of one norm, in the order of the norms."""


def uses_augmented_weights(model_type: str, strategy: Strategy) -> bool:
    """Whether folded adapters find spare columns: kernels of ours write them behind the norms'
    outputs, and the frozen matrices are whole and plain. Not in compiled layers: what is
    written behind x breaks their graph."""
    is_plain = strategy.weights is strategy.compute or strategy.unpacked_base
    return (
        is_plain
        and not strategy.has_fp8
        and not strategy.compile
        and strategy.folded_adapters
        and strategy.fused_kernels
        and not strategy.sharding.shards_optimizer
        and model_type in FUSED_PROJECTION_FAMILIES
    )


def count_augmented_columns(total_rank: int) -> int:
    """For layers that have so many values between their two matrices, all together."""
    return -(-total_rank // AUGMENTED_COLUMNS_MULTIPLE) * AUGMENTED_COLUMNS_MULTIPLE


def augmented_weight_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Columns behind the frozen matrices of the whole model."""
    return strategy.compute.value_bytes * sum(
        block.num_layers * columns * sum(part.out_features for part in readers)
        for block in spec.blocks
        for columns, readers in find_fused_projections(spec, block, strategy)
    )


def augmented_token_bytes(spec: ModelSpec, block: Block, strategy: Strategy) -> int:
    """Columns behind the outputs of a layer's norms, per token."""
    found = find_fused_projections(spec, block, strategy)
    return strategy.compute.value_bytes * sum(columns for columns, _ in found)


class SavedTraffic(NamedTuple):
    """Values of one token, over all layers, that adapters need not go through again."""

    outputs: int
    """To which no second product is added."""
    inputs: int
    """Which a reader of the same norm has gone through already."""


def count_saved_traffic(spec: ModelSpec, strategy: Strategy) -> SavedTraffic:
    found = [
        (block.num_layers, part, number)
        for block in spec.blocks
        for _, readers in find_fused_projections(spec, block, strategy)
        for number, part in enumerate(readers)
    ]
    return SavedTraffic(
        outputs=sum(count * part.out_features for count, part, _ in found),
        inputs=sum(count * part.in_features for count, part, number in found if number),
    )


def has_augmented_weight(spec: ModelSpec, part: Linear, strategy: Strategy) -> bool:
    """Whether the second product of this matrix's adapter is part of the first."""
    is_reader = any(part.name in names for names in FUSED_PROJECTION_NAMES)
    return is_reader and uses_augmented_weights(spec.model_type, strategy)


def find_fused_projections(
    spec: ModelSpec, block: Block, strategy: Strategy
) -> Iterator[tuple[int, list[Linear]]]:
    """Spare columns behind each norm, and the adapted matrices that use them."""
    if not uses_augmented_weights(spec.model_type, strategy):
        return
    for names in FUSED_PROJECTION_NAMES:
        readers = [
            part
            for part in block.linears
            if part.name in names and is_lora_target(part, strategy.lora_targets)
        ]
        if readers:
            yield count_augmented_columns(len(readers) * strategy.lora_rank), readers


# Readers: layers that multiply one norm's output, and train as one where they can.


def can_fuse_trained_projections(model_type: str, strategy: Strategy) -> bool:
    """Whether layers that read one norm are plain, whole and trained in the dtype they compute in.
    The compiler joins what it likes itself."""
    return (
        strategy.method is Method.FULL
        and strategy.fused_kernels
        and strategy.weights is strategy.compute
        and not strategy.compile
        and not strategy.sharding.shards_optimizer
        and model_type in FUSED_PROJECTION_FAMILIES
    )


def group_fused_linears(
    spec: ModelSpec, block: Block, strategy: Strategy
) -> Iterator[list[Linear]]:
    """A block's matrices: those that are joined together, and every other by itself."""
    beside = (
        FUSED_PROJECTION_NAMES if can_fuse_trained_projections(spec.model_type, strategy) else ()
    )
    for names in beside:
        if readers := [part for part in block.linears if part.name in names]:
            yield readers
    joined = {name for names in beside for name in names}
    yield from ([part] for part in block.linears if part.name not in joined)
