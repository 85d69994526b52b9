"""Triton kernels for one decoding step: attention over the filled columns of slots, writing to
them, and the product of a single row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightfit.runtime.decoding import SlotScores

_TILE_COLUMNS = 64
_LEAST_HEADS = 16
"""Rows of the smallest matrix product."""
_PROGRAMS_PER_MULTIPROCESSOR = 4
_MOST_SPLITS = 64
_TALL = 8192
"""Rows of a matrix beyond which there are more than enough programs."""


def attend_slots(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scores: SlotScores
) -> Tensor:
    """As `decoding.attend_slots`, reading nothing but the columns that a row has filled.

    Each row's columns are shared out among programs, whose results a second kernel merges.
    Source: flash decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    """
    num_rows, num_heads, width = query.shape
    num_key_heads, value_width = keys.shape[1], values.shape[-1]
    num_shared = num_heads // num_key_heads
    num_splits = _count_splits(query.device, num_rows * num_key_heads, keys.shape[2])
    sums = query.new_empty((num_rows, num_heads, num_splits, value_width), dtype=torch.float32)
    stats = query.new_empty((2, num_rows, num_heads, num_splits), dtype=torch.float32)
    tile_width = triton.next_power_of_2(width)
    tile_value = triton.next_power_of_2(value_width)
    _attend_split[(num_rows, num_key_heads, num_splits)](
        *(sums, stats, query, keys, values, lengths),
        *(scores.scale, scores.softcap or 0.0, scores.window or 0),
        *(query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3]),
        *(num_rows, num_heads, num_shared, width, value_width, num_splits),
        has_softcap=scores.softcap is not None,
        tile_heads=max(_LEAST_HEADS, triton.next_power_of_2(num_shared)),
        tile_columns=_TILE_COLUMNS,
        tile_width=tile_width,
        tile_value=tile_value,
        num_warps=4,
    )
    output = query.new_empty((num_rows, num_heads, value_width))
    _merge_splits[(num_rows, num_heads)](
        *(output, sums, stats, scores.sinks),
        *(num_rows, num_heads, value_width, num_splits),
        has_sinks=scores.sinks is not None,
        tile_splits=triton.next_power_of_2(num_splits),
        tile_value=tile_value,
        num_warps=4 if num_splits > 4 else 1,
    )
    return output


def _count_splits(device: torch.device, num_programs: int, num_columns: int) -> int:
    """Programs that share one row and head, so that all multiprocessors have work."""
    if device.type != "cuda":
        return 2  # triton's interpreter
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR, num_programs)
    return int(max(1, min(wanted, _MOST_SPLITS, triton.cdiv(num_columns, _TILE_COLUMNS))))


def write_slots(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
    """Write each row's new key and value, (rows, heads, width), into its slot at its length."""
    num_rows, num_heads, width = key.shape
    value_width = value.shape[-1]
    _write_rows[(num_rows, num_heads)](
        *(keys, values, key, value, lengths),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(*keys.stride()[:3], *values.stride()[:3], width, value_width),
        tile_width=triton.next_power_of_2(width),
        tile_value=triton.next_power_of_2(value_width),
        num_warps=1,
    )


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of one new token per row, (rows, heads, 1, width), without copies of parts
    of fused projections. `cos` and `sin`: (rows or 1, 1, width), both halves alike."""
    num_rows, num_heads, _, width = query.shape
    num_key_heads = key.shape[1]
    made = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotate_rows[(num_rows, num_heads + num_key_heads)](
        *(*made, query, key, cos, sin),
        *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
        *(cos.stride(0) if len(cos) > 1 else 0, num_heads, num_key_heads, width // 2),
        tile=triton.next_power_of_2(width // 2),
        num_warps=1,
    )
    return made


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + bias` where x is a single row: bound by reading W, which cuBLAS does at 60 to 92%
    of the rate of a copy and this at 77 to 100% (our measurement: 7B's matrices on an H200)."""
    num_out, num_in = weight.shape
    output = x.new_empty((*x.shape[:-1], num_out))
    # The fastest of 1 to 16 rows by 512 to 2048 columns for 7B's matrices on an H200.
    is_tall = num_out > _TALL
    tile_out, tile_in, num_warps = (4, 2048, 4) if is_tall else (16, 1024, 8)
    _multiply_row[(triton.cdiv(num_out, tile_out),)](
        *(output, x, weight, bias, num_out, num_in, weight.stride(0)),
        has_bias=bias is not None,
        tile_out=tile_out,
        tile_in=tile_in,
        num_warps=num_warps,
    )
    return output


@triton.jit
def _attend_split(
    sums, stats, query, keys, values, lengths, scale, softcap, window,
    query_row, query_head, key_slot, key_head, key_column, value_slot, value_head, value_column,
    num_rows, num_heads, num_shared, width, value_width, num_splits,
    has_softcap: tl.constexpr, tile_heads: tl.constexpr, tile_columns: tl.constexpr,
    tile_width: tl.constexpr, tile_value: tl.constexpr,
):  # fmt: skip
    row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    end = tl.load(lengths + row).to(tl.int32) + 1
    first = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    share = tl.cdiv(tl.cdiv(end - first, num_splits), tile_columns) * tile_columns
    begin = first + split * share
    end = tl.minimum(begin + share, end)

    shared = tl.arange(0, tile_heads)
    heads = group * num_shared + shared
    across, across_value = tl.arange(0, tile_width), tl.arange(0, tile_value)
    columns = tl.arange(0, tile_columns)
    is_head = shared < num_shared
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + across[None, :],
        mask=is_head[:, None] & (across < width)[None, :],
        other=0.0,
    )
    key_start = keys + row * key_slot + group.to(tl.int64) * key_head
    value_start = values + row * value_slot + group.to(tl.int64) * value_head
    highest = tl.full((tile_heads,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((tile_heads,), dtype=tl.float32)
    weighted = tl.zeros((tile_heads, tile_value), dtype=tl.float32)
    for start in range(begin, end, tile_columns):
        places = start + columns
        is_filled = places < end
        k = tl.load(
            key_start + places[None, :] * key_column + across[:, None],
            mask=is_filled[None, :] & (across < width)[:, None],
            other=0.0,
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        if has_softcap:  # softcap * tanh(score / softcap)
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
        score = tl.where(is_filled[None, :], score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        kept = tl.exp(highest - higher)
        weight = tl.exp(score - higher[:, None])
        total = total * kept + tl.sum(weight, axis=1)
        v = tl.load(
            value_start + places[:, None] * value_column + across_value[None, :],
            mask=is_filled[:, None] & (across_value < value_width)[None, :],
            other=0.0,
        )
        product = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        weighted = weighted * kept[:, None] + product
        highest = higher
    places = (row * num_heads + heads) * num_splits + split
    tl.store(stats + places, highest, mask=is_head)
    tl.store(stats + num_rows * num_heads * num_splits + places, total, mask=is_head)
    tl.store(
        sums + places[:, None] * value_width + across_value[None, :],
        weighted,
        mask=is_head[:, None] & (across_value < value_width)[None, :],
    )


@triton.jit
def _merge_splits(
    output, sums, stats, sinks, num_rows, num_heads, value_width, num_splits,
    has_sinks: tl.constexpr, tile_splits: tl.constexpr, tile_value: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, across = tl.arange(0, tile_splits), tl.arange(0, tile_value)
    is_split = splits < num_splits
    places = (row * num_heads + head) * num_splits + splits
    highest = tl.load(stats + places, mask=is_split, other=-float("inf"))
    total = tl.load(stats + num_rows * num_heads * num_splits + places, mask=is_split, other=0.0)
    top = tl.max(highest, axis=0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    share = tl.exp(highest - top)
    denominator = tl.sum(share * total, axis=0)
    if has_sinks:
        denominator += tl.exp(sink - top)
    is_value = across < value_width
    parts = tl.load(
        sums + places[:, None] * value_width + across[None, :],
        mask=is_split[:, None] & is_value[None, :],
        other=0.0,
    )
    merged = tl.sum(parts * share[:, None], axis=0) / denominator
    tl.store(output + (row * num_heads + head) * value_width + across, merged, mask=is_value)


@triton.jit
def _write_rows(
    keys, values, key, value, lengths, key_row, key_head, value_row, value_head,
    slot_of_keys, head_of_keys, column_of_keys, slot_of_values, head_of_values, column_of_values,
    width, value_width, tile_width: tl.constexpr, tile_value: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.load(lengths + row)
    across = tl.arange(0, tile_width)
    new = tl.load(key + row * key_row + head * key_head + across, mask=across < width)
    place = row * slot_of_keys + head * head_of_keys + column * column_of_keys
    tl.store(keys + place + across, new, mask=across < width)
    across = tl.arange(0, tile_value)
    new = tl.load(value + row * value_row + head * value_head + across, mask=across < value_width)
    place = row * slot_of_values + head * head_of_values + column * column_of_values
    tl.store(values + place + across, new, mask=across < value_width)


@triton.jit
def _rotate_rows(
    new_query, new_key, query, key, cos, sin, query_row, query_head, key_row, key_head, angle_row,
    num_heads, num_key_heads, half, tile: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    across = tl.arange(0, tile)
    is_inside = across < half
    cosine = tl.load(cos + row * angle_row + across, mask=is_inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * angle_row + across, mask=is_inside, other=0.0).to(tl.float32)
    if head < num_heads:
        source = query + row * query_row + head * query_head
        target = new_query + (row * num_heads + head) * 2 * half
    else:
        source = key + row * key_row + (head - num_heads) * key_head
        target = new_key + (row * num_key_heads + head - num_heads) * 2 * half
    first = tl.load(source + across, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + across, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(target + across, first * cosine - second * sine, mask=is_inside)
    tl.store(target + half + across, second * cosine + first * sine, mask=is_inside)


@triton.jit
def _multiply_row(
    output, x, weight, bias, num_out, num_in, weight_row,
    has_bias: tl.constexpr, tile_out: tl.constexpr, tile_in: tl.constexpr,
):  # fmt: skip
    outs, ins = tl.program_id(0) * tile_out + tl.arange(0, tile_out), tl.arange(0, tile_in)
    is_out = outs < num_out
    starts = weight + outs.to(tl.int64)[:, None] * weight_row
    total = tl.zeros((tile_out, tile_in), dtype=tl.float32)
    for first in range(0, num_in, tile_in):
        places = first + ins
        is_in = places < num_in
        w = tl.load(starts + places[None, :], mask=is_out[:, None] & is_in[None, :], other=0.0)
        values = tl.load(x + places, mask=is_in, other=0.0)
        total += w.to(tl.float32) * values.to(tl.float32)[None, :]
    made = tl.sum(total, axis=1)
    if has_bias:
        made += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(output + outs, made, mask=is_out)
