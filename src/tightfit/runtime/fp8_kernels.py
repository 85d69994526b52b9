"""Casts to e4m3 with one scale per row, and a matrix turned, as kernels of their own. Uses triton.

The same numbers as `fp8_casts` has in torch, where each is several passes over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightfit.runtime.fp8_casts import FP8

# How each kernel divides a matrix; `benchmarks/tune_casts.py` times the other ways.
ROW_VALUES = 4096
"""That programs hold at least: short rows share one."""
VALUES_A_WARP = 1024
"""Of a program that holds rows."""
TURNED_TILE = {"tile_rows": 128, "tile_columns": 64, "num_warps": 8}
"""That is turned: 128 bytes of a line where bf16 is read, and where fp8 is written."""
HIGH_TILE = {"tile_rows": 256, "tile_columns": 64, "num_warps": 8}
"""Whose columns are looked through for their largest values."""


def cast_rows(x: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """Each row of bf16 with a scale of its own, read once; rows may lie apart."""
    num_rows, num_columns = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(num_columns)
    rows = max(1, ROW_VALUES // columns)
    _cast_rows[(triton.cdiv(num_rows, rows),)](
        *(values, scale, x, num_rows, num_columns, x.stride(0)),
        tile_rows=rows,
        tile_columns=columns,
        num_warps=min(32, max(4, columns // VALUES_A_WARP)),
    )
    return values, scale


def cast_columns(x: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """`cast_rows` of the turned matrix: read twice, by its own rows."""
    num_rows, num_columns = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    values = torch.empty(num_columns, num_rows, dtype=dtype, device=x.device)
    scale = torch.empty(num_columns, 1, dtype=torch.float32, device=x.device)
    largest = torch.zeros(num_columns, dtype=torch.int32, device=x.device)
    sizes = (num_rows, num_columns, x.stride(0))
    _find_largest[_count_tiles(x, HIGH_TILE)](*(largest, x, *sizes), **HIGH_TILE)
    _cast_turned[_count_tiles(x, TURNED_TILE)](*(values, scale, largest, x, *sizes), **TURNED_TILE)
    return values, scale


def turn(x: Tensor) -> Tensor:
    """Columns of e4m3 as rows."""
    num_rows, num_columns = x.shape
    values = torch.empty(num_columns, num_rows, dtype=x.dtype, device=x.device)
    _turn[_count_tiles(x, TURNED_TILE)](
        *(values.view(torch.uint8), x.view(torch.uint8), num_rows, num_columns, x.stride(0)),
        **TURNED_TILE,
    )
    return values


def _count_tiles(x: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], tile["tile_rows"]), triton.cdiv(x.shape[1], tile["tile_columns"])


# Kernels


@triton.jit
def _size(values):
    """fp32's bits without the sign: they order as sizes do, with what is not finite at the end."""
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _find_shift(largest):
    """The power of two that takes the largest value to between 128 and 256."""
    shift = 7 + 127 - (largest >> 23)
    return tl.minimum(tl.maximum(shift, -126), 126)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale(values, shift, dtype):
    return (values.to(tl.float32) * _power_of_two(shift)).to(dtype)


@triton.jit
def _find_scale(largest, shift):
    """By what to multiply to have the values back: no number, where they were none."""
    return tl.where(largest < 0x7F800000, _power_of_two(-shift), float("inf"))


@triton.jit
def _cast_rows(
    values, scale, x, num_rows, num_columns, stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.arange(0, tile_columns)[None, :]
    is_inside = (rows[:, None] < num_rows) & (columns < num_columns)
    found = tl.load(x + rows[:, None] * stride + columns, mask=is_inside, other=0.0)
    largest = tl.max(_size(found), axis=1)
    shift = _find_shift(largest)
    tl.store(scale + rows, _find_scale(largest, shift), mask=rows < num_rows)
    places = values + rows[:, None] * num_columns + columns
    tl.store(places, _scale(found, shift[:, None], values.dtype.element_ty), mask=is_inside)


@triton.jit
def _find_largest(
    largest, x, num_rows, num_columns, stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    is_inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    places = x + rows[:, None] * stride + columns[None, :]
    found = tl.max(_size(tl.load(places, mask=is_inside, other=0.0)), axis=0)
    tl.atomic_max(largest + columns, found, mask=columns < num_columns)


@triton.jit
def _cast_turned(
    values, scale, largest, x, num_rows, num_columns, stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    is_row, is_column = rows < num_rows, columns < num_columns
    size = tl.load(largest + columns, mask=is_column, other=0)
    shift = _find_shift(size)
    if tl.program_id(0) == 0:
        tl.store(scale + columns, _find_scale(size, shift), mask=is_column)
    places = x + rows[:, None] * stride + columns[None, :]
    found = tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0.0)
    turned = tl.trans(_scale(found, shift[None, :], values.dtype.element_ty))
    places = values + columns[:, None] * num_rows + rows[None, :]
    tl.store(places, turned, mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _turn(
    values, x, num_rows, num_columns, stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    is_row, is_column = rows < num_rows, columns < num_columns
    places = x + rows[:, None] * stride + columns[None, :]
    found = tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0)
    places = values + columns[:, None] * num_rows + rows[None, :]
    tl.store(places, tl.trans(found), mask=is_column[:, None] & is_row[None, :])
