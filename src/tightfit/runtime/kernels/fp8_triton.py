"""Triton kernels for casts to e4m3 with one scale per row, and for the transpose.

The results are those of `fp8.py`'s versions in torch, which take several passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tile sizes, from `benchmarks/tune_casts.py`.
ROW_VALUES = 8192
"""Values per program at least: short rows share one."""
VALUES_A_WARP = 4096
"""Values per warp of such a program."""
TURNED_TILE = {"tile_rows": 64, "tile_columns": 128, "num_warps": 8}
"""For transposes."""
HIGH_TILE = {"tile_rows": 512, "tile_columns": 64, "num_warps": 4}
"""For the maxima of columns."""

_TILES = ("x_tile", "y_tile", "z_tile")
"""What `_cast_rows` calls the widths of matrices side by side: as many as it takes at once."""


def cast_rows(*parts: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Cast up to three matrices side by side, each row with a scale of its own, read once; their
    rows may be strided."""
    parts = tuple(map(_with_whole_rows, parts))
    num_rows, widths = len(parts[0]), [x.shape[1] for x in parts]
    values = torch.empty(num_rows, sum(widths), dtype=dtype, device=parts[0].device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=parts[0].device)
    tiles = [triton.next_power_of_2(width) for width in widths]
    row_values = triton.next_power_of_2(sum(tiles))
    rows = max(1, ROW_VALUES // row_values)
    absent = len(_TILES) - len(parts)
    _cast_rows[(triton.cdiv(num_rows, rows),)](
        *(values, scale, *parts, *(None,) * absent, num_rows),
        *(*widths, *(0,) * absent, *(x.stride(0) for x in parts), *(0,) * absent),
        tile_rows=rows,
        **dict(zip(_TILES, (*tiles, *(0,) * absent), strict=True)),
        num_warps=min(32, max(4, row_values // VALUES_A_WARP)),
    )
    return values, scale


def cast_columns(*parts: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """`cast_rows` of the transposed matrices, stacked; reads each twice."""
    widths = [x.shape[1] for x in parts]
    values = torch.empty(sum(widths), len(parts[0]), dtype=dtype, device=parts[0].device)
    scale = torch.empty(sum(widths), 1, dtype=torch.float32, device=parts[0].device)
    largest = torch.zeros(sum(widths), dtype=torch.int32, device=parts[0].device)
    shares = (share.split(widths) for share in (values, scale, largest))
    for x, of_values, of_scale, of_largest in zip(parts, *shares, strict=True):
        _turn_columns([x], [of_values], of_scale, of_largest)
    return values, scale


def cast_stacked_columns(
    *parts: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """`cast_columns` of matrices of one width stacked into one."""
    width, heights = parts[0].shape[1], [len(x) for x in parts]
    values = torch.empty(width, sum(heights), dtype=dtype, device=parts[0].device)
    scale = torch.empty(width, 1, dtype=torch.float32, device=parts[0].device)
    largest = torch.zeros(width, dtype=torch.int32, device=parts[0].device)
    _turn_columns(parts, values.split(heights, dim=1), scale, largest)
    return values, scale


def _turn_columns(
    parts: Sequence[Tensor], places: Sequence[Tensor], scale: Tensor, largest: Tensor
) -> None:
    """Transpose and cast each matrix into its slice, with common scales."""
    parts = list(map(_with_whole_rows, parts))
    for x in parts:
        sizes = (*x.shape, x.stride(0))
        _find_largest[_count_tiles(x, HIGH_TILE)](*(largest, x, *sizes), **HIGH_TILE)
    for x, values in zip(parts, places, strict=True):
        sizes = (*x.shape, x.stride(0), values.stride(0))
        _cast_turned[_count_tiles(x, TURNED_TILE)](
            *(values, scale, largest, x, *sizes), **TURNED_TILE
        )


def _with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def turn(x: Tensor) -> Tensor:
    """The transpose of an e4m3 matrix."""
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
    """The bits of |x| as fp32: they order like the values, with inf and NaN last."""
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
    """The scale to undo the cast; infinite if a value was not finite."""
    return tl.where(largest < 0x7F800000, _power_of_two(-shift), float("inf"))


@triton.jit
def _load_rows(x, rows, num_rows, width, stride, tile: tl.constexpr):
    columns = tl.arange(0, tile)[None, :]
    is_inside = (rows[:, None] < num_rows) & (columns < width)
    return tl.load(x + rows[:, None] * stride + columns, mask=is_inside, other=0.0)


@triton.jit
def _store_rows(values, found, shift, rows, num_rows, width, stride, tile: tl.constexpr):
    columns = tl.arange(0, tile)[None, :]
    is_inside = (rows[:, None] < num_rows) & (columns < width)
    places = values + rows[:, None] * stride + columns
    tl.store(places, _scale(found, shift[:, None], values.dtype.element_ty), mask=is_inside)


@triton.jit
def _cast_rows(
    values, scale, x, y, z, num_rows,
    x_width, y_width, z_width, x_stride, y_stride, z_stride,
    tile_rows: tl.constexpr, x_tile: tl.constexpr, y_tile: tl.constexpr, z_tile: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    of_x = _load_rows(x, rows, num_rows, x_width, x_stride, x_tile)
    largest = tl.max(_size(of_x), axis=1)
    if y is not None:
        of_y = _load_rows(y, rows, num_rows, y_width, y_stride, y_tile)
        largest = tl.maximum(largest, tl.max(_size(of_y), axis=1))
    if z is not None:
        of_z = _load_rows(z, rows, num_rows, z_width, z_stride, z_tile)
        largest = tl.maximum(largest, tl.max(_size(of_z), axis=1))
    shift = _find_shift(largest)
    tl.store(scale + rows, _find_scale(largest, shift), mask=rows < num_rows)
    stride = x_width + y_width + z_width
    _store_rows(values, of_x, shift, rows, num_rows, x_width, stride, x_tile)
    if y is not None:
        _store_rows(values + x_width, of_y, shift, rows, num_rows, y_width, stride, y_tile)
    if z is not None:
        behind = values + x_width + y_width
        _store_rows(behind, of_z, shift, rows, num_rows, z_width, stride, z_tile)


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
    values, scale, largest, x, num_rows, num_columns, stride, turned_stride,
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
    places = values + columns[:, None] * turned_stride + rows[None, :]
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
