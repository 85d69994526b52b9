"""Scratch memory of sums, means and norms: partial results that thread blocks leave each other.

A port of `setReduceConfig` and `gpu_reduce_kernel` of pytorch's ATen/native/cuda/Reduce.cuh
(torch 2.8 to 2.13, NVIDIA's branch), with `reorder_dimensions` and `coalesce_dimensions` of
ATen/TensorIterator.cpp before it. The norms' weight gradients, sums over all tokens, are the
large ones: 128 MiB for 8192 tokens of 2048 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from math import prod
from typing import Any

import torch
from torch import Tensor

from tightfit.estimate.trace.habits_backend import Capability

_INT = 4
_WARP = 32
_MAX_THREADS = 512
"""`mnt_wrapper::MAX_NUM_THREADS`, of a block."""
_MIN_VALUES, _MAX_VALUES = 16, 256
"""`min_values_per_thread` and `max_values_per_thread`."""
_MIN_VECTORIZED = 128
_MAX_OUTPUT_VECTOR = 4
_MAX_INDEXED_BYTES = 2**31 - 1
"""Larger tensors are summed in halves (`with_32bit_indexing`)."""

_MULTIPROCESSORS = {
    (7, 0): 80,
    (7, 5): 40,
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 128,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 170,
}
"""Of V100, T4, A100, A40 and RTX A6000, RTX 4090, H100 SXM and H200, B200, RTX 5090: NVIDIA's
architecture white papers. Within a capability cards differ; how many there are matters only
where a row of outputs is short."""
_COMMON_THREADS = 2048
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor (CUDA programming guide, technical specifications per
compute capability)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiprocessors:
    """What of a card decides over how many blocks a sum is spread."""

    count: int
    threads: int
    """That each can hold at a time."""


def find_multiprocessors(card: Capability, count: int | None = None) -> Multiprocessors:
    """`card`'s; of a card not in the table, as many as the next older one has."""
    older = [known for known in _MULTIPROCESSORS if known <= card]
    usual = _MULTIPROCESSORS[max(older, default=min(_MULTIPROCESSORS))]
    return Multiprocessors(count=count or usual, threads=_THREADS.get(card, _COMMON_THREADS))


def reduce_scratch(
    args: tuple[Any, ...], kwargs: dict[str, Any], card: Multiprocessors, *, dims_at: int = 1
) -> list[int]:
    """Blocks of one reduction: a widened copy of its input, partial results, semaphores.

    The dimensions are argument number `dims_at`; without them everything is reduced.
    """
    source: Tensor = args[0]
    if not source.numel() or not source.dim():
        return []
    dims = args[dims_at] if len(args) > dims_at else kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {dim % source.dim() for dim in dims} if dims else set(range(source.dim()))
    width, copied = _widths(source, kwargs.get("dtype"))
    loops = _order(source.shape, [step * width for step in source.stride()], reduced)
    return [*copied, *_spread(loops, width, _accumulated_bytes(source), card)]


def _widths(source: Tensor, dtype: torch.dtype | None) -> tuple[int, list[int]]:
    """Bytes of an element that the kernel reads, and the copy that was made before, if any.

    `make_reduction_from_out_ty`: only half precision is widened inside of the kernel.
    """
    is_real = source.is_floating_point() or source.is_complex()
    wanted = dtype or (source.dtype if is_real else torch.int64)
    is_inside = source.dtype in (torch.float16, torch.bfloat16) and wanted is torch.float32
    if wanted is source.dtype or is_inside:
        return source.element_size(), []
    return wanted.itemsize, [source.numel() * wanted.itemsize]


def _accumulated_bytes(source: Tensor) -> int:
    if not source.is_floating_point():
        return 8
    return max(source.element_size(), 4)


@dataclass(frozen=True, slots=True)
class _Loop:
    """One dimension of a reduction as the iterator sees it."""

    size: int
    step: int
    """Bytes from one element of the input to the next."""
    out_step: int
    """Outputs from one to the next; 0 where it is summed over."""


def _order(shape: Sequence[int], steps: Sequence[int], reduced: set[int]) -> list[_Loop]:
    """Summed dimensions first, then the fastest first; neighbours that lie together are one."""
    loops: list[_Loop] = []
    outputs = 1
    for dim in reversed(range(len(shape))):
        loops.append(_Loop(shape[dim], steps[dim], 0 if dim in reduced else outputs))
        outputs *= 1 if dim in reduced else shape[dim]
    loops.sort(key=cmp_to_key(_compare))
    merged = [loops[0]]
    for loop in loops[1:]:
        last = merged[-1]
        if last.size == 1 or loop.size == 1 or _lie_together(last, loop):
            kept = loop if last.size == 1 else last
            merged[-1] = _Loop(last.size * loop.size, kept.step, kept.out_step)
        else:
            merged.append(loop)
    return merged


def _compare(one: _Loop, other: _Loop) -> int:
    if (one.out_step == 0) != (other.out_step == 0):
        return -1 if one.out_step == 0 else 1
    for first, second in ((one.out_step, other.out_step), (one.step, other.step)):
        if first and second and first != second:
            return -1 if first < second else 1
    return 0


def _lie_together(inner: _Loop, outer: _Loop) -> bool:
    return inner.size * inner.step == outer.step and inner.size * inner.out_step == outer.out_step


def _spread(loops: list[_Loop], width: int, accumulated: int, card: Multiprocessors) -> list[int]:
    """Buffer and semaphores, where several thread blocks share an output."""
    if sum((loop.size - 1) * loop.step for loop in loops) >= _MAX_INDEXED_BYTES:
        # One half after the other: what the first took, the second takes again.
        at = max(range(len(loops)), key=lambda i: (loops[i].size - 1) * loops[i].step)
        half = _Loop(-(-loops[at].size // 2), loops[at].step, loops[at].out_step)
        return _spread([*loops[:at], half, *loops[at + 1 :]], width, accumulated, card)
    summed = [loop for loop in loops if not loop.out_step]
    kept = loops[len(summed) :]
    if not summed:
        return []
    num_inputs, num_outputs = prod(x.size for x in summed), prod(x.size for x in kept)
    if not kept or summed[0].step < kept[0].step:
        return _spread_along_rows(summed, width, (num_inputs, num_outputs, accumulated), card)
    vector = _output_vector(loops, len(summed), width) if kept[0].step == width else 1
    block = _shape_block(num_outputs // vector, num_inputs, _MAX_THREADS // vector)
    columns = -(-num_outputs // vector // block[0])
    num_blocks = _count_blocks(num_inputs, columns, block, card)
    if num_blocks <= 1:
        return []
    return [accumulated * num_outputs * num_blocks * block[0] * vector, _INT * columns]


def _spread_along_rows(
    summed: list[_Loop], width: int, counts: tuple[int, int, int], card: Multiprocessors
) -> list[int]:
    """Where threads side by side sum the same output."""
    num_inputs, num_outputs, accumulated = counts
    is_vectorized = summed[0].step == width and len(summed) == 1 and num_inputs >= _MIN_VECTORIZED
    vector = (8 if width == 2 else 4) if is_vectorized else 1
    block = _shape_block(num_inputs // vector, num_outputs, _MAX_THREADS)
    num_blocks = _count_blocks(-(-num_inputs // block[0]), num_outputs, block, card)
    if num_blocks <= 1:
        return []
    return [accumulated * num_outputs * num_blocks, _INT * num_outputs]


def _output_vector(loops: list[_Loop], fastest: int, width: int) -> int:
    """`get_output_vec_size`; blocks begin at multiples of it."""
    vector = _MAX_OUTPUT_VECTOR
    others = [x.step // width for i, x in enumerate(loops) if i != fastest]
    for count in (loops[fastest].size, *others):
        while count % vector:
            vector //= 2
    return vector


def _shape_block(dim0: int, dim1: int, most: int) -> tuple[int, int]:
    """`set_block_dimension`: threads side by side, and rows of them."""
    wide = _power_of_two(dim0) if dim0 < most else most
    high = _power_of_two(dim1) if dim1 < most else most
    height = min(high, most // min(wide, _WARP))
    return min(wide, most // height), height


def _power_of_two(count: int) -> int:
    """The largest that is no larger."""
    return 1 << max(count, 1).bit_length() - 1


def _count_blocks(values: int, grid: int, block: tuple[int, int], card: Multiprocessors) -> int:
    """`ctas_per_output`: blocks that share an output of which a thread has `values` to sum."""
    width, height = block
    if values < min(height * _MIN_VALUES, _MAX_VALUES):
        return 1  # each row of threads has an output of its own
    values = -(-values // height)
    wanted = card.count * (card.threads // (width * height))
    if values < _MAX_VALUES or grid > wanted:
        return 1
    return max(min(-(-wanted // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
