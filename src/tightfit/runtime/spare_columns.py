"""Spare columns: a LoRA layer's second product as part of its first.

`x W^T + (x A^T) (scaling B)^T` is one product of `[x, x A^T]` and `[W, scaling B]`. The first lies
side by side where the norm that makes x leaves spare columns behind each row, and the second where
the frozen matrix does. The product then takes as long as without an adapter, where adding the
adapter's part afterwards would read and write the whole output once more.

Layers that read the same x share its spare columns, each with a place of its own; what the others
write there meets zeros in its own matrix. `readers.py` has their products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tightfit.estimate.spare_columns import count_spare_columns

SPARE = "num_spare_columns"
"""The attribute that says how many a norm leaves."""


def leave_spare_columns(norm: Any, linears: list[nn.Linear], *, total_rank: int) -> None:
    """Behind what the norm writes, and behind the matrices that read it."""
    num_spare = count_spare_columns(total_rank)
    setattr(norm, SPARE, num_spare)
    for linear in linears:
        _append_zeros(linear, num_spare)
    # The wider copies do not fit where the matrices were; nor would most activations.
    if linears[0].weight.is_cuda:
        torch.cuda.empty_cache()


def _append_zeros(linear: nn.Linear, num_spare: int) -> None:
    """The same frozen matrix, with columns of zeros behind it."""
    num_outputs, num_inputs = linear.weight.shape
    wide = linear.weight.new_zeros(num_outputs, num_inputs + num_spare)
    wide[:, :num_inputs] = linear.weight.detach()
    linear.weight = nn.Parameter(wide[:, :num_inputs], requires_grad=False)


def has_room(x: Tensor, weight: Tensor) -> bool:
    """Whether this input was made with the spare columns that the matrix has.

    A model that was moved to another device has lost them.
    """
    if not has_spare_columns(weight) or x.dtype != weight.dtype:
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
