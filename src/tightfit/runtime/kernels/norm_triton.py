"""Triton kernels for RMS norm, forward and backward in one pass over memory each.

Liger's backward kernel runs one program per multiprocessor, which mostly waits for memory. Here
there are enough programs to hide the latency: one per row if the weight is frozen, a few per
multiprocessor if its gradient has to be summed. Rows can be written with added zero columns, for
the augmented weights of `fused_lora.py`.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tightfit.estimation.weights import AUGMENTED_COLUMNS_MULTIPLE
from tightfit.runtime.kernels.fused_lora import AUGMENTED_COLUMNS

MAX_COLUMNS = 16_384
"""The longest row that one program holds in registers."""
_TILE = 2048
"""Values of a tile: short rows (heads) share one."""
_ADDED_BLOCK: tl.constexpr = tl.constexpr(AUGMENTED_COLUMNS_MULTIPLE)
_FEW, _MANY = 2, 8
"""Programs per multiprocessor that sum a weight's gradient, for long rows and for shared tiles.
The fastest of 2 to 16 on an H200."""


def use_triton_norms(model: nn.Module) -> int:
    """Replace the forward of every norm that Liger has fused; returns how many."""
    norms = [module for module in model.modules() if _takes_triton_norm(module)]
    for norm in norms:
        norm.forward = MethodType(_forward_norm, norm)
    return len(norms)


def _takes_triton_norm(module: Any) -> bool:
    """Whether Liger has patched this norm. Its mode `none` rounds more than the model does."""
    weight = getattr(module, "weight", None)
    is_fused = getattr(module, "casting_mode", None) in ("llama", "gemma")
    return is_fused and weight is not None and weight.shape[-1] <= MAX_COLUMNS


def _forward_norm(norm: Any, x: Tensor) -> Tensor:
    y: Tensor = RmsNorm.apply(
        x,
        norm.weight,
        norm.variance_epsilon,
        norm.offset,
        norm.casting_mode == "gemma",
        norm.in_place,
        getattr(norm, AUGMENTED_COLUMNS, 0),
    )
    return y


class RmsNorm(torch.autograd.Function):
    """`x / rms(x) * (weight + offset)`, in fp32 inside.

    `is_unrounded`: not rounded before the multiplication by the weight. `in_place`: the gradient
    of x overwrites that of y, as in Liger. `num_added`: zero columns behind each row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        epsilon: float,
        offset: float,
        is_unrounded: bool,
        in_place: bool,
        num_added: int = 0,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        num_columns = rows.shape[1]
        y = rows.new_empty(len(rows), num_columns + num_added)
        inverses = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        tile = _choose_tile(num_columns)
        _norm_rows[(triton.cdiv(len(rows), tile["tile_rows"]),)](
            *(y, inverses, rows, weight, *rows.shape, epsilon, offset),
            is_unrounded=is_unrounded,
            num_added=num_added,
            **tile,
        )
        ctx.save_for_backward(rows, weight, inverses)
        ctx.offset, ctx.in_place = offset, in_place
        return y[:, :num_columns].view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inverses = ctx.saved_tensors
        g = gradients[0].reshape(rows.shape).contiguous()
        is_trained = ctx.needs_input_grad[1]
        grad_x = g if ctx.in_place else torch.empty_like(g)
        tile = _choose_tile(rows.shape[1])
        num_programs = triton.cdiv(len(rows), tile["tile_rows"])
        sums = None
        if is_trained:
            num_programs = min(num_programs, _count_programs(g.device, tile["tile_columns"]))
            sums = torch.empty(num_programs, rows.shape[1], dtype=torch.float32, device=g.device)
        _norm_back[(num_programs,)](
            *(grad_x, sums, g, rows, weight, inverses, *rows.shape, ctx.offset),
            is_trained=is_trained,
            **tile,
        )
        grad_weight = None if sums is None else sums.sum(0).to(weight.dtype)
        return grad_x.view(gradients[0].shape), grad_weight, None, None, None, None, None


def _choose_tile(num_columns: int) -> dict[str, int]:
    columns = triton.next_power_of_2(num_columns)
    num_warps = 4 if columns <= _TILE else 8
    return {"tile_rows": max(1, _TILE // columns), "tile_columns": columns, "num_warps": num_warps}


def _count_programs(device: torch.device, num_columns: int) -> int:
    if device.type != "cuda":
        return 1  # triton's interpreter
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return int(multiprocessors * (_MANY if num_columns <= _TILE else _FEW))


@triton.jit
def _norm_rows(
    y, inverses, x, weight, num_rows, num_columns, epsilon, offset,
    is_unrounded: tl.constexpr, num_added: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.arange(0, tile_columns)
    places = rows[:, None] * num_columns + columns[None, :]
    is_inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    values = tl.load(x + places, mask=is_inside, other=0.0)
    factor = tl.load(weight + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / num_columns + epsilon)
    tl.store(inverses + rows, inverse, mask=rows < num_rows)
    normed = wide * inverse[:, None]
    if not is_unrounded:
        normed = normed.to(values.dtype).to(tl.float32)
    starts = y + rows[:, None] * (num_columns + num_added)
    tl.store(starts + columns[None, :], normed * (factor + offset)[None, :], mask=is_inside)
    if num_added > 0:
        behind = tl.arange(0, _ADDED_BLOCK)
        for first in tl.static_range(0, num_added, _ADDED_BLOCK):
            zeros = tl.zeros((tile_rows, _ADDED_BLOCK), dtype=y.dtype.element_ty)
            spare = starts + num_columns + first + behind[None, :]
            tl.store(spare, zeros, mask=rows[:, None] < num_rows)


@triton.jit
def _norm_back(
    grad_x, sums, g, x, weight, inverses, num_rows, num_columns, offset,
    is_trained: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, tile_columns)
    is_column = columns < num_columns
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32) + offset
    total = tl.zeros((tile_rows, tile_columns), dtype=tl.float32)
    step = tl.num_programs(0) * tile_rows
    for first in range(tl.program_id(0) * tile_rows, num_rows, step):
        rows = first + tl.arange(0, tile_rows).to(tl.int64)
        places = rows[:, None] * num_columns + columns[None, :]
        is_inside = (rows[:, None] < num_rows) & is_column[None, :]
        gradient = tl.load(g + places, mask=is_inside, other=0.0).to(tl.float32)
        values = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + rows, mask=rows < num_rows, other=0.0)[:, None]
        normed = values * inverse
        scaled = gradient * factor[None, :]
        along = tl.sum(scaled * normed, axis=1)[:, None] / num_columns
        tl.store(grad_x + places, inverse * (scaled - normed * along), mask=is_inside)
        if is_trained:
            total += gradient * normed
    if is_trained:
        tl.store(
            sums + tl.program_id(0) * num_columns + columns, tl.sum(total, axis=0), mask=is_column
        )
