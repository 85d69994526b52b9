"""Readers: layers that multiply one norm's output, and train as one where they can."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.core.strategy import Method, Strategy
from tightfit.estimate.spare_columns import SPARE_FAMILIES, SPARE_READERS
from tightfit.models.spec import Block, Linear, ModelSpec


def can_join_trained(model_type: str, strategy: Strategy) -> bool:
    """Whether layers that read one norm are plain, whole and trained in the dtype they compute in.
    The compiler joins what it likes itself."""
    return (
        strategy.method is Method.FULL
        and strategy.fused_kernels
        and strategy.weights is strategy.compute
        and not strategy.compile
        and not strategy.sharding.shards_optimizer
        and model_type in SPARE_FAMILIES
    )


def group_linears(spec: ModelSpec, block: Block, strategy: Strategy) -> Iterator[list[Linear]]:
    """A block's matrices: those that are joined together, and every other by itself."""
    beside = SPARE_READERS if can_join_trained(spec.model_type, strategy) else ()
    for names in beside:
        if readers := [part for part in block.linears if part.name in names]:
            yield readers
    joined = {name for names in beside for name in names}
    yield from ([part] for part in block.linears if part.name not in joined)
