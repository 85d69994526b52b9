"""The repeated blocks of a model, whatever its family calls them and whatever wraps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Every transformer block, encoder's before decoder's, in the order they run.

    A block is what transformers can checkpoint (`GradientCheckpointingLayer`);
    where a family has none, the members of its largest ModuleList are taken.
    """
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: list[nn.Module] = [
        m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    if not blocks:
        lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        blocks = max(lists, key=_count_values, default=[])
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def _count_values(modules: list[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
