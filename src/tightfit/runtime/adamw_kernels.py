"""AdamW of all tensors in one launch and one pass over memory. Uses triton.

torch's fused kernel reads and writes 8 bytes of 16-bit values at a time, and reaches half of a
card's bandwidth. Here a program has one tile of one tensor, in loads of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
NUM_WARPS = 8
_COLUMNS: tl.constexpr = tl.constexpr(6)
"""Of the table: addresses of weight, gradient and both moments, size, and the first program."""
_WORDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The numbers of one update."""

    rate: float
    decay: float
    betas: tuple[float, float]
    epsilon: float


def update_all(tensors: Sequence[Sequence[Tensor]], steps: Tensor, rule: Rule, by: Tensor) -> None:
    """Weights, gradients, first and second moments, all of one dtype on one device.

    `steps` has each weight's number of updates, this one included. Gradients are multiplied
    by `by` as they are read; where that is below 0, nothing is changed.
    """
    sizes = tuple(weight.numel() for weight in tensors[0])
    device = steps.device
    rows = zip(*((one.data_ptr() for one in part) for part in tensors), strict=True)
    starts = _count_programs(sizes)
    table = [
        [*addresses, size, start]
        for addresses, size, start in zip(rows, sizes, starts, strict=False)
    ]
    first, second = rule.betas
    # 1 - beta^step, without the digits that the difference of two like numbers would lose.
    corrections = torch.stack(
        [-torch.expm1(steps * log(first)), (-torch.expm1(steps * log(second))).sqrt()]
    )
    _update[(starts[-1],)](
        torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True),
        *(_list_owners(sizes, device), corrections, by, len(sizes)),
        *(rule.rate, rule.decay, first, second, rule.epsilon),
        dtype=_WORDS[tensors[0][0].dtype],
        tile=TILE,
        num_warps=NUM_WARPS,
    )


@lru_cache(maxsize=16)
def _count_programs(sizes: tuple[int, ...]) -> list[int]:
    """The first program of each tensor, and how many there are in all."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + triton.cdiv(size, TILE))
    return starts


@lru_cache(maxsize=16)
def _list_owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The tensor that each program has a tile of."""
    counts = torch.tensor([triton.cdiv(size, TILE) for size in sizes], device=device)
    numbers = torch.arange(len(sizes), dtype=torch.int32, device=device)
    return torch.repeat_interleave(numbers, counts)


# Kernels


@triton.jit
def _find(row, column: tl.constexpr, dtype: tl.constexpr):
    address = tl.load(row + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)


@triton.jit
def _step(
    weights, gradients, firsts, seconds, places, size, by, step_size, root, kept, rule,
    is_whole: tl.constexpr,
):  # fmt: skip
    """One tile; a whole one without a mask, which would take its loads apart."""
    first_beta, second_beta, epsilon = rule
    is_inside = None if is_whole else places < size
    g = tl.load(gradients + places, mask=is_inside).to(tl.float32) * by
    m = tl.load(firsts + places, mask=is_inside).to(tl.float32)
    v = tl.load(seconds + places, mask=is_inside).to(tl.float32)
    w = tl.load(weights + places, mask=is_inside).to(tl.float32)
    m += (1.0 - first_beta) * (g - m)
    v += (1.0 - second_beta) * (g * g - v)
    w = w * kept - step_size * m / (tl.sqrt(v) / root + epsilon)
    dtype = weights.dtype.element_ty
    tl.store(weights + places, w.to(dtype), mask=is_inside)
    tl.store(firsts + places, m.to(dtype), mask=is_inside)
    tl.store(seconds + places, v.to(dtype), mask=is_inside)


@triton.jit
def _update(
    table, owners, corrections, by, num_tensors,
    rate, decay, first_beta, second_beta, epsilon,
    dtype: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    row = table + owner * _COLUMNS
    weights, gradients = _find(row, 0, dtype), _find(row, 1, dtype)
    firsts, seconds = _find(row, 2, dtype), _find(row, 3, dtype)
    size = tl.load(row + 4)
    begin = (program - tl.load(row + 5)) * tile
    places = begin + tl.arange(0, tile)
    step_size = rate / tl.load(corrections + owner)
    root = tl.load(corrections + num_tensors + owner)
    factor = tl.load(by).to(tl.float32)
    kept = 1.0 - rate * decay
    rule = (first_beta, second_beta, epsilon)
    if factor >= 0.0:
        if begin + tile <= size:
            _step(
                weights, gradients, firsts, seconds, places, size, factor, step_size, root, kept,
                rule, is_whole=True,
            )  # fmt: skip
        else:
            _step(
                weights, gradients, firsts, seconds, places, size, factor, step_size, root, kept,
                rule, is_whole=False,
            )  # fmt: skip
