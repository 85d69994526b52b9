"""Spare columns behind norms' outputs and frozen matrices: who leaves them, and what they weigh.

What they are for stands in `runtime/spare_columns.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tightfit.core.strategy import Strategy
from tightfit.estimate.weights import is_target
from tightfit.models.spec import Block, Linear, ModelSpec

SPARE_BLOCK = 64
"""Spare columns come in multiples of it: on an H200 64 more cost a product of 4096 inputs
2%, and 16 more 5% (h200_fused_kernels.json)."""
SPARE_FAMILIES = frozenset({"gemma", "llama", "mistral", "qwen2", "qwen3"})
"""Whose norms feed the matrices of `SPARE_READERS` and nothing else. Source: transformers 5.22."""
SPARE_READERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that read the output of one norm, in the order of the norms."""


def leaves_spare_columns(model_type: str, strategy: Strategy) -> bool:
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
        and model_type in SPARE_FAMILIES
    )


def count_spare_columns(total_rank: int) -> int:
    """For layers that have so many values between their two matrices, all together."""
    return -(-total_rank // SPARE_BLOCK) * SPARE_BLOCK


def spare_weight_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Columns behind the frozen matrices of the whole model."""
    return strategy.compute.value_bytes * sum(
        block.num_layers * columns * sum(part.out_features for part in readers)
        for block in spec.blocks
        for columns, readers in find_readers(spec, block, strategy)
    )


def spare_token_bytes(spec: ModelSpec, block: Block, strategy: Strategy) -> int:
    """Columns behind the outputs of a layer's norms, per token."""
    found = find_readers(spec, block, strategy)
    return strategy.compute.value_bytes * sum(columns for columns, _ in found)


class Spared(NamedTuple):
    """Values of one token, over all layers, that adapters need not go through again."""

    outputs: int
    """To which no second product is added."""
    inputs: int
    """Which a reader of the same norm has gone through already."""


def count_spared(spec: ModelSpec, strategy: Strategy) -> Spared:
    found = [
        (block.num_layers, part, number)
        for block in spec.blocks
        for _, readers in find_readers(spec, block, strategy)
        for number, part in enumerate(readers)
    ]
    return Spared(
        outputs=sum(count * part.out_features for count, part, _ in found),
        inputs=sum(count * part.in_features for count, part, number in found if number),
    )


def is_spared(spec: ModelSpec, part: Linear, strategy: Strategy) -> bool:
    """Whether the second product of this matrix's adapter is part of the first."""
    is_reader = any(part.name in names for names in SPARE_READERS)
    return is_reader and leaves_spare_columns(spec.model_type, strategy)


def find_readers(
    spec: ModelSpec, block: Block, strategy: Strategy
) -> Iterator[tuple[int, list[Linear]]]:
    """Spare columns behind each norm, and the adapted matrices that use them."""
    if not leaves_spare_columns(spec.model_type, strategy):
        return
    for names in SPARE_READERS:
        readers = [
            part
            for part in block.linears
            if part.name in names and is_target(part, strategy.lora_targets)
        ]
        if readers:
            yield count_spare_columns(len(readers) * strategy.lora_rank), readers
