"""Fused projections: linear layers that read the same norm output and run as one product.

With LoRA their weights are augmented: the frozen `W` has extra columns that hold the adapters'
`B`, and the norm writes room for `x A^T` behind its output. `runtime` does it; this module says
where it is possible and how many bytes it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tightfit.core.strategy import Method, Strategy
from tightfit.estimation.weights import is_lora_target
from tightfit.models.families.registry import find_family
from tightfit.models.spec import Block, Linear, ModelSpec

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
