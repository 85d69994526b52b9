"""Spare columns: a LoRA layer's second product as part of its first.

`x W^T + (x A^T) (scaling B)^T` is one product of `[x, x A^T]` and `[W, scaling B]`. The first lies
side by side where the norm that makes x leaves spare columns behind each row, and the second where
the frozen matrix does. The product then takes as long as without an adapter, where adding the
adapter's part afterwards would read and write the whole output once more.

Layers that read the same x share its spare columns, each with a place of its own; what the others
write there meets zeros in its own matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.estimate.spare_columns import SPARE_READERS, count_spare_columns
from tightfit.runtime.layers import decoder_layers

SPARE = "num_spare_columns"
"""The attribute that says how many a norm leaves."""
PLACE = "spare_place"
"""The attribute that says which columns an adapted layer writes: the first, and the one after."""


def leave_spare_columns(model: nn.Module) -> int:
    """Make room in every norm and frozen matrix of the blocks that can use it; for how many layers.

    After adapters are folded and norms have our kernels, where `leaves_spare_columns` says so.
    """
    count = 0
    for block in decoder_layers(model):
        for norm, readers in _find_readers(block):
            adapted = [layer for layer in readers if _can_hold(layer)]
            if adapted:
                _assign_places(norm, adapted)
                count += len(adapted)
        # The wider copies do not fit where the matrices were; nor would most activations.
        if next(block.parameters()).is_cuda:
            torch.cuda.empty_cache()
    return count


def _find_readers(block: Any) -> Iterator[tuple[Any, list[Any]]]:
    norms = (block.input_layernorm, block.post_attention_layernorm)
    for norm, owner, names in zip(norms, (block.self_attn, block.mlp), SPARE_READERS, strict=True):
        yield norm, [getattr(owner, name) for name in names]


def _can_hold(layer: Any) -> bool:
    """Whether this is a folded adapter over a plain frozen matrix."""
    base = getattr(layer, "base_layer", None)
    return "forward" in vars(layer) and type(base) is nn.Linear


def _assign_places(norm: Any, layers: list[Any]) -> None:
    ranks = [next(iter(layer.lora_A.values())).out_features for layer in layers]
    num_spare = count_spare_columns(sum(ranks))
    setattr(norm, SPARE, num_spare)
    first = layers[0].base_layer.in_features
    for layer, rank in zip(layers, ranks, strict=True):
        setattr(layer, PLACE, (first, first + rank))
        _widen(layer.base_layer, num_spare)
        first += rank


def _widen(linear: nn.Linear, num_spare: int) -> None:
    """The same frozen matrix, with columns of zeros behind it."""
    num_outputs, num_inputs = linear.weight.shape
    wide = linear.weight.new_zeros(num_outputs, num_inputs + num_spare)
    wide[:, :num_inputs] = linear.weight.detach()
    linear.weight = nn.Parameter(wide[:, :num_inputs], requires_grad=False)


def has_room(x: Tensor, layer: Any) -> bool:
    """Whether this input was made with the spare columns that the layer's matrix has.

    The same at every call, since recomputing must take the path that was taken first. A model that
    was moved to another device has lost them.
    """
    weight = layer.base_layer.weight
    if not hasattr(layer, PLACE) or not has_spare_columns(weight) or x.dtype != weight.dtype:
        return False
    return bool(x.reshape(-1, x.shape[-1]).stride() == weight.stride())


def has_spare_columns(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.stride(0) > matrix.shape[1] and matrix.stride(1) == 1


def widen(x: Tensor) -> Tensor:
    """Rows with the spare columns behind them.

    Through `data`: writing there must not count as a change of x, which others have saved.
    """
    rows = x.data.reshape(-1, x.shape[-1])
    width = rows.stride(0)
    return rows.as_strided((len(rows), width), (width, 1), rows.storage_offset())


def multiply_wide(x: Tensor, a: Tensor, b: Tensor, layer: Any, scaling: float) -> Tensor:
    """The layer's output, rows by outputs; `x A^T` stays in x's spare columns."""
    first, end = layer.spare_place
    wide_x, wide_weight = widen(x), widen(layer.base_layer.weight)
    torch.mm(wide_x[:, : x.shape[-1]], a.t(), out=wide_x[:, first:end])
    torch.mul(b, scaling, out=wide_weight[:, first:end])
    return nn.functional.linear(wide_x, wide_weight, layer.base_layer.bias)


def read_spare(x: Tensor, layer: Any) -> Tensor:
    """What `multiply_wide` left there: `x A^T`."""
    first, end = layer.spare_place
    return widen(x)[:, first:end]
