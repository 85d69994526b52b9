"""RMS norm in one pass over memory each way. Uses triton.

Liger's backward kernel runs one program on each multiprocessor, which waits for memory most of the
time. Here as many run as hide that wait: one for every row where the weight is frozen, and a
few on each multiprocessor where they have a gradient of the weight to add up. Rows can be written
with spare columns behind them, which `spare_columns.py` is about.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tightfit.estimate.fused_projections import AUGMENTED_COLUMNS_MULTIPLE
from tightfit.runtime.kernels.fused_lora import AUGMENTED_COLUMNS

MAX_COLUMNS = 16_384
"""Of a row that one program holds in its registers."""
_TILE = 2048
"""Values of a tile: short rows, as of heads, share one."""
_SPARE_BLOCK: tl.constexpr = tl.constexpr(AUGMENTED_COLUMNS_MULTIPLE)
_FEW, _MANY = 2, 8
"""Programs of a multiprocessor that add up a weight's gradient, with longer rows and with tiles.
Fastest of 2 to 16 on an H200: as many as run at once, or so many that the last wave is short."""


def use_triton_norms(model: nn.Module) -> int:
    """Give every norm that Liger has fused these kernels instead; how many took them."""
    norms = [module for module in model.modules() if _takes_triton_norm(module)]
    for norm in norms:
        norm.forward = MethodType(_forward_norm, norm)
    return len(norms)


def _takes_triton_norm(module: Any) -> bool:
    """Liger's patch leaves these fields in a norm; `none` would round more than the model does."""
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

    `is_wide`: not rounded before it is multiplied by the weight. `in_place`: the gradient of x
    takes the place of that of y, as Liger has it. `num_spare`: columns of zeros behind each row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        epsilon: float,
        offset: float,
        is_wide: bool,
        in_place: bool,
        num_spare: int = 0,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        num_columns = rows.shape[1]
        y = rows.new_empty(len(rows), num_columns + num_spare)
        inverses = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        tile = _choose_tile(num_columns)
        _norm_rows[(triton.cdiv(len(rows), tile["tile_rows"]),)](
            *(y, inverses, rows, weight, *rows.shape, epsilon, offset),
            is_wide=is_wide,
            num_spare=num_spare,
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
        of_x = g if ctx.in_place else torch.empty_like(g)
        tile = _choose_tile(rows.shape[1])
        num_programs = triton.cdiv(len(rows), tile["tile_rows"])
        sums = None
        if is_trained:
            num_programs = min(num_programs, _count_programs(g.device, tile["tile_columns"]))
            sums = torch.empty(num_programs, rows.shape[1], dtype=torch.float32, device=g.device)
        _norm_back[(num_programs,)](
            *(of_x, sums, g, rows, weight, inverses, *rows.shape, ctx.offset),
            is_trained=is_trained,
            **tile,
        )
        of_weight = None if sums is None else sums.sum(0).to(weight.dtype)
        return of_x.view(gradients[0].shape), of_weight, None, None, None, None, None


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
    is_wide: tl.constexpr, num_spare: tl.constexpr,
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
    if not is_wide:
        normed = normed.to(values.dtype).to(tl.float32)
    starts = y + rows[:, None] * (num_columns + num_spare)
    tl.store(starts + columns[None, :], normed * (factor + offset)[None, :], mask=is_inside)
    if num_spare > 0:
        behind = tl.arange(0, _SPARE_BLOCK)
        for first in tl.static_range(0, num_spare, _SPARE_BLOCK):
            zeros = tl.zeros((tile_rows, _SPARE_BLOCK), dtype=y.dtype.element_ty)
            spare = starts + num_columns + first + behind[None, :]
            tl.store(spare, zeros, mask=rows[:, None] < num_rows)


@triton.jit
def _norm_back(
    of_x, sums, g, x, weight, inverses, num_rows, num_columns, offset,
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
        tl.store(of_x + places, inverse * (scaled - normed * along), mask=is_inside)
        if is_trained:
            total += gradient * normed
    if is_trained:
        tl.store(
            sums + tl.program_id(0) * num_columns + columns, tl.sum(total, axis=0), mask=is_column
        )
