"""A Triton kernel for AdamW: all tensors in one launch and one pass over memory.

Each thread handles one 16-byte load at a time: with two it needs four times the registers, and too
few programs run at once to hide memory latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
NUM_WARPS = 4
NUM_TILES = 4
"""Tiles of one program, one after another."""
_COLUMNS: tl.constexpr = tl.constexpr(6)
"""Of the table: addresses of weight, gradient and both moments, size, first program."""
_WORDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The hyperparameters of one update."""

    rate: float
    decay: float
    betas: tuple[float, float]
    epsilon: float


def update_all(tensors: Sequence[Sequence[Tensor]], steps: Tensor, rule: Rule, by: Tensor) -> None:
    """Update weights, given with gradients and both moments, of one dtype on one device.

    `steps` counts each weight's updates including this one. Gradients are multiplied by `by`;
    below 0 it skips the update.
    """
    sizes = tuple(weight.numel() for weight in tensors[0])
    device = steps.device
    rows = zip(*((one.data_ptr() for one in part) for part in tensors), strict=True)
    starts = _list_starts(sizes)
    table = [
        [*addresses, size, start]
        for addresses, size, start in zip(rows, sizes, starts, strict=False)
    ]
    first, second = rule.betas
    # 1 - beta^step by expm1, which does not lose digits in fp32.
    corrections = torch.stack(
        [-torch.expm1(steps * log(first)), (-torch.expm1(steps * log(second))).rsqrt()]
    )
    _adamw[(starts[-1],)](
        torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True),
        *(_list_owners(sizes, device), corrections, by, len(sizes)),
        *(rule.rate, rule.decay, 1.0 - first, 1.0 - second, rule.epsilon),
        dtype=_WORDS[tensors[0][0].dtype],
        tile=TILE,
        num_tiles=NUM_TILES,
        num_warps=NUM_WARPS,
    )


def _count_programs(size: int) -> int:
    return int(triton.cdiv(size, TILE * NUM_TILES))


@lru_cache(maxsize=16)
def _list_starts(sizes: tuple[int, ...]) -> list[int]:
    """The first program of each tensor, and the total number."""
    return list(accumulate(map(_count_programs, sizes), initial=0))


@lru_cache(maxsize=16)
def _list_owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The tensor that each program works on."""
    counts = torch.tensor([_count_programs(size) for size in sizes], device=device)
    numbers = torch.arange(len(sizes), dtype=torch.int32, device=device)
    return torch.repeat_interleave(numbers, counts)


# Kernels


@triton.jit
def _find(row, column: tl.constexpr, dtype: tl.constexpr):
    address = tl.load(row + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)


@triton.jit
def _step(
    weights, gradients, firsts, seconds, begin, size, by, step_size, widen, kept, rule,
    tile: tl.constexpr, num_tiles: tl.constexpr, is_whole: tl.constexpr,
):  # fmt: skip
    """One tile after another; full ones without a mask, which would split their loads."""
    first_share, second_share, epsilon = rule
    for number in range(num_tiles):
        places = begin + number * tile + tl.arange(0, tile)
        is_inside = None if is_whole else places < size
        g = tl.load(gradients + places, mask=is_inside).to(tl.float32) * by
        m = tl.load(firsts + places, mask=is_inside).to(tl.float32)
        v = tl.load(seconds + places, mask=is_inside).to(tl.float32)
        w = tl.load(weights + places, mask=is_inside).to(tl.float32)
        m += first_share * (g - m)
        v += second_share * (g * g - v)
        w = w * kept - step_size * m / (tl.sqrt(v) * widen + epsilon)
        dtype = weights.dtype.element_ty
        tl.store(weights + places, w.to(dtype), mask=is_inside)
        tl.store(firsts + places, m.to(dtype), mask=is_inside)
        tl.store(seconds + places, v.to(dtype), mask=is_inside)


@triton.jit
def _adamw(
    table, owners, corrections, by, num_tensors,
    rate, decay, first_share, second_share, epsilon,
    dtype: tl.constexpr, tile: tl.constexpr, num_tiles: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    row = table + owner * _COLUMNS
    weights, gradients = _find(row, 0, dtype), _find(row, 1, dtype)
    firsts, seconds = _find(row, 2, dtype), _find(row, 3, dtype)
    size = tl.load(row + 4)
    begin = (program - tl.load(row + 5)) * (tile * num_tiles)
    step_size = rate / tl.load(corrections + owner)
    widen = tl.load(corrections + num_tensors + owner)
    factor = tl.load(by).to(tl.float32)
    kept = 1.0 - rate * decay
    rule = (first_share, second_share, epsilon)
    if factor >= 0.0:
        if begin + tile * num_tiles <= size:
            _step(
                weights, gradients, firsts, seconds, begin, size, factor, step_size, widen, kept,
                rule, tile, num_tiles, is_whole=True,
            )  # fmt: skip
        else:
            _step(
                weights, gradients, firsts, seconds, begin, size, factor, step_size, widen, kept,
                rule, tile, num_tiles, is_whole=False,
            )  # fmt: skip
