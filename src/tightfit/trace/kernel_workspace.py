"""Kernel workspace: memory that CUDA kernels allocate beside their results.

Attention arguments are those of the operations that autograd calls; tensors are [batch, heads,
tokens, width], the varlen kernel's [tokens, heads, width]. Left out is what stays far below a
thousandth of a job, such as scan buffers of `nonzero`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from math import prod
from typing import Any

import torch
from torch import Tensor

from tightfit.trace.attention import Capability

_FP32_BYTES = 4
_SMALL_CORE_SHARED_BYTES = ((7, 5), (8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""GPUs whose 64 to 99 KiB of shared memory cannot hold the kernels' largest tiles (CUDA
programming guide, technical specifications per compute capability)."""
_MAX_SPLIT_GROUPS = 200
"""Keys are split while heads times splits stay within this (attention_backward.cu)."""


def flash_backward(args: tuple[Any, ...]) -> list[int]:
    """`mha_bwd` of flash_attn/flash_api.cpp, without determinism.

    Query gradients are summed in fp32, of padded length and width; grouped keys get
    gradients per query head first. `_flash_attention_backward` makes the gradient and the
    output contiguous token by token.
    """
    gradient, query, key, _, output = args[:5]
    copied = [x for x in (gradient, output) if not x.transpose(1, 2).is_contiguous()]
    batch, num_heads, num_queries, _ = query.shape
    return _flash_backward(copied, (batch, num_queries, num_heads), query, key.shape[1])


def flash_rows_backward(args: tuple[Any, ...]) -> list[int]:
    """The same kernel, called with `[rows, tokens, heads, width]`."""
    gradient, query, key, _, output = args[:5]
    copied = [x for x in (gradient, output) if not x.is_contiguous()]
    batch, num_queries, num_heads, _ = query.shape
    return _flash_backward(copied, (batch, num_queries, num_heads), query, key.shape[2])


def _flash_backward(
    copied: list[Any], sizes: tuple[int, int, int], query: Any, num_key_heads: int
) -> list[int]:
    batch, num_queries, num_heads = sizes
    width = query.shape[-1]
    rounded = _round_up(num_queries, 128)
    blocks = [_tensor_bytes(x) for x in copied]
    blocks.append(_FP32_BYTES * batch * num_heads * rounded)
    blocks.append(_FP32_BYTES * batch * num_heads * rounded * _round_width(width))
    if num_key_heads != num_heads:
        whole = batch * num_heads * num_queries * width * query.element_size()
        blocks += [whole, whole]
    return blocks


def varlen_backward(args: tuple[Any, ...]) -> list[int]:
    """`mha_varlen_bwd` of flash_attn/flash_api.cpp: each document is 128 rows from the next."""
    gradient, query, key, _, output, _, offsets = args[:7]
    num_queries, num_heads, width = query.shape
    rows = num_queries + 128 * (offsets.numel() - 1)
    blocks = [_tensor_bytes(x) for x in (gradient, output) if not x.is_contiguous()]
    blocks.append(_FP32_BYTES * num_heads * rows)
    blocks.append(_FP32_BYTES * num_heads * rows * _round_width(width))
    if key.shape[1] != num_heads:
        whole = num_heads * key.shape[0] * width * key.element_size()
        blocks += [whole, whole]
    return blocks


_CUDNN_EXTRA_BYTES = 16
"""Less than a block: one block more was measured on an H200 with torch 2.11."""


def cudnn_backward(args: tuple[Any, ...]) -> list[int]:
    """One workspace (`run_cudnn_SDP_bprop`), as cudnn-frontend adds it up.

    `SDPABackwardNode::get_fe_workspace_size_node`: the query's gradient and the sum over each
    row, both in fp32. Gradients of grouped keys per query head are not tensors of the frontend;
    the plan that sums them holds them in its workspace.
    """
    gradient, query, key, value = args[:4]
    batch, num_heads, num_queries, width = query.shape
    workspace = _FP32_BYTES * batch * num_heads * num_queries * (width + 1) + _CUDNN_EXTRA_BYTES
    if key.shape[1] != num_heads:
        widths = width + value.shape[-1]
        workspace += batch * num_heads * key.shape[2] * widths * key.element_size()
    copied = [] if gradient.stride(-1) == 1 else [_tensor_bytes(gradient)]
    return [*copied, workspace]


def efficient_forward(args: tuple[Any, ...]) -> list[int]:
    """`kNeedsOutputAccumulatorBuffer` of mem_eff_attention/kernel_forward.h: beyond width 128."""
    query, value = args[0], args[2]
    if query.element_size() == _FP32_BYTES or max(query.shape[-1], value.shape[-1]) <= 128:
        return []
    return [_FP32_BYTES * query.shape[0] * query.shape[1] * query.shape[2] * value.shape[-1]]


def efficient_backward(args: tuple[Any, ...], capability: Capability) -> list[int]:
    """`_efficient_attention_backward` of attention_backward.cu with `Params::workspace_size`.

    fp32 kernels and Volta's wide ones take the rows' sums from a product made outside,
    which is freed before the workspace is allocated.
    """
    gradient, query, key, value, _, output = args[:6]
    batch, num_heads, num_queries, width = query.shape
    is_half = query.element_size() == 2
    rows, columns, max_width = _pick_tile(max(width, value.shape[-1]), capability, is_half=is_half)
    is_in_registers = is_half and max_width <= rows
    tiles = -(-num_queries // rows) * -(-width // columns)
    elements = tiles * (rows * columns + 4)
    if is_half and not is_in_registers:
        splits = min(-(-key.shape[2] // columns), _MAX_SPLIT_GROUPS // (batch * num_heads))
        kept = _round_up(width, rows) + _round_up(value.shape[-1], rows)
        elements += max(splits, 1) * columns * kept
    workspace = _FP32_BYTES * batch * num_heads * _round_up(elements, 4)
    if not (is_half and (is_in_registers or capability[:2] != (7, 0))):
        workspace = max(workspace, _FP32_BYTES * output.numel())
    blocks = [] if gradient.transpose(1, 2).is_contiguous() else [_tensor_bytes(gradient)]
    return [*blocks, _FP32_BYTES * batch * num_heads * num_queries, workspace]


def _pick_tile(width: int, capability: Capability, *, is_half: bool) -> tuple[int, int, int]:
    """(kBlockSizeI, kBlockSizeJ, kMaxK) of the first kernel in kernels/cutlassB.h that fits."""
    if width <= 64:
        return 64, 64, 32 if width <= 32 else 64
    max_width = 128 if width <= 128 else 65536
    if capability in _SMALL_CORE_SHARED_BYTES or (not is_half and capability < (8, 0)):
        if is_half and width <= 96 and capability in ((8, 6), (8, 9)):
            return 128, 64, 96
        return 64, 64, max_width
    if is_half and capability >= (8, 0) and width <= 128:
        return 128, 128, 128
    return 128, 64, max_width


def safe_softmax(args: tuple[Any, ...]) -> list[int]:
    """`_safe_softmax` of attention.cpp: the plain softmax and which scores are -inf."""
    scores = args[0]
    return [_tensor_bytes(scores), scores.numel()]


def _round_width(width: int) -> int:
    return _round_up(width, 32 if width <= 128 else 64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Kernels other than attention

_INDEX = 8
_SMALL_BATCH_INDICES = 3072
"""Up to this many tokens Embedding.cu sums rows without sorting them."""
_ROWS_PER_THREAD = 10
"""`NROWS_PER_THREAD` of EmbeddingBackwardKernel.cu."""
_FOREACH_CHUNK = 65536
"""`kChunkSize` of MultiTensorApply.cuh, in elements."""
_SIMPLE_4BIT_TOKENS = 4
"""`_GEMM_4BIT_CUSTOM_FLOOR_M` of bitsandbytes: up to this many are multiplied in 4 bit."""


def embedding_backward(args: tuple[Any, ...]) -> list[int]:
    """`embedding_dense_backward_cuda` and `embedding_backward_cuda_kernel`.

    Token ids are sorted with their positions; partial sums over at most ten equal tokens are kept
    in fp32, in a buffer for the largest possible number of them.
    """
    gradient, indices, num_weights = args[:3]
    blocks = [] if gradient.is_contiguous() else [_tensor_bytes(gradient)]
    count = indices.numel()
    if count <= _SMALL_BATCH_INDICES:
        return blocks
    segments = min(count, num_weights)
    partials = count // _ROWS_PER_THREAD + segments
    sorting = [_INDEX * count] * 3
    positions = [_INDEX * segments] * 2 + [_INDEX * partials]
    width = max(gradient.element_size(), _FP32_BYTES)
    return [*blocks, *sorting, *positions, width * partials * gradient.shape[-1]]


def index_workspace(args: tuple[Any, ...]) -> list[int]:
    """`expandTensors` of IndexingUtils.h: a mask becomes the positions where it is true."""
    masks = [x for x in args[1] if x is not None and x.dtype is torch.bool]
    return [_INDEX * mask.dim() * mask.numel() for mask in masks]  # at most


def index_put_workspace(args: tuple[Any, ...]) -> list[int]:
    """`index_put_with_sort_kernel` of Indexing.cu, where values are accumulated.

    Linear positions, sorted positions, their origins and indices, and cub's second copy of both.
    """
    indices, values = args[1], args[2]
    if len(args) < 4 or not args[3]:
        return index_workspace(args)
    count = max((i.numel() for i in indices if i is not None), default=0)
    copied = [] if values.is_contiguous() else [_tensor_bytes(values)]
    return [*copied, *[_INDEX * count] * 4, 2 * _INDEX * count]


_ONE_OUTLIER_IN = 8
"""Assumed share of columns with a value beyond the threshold, which only real values decide: one in
twelve of the widest with random weights (h200_trace_dev.json), fewer in trained ones
(arXiv:2208.07339, section 3.1). Assuming more than there are never underestimates."""


def foreach_norm(args: tuple[Any, ...]) -> list[int]:
    """ForeachReduceOp.cu: for each tensor, a partial sum per chunk of the longest one."""
    tensors = args[0]
    if not tensors:
        return []
    chunks = max(-(-t.numel() // _FOREACH_CHUNK) for t in tensors)
    return [_FP32_BYTES * len(tensors) * chunks]


def multiply_4bit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """`_dequant_linear_fallback` of bitsandbytes' backends/cuda/ops.py: the whole matrix.

    Between 5 and 1536 tokens the library may avoid it on GPUs in its tables; this is ignored here.
    """
    tokens, shape = args[0], args[2]
    if tokens.numel() // tokens.shape[-1] <= _SIMPLE_4BIT_TOKENS:
        return []
    nested = args[7] if len(args) > 7 else kwargs.get("absmax_8bit")
    scales = [] if nested is None else [_FP32_BYTES * nested.numel()] * 2
    return [*scales, shape[0] * shape[1] * tokens.element_size()]


def multiply_int8(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """`int8_scaled_mm`: the product in int32, then in fp16, then in the requested dtype."""
    tokens, weight = args[0], args[1]
    dtype = args[5] if len(args) > 5 else kwargs.get("dtype")
    return _int8_products(tokens.numel() // tokens.shape[-1] * weight.shape[0], dtype)


def multiply_mixed_int8(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> list[int]:
    """`int8_mixed_scaled_mm`: the same with the activation's own type, and a product of outliers.

    Their weights are extracted, dequantized and cast; adding the product allocates a new output.
    """
    tokens, weight = args[0], args[2]
    count = tokens.numel() // tokens.shape[-1] * weight.shape[0]
    taken = weight.shape[0] * count_outliers(tokens)
    size = tokens.element_size()
    return [taken, 4 * taken, size * taken, *_int8_products(count, tokens.dtype), size * count]


def count_outliers(tokens: Tensor) -> int:
    """Columns of an activation that int8 keeps in their own dtype."""
    return int(tokens.shape[-1] // _ONE_OUTLIER_IN)


def _int8_products(count: int, dtype: torch.dtype | None) -> list[int]:
    return [4 * count] if dtype in (None, torch.float16) else [4 * count, 2 * count]


def quantize_int8(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """`int8_vectorwise_quant`: magnitudes, and which of them exceed the threshold."""
    tokens = args[0]
    threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
    return [_tensor_bytes(tokens), tokens.numel()] if threshold > 0 else []


def softmax_backward(args: tuple[Any, ...]) -> list[int]:
    """The product of gradient and output, before the kernel (SoftMax.cu,
    `softmax_backward_cuda_out`); the logarithm's needs none."""
    return [_tensor_bytes(args[0])]


# Reductions: partial results that thread blocks exchange
#
# A port of `setReduceConfig` and `gpu_reduce_kernel` of pytorch's ATen/native/cuda/Reduce.cuh
# (torch 2.8 to 2.13, NVIDIA's branch), after `reorder_dimensions` and `coalesce_dimensions` of
# ATen/TensorIterator.cpp. The weight gradients of norms, sums over all tokens, are the large
# ones: 128 MiB for 8192 tokens of 2048 values.

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
architecture white papers. GPUs of one capability differ; the number matters only
where a row of outputs is short."""
_COMMON_THREADS = 2048
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor (CUDA programming guide, technical specifications per
compute capability)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiprocessors:
    """The GPU's properties that decide how many blocks share a sum."""

    count: int
    threads: int
    """Resident threads of each."""


def find_multiprocessors(capability: Capability, count: int | None = None) -> Multiprocessors:
    """Those of a capability; if it is not in the table, of the next older one."""
    older = [known for known in _MULTIPROCESSORS if known <= capability]
    usual = _MULTIPROCESSORS[max(older, default=min(_MULTIPROCESSORS))]
    return Multiprocessors(count=count or usual, threads=_THREADS.get(capability, _COMMON_THREADS))


def reduction_workspace(
    args: tuple[Any, ...], kwargs: dict[str, Any], gpu: Multiprocessors, *, dims_at: int = 1
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
    return [*copied, *_spread(loops, width, _accumulated_bytes(source), gpu)]


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
    """Outputs from one to the next; 0 for a reduced dimension."""


def _order(shape: Sequence[int], steps: Sequence[int], reduced: set[int]) -> list[_Loop]:
    """Reduced dimensions first, then the fastest first; contiguous neighbours are merged."""
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


def _spread(loops: list[_Loop], width: int, accumulated: int, gpu: Multiprocessors) -> list[int]:
    """Buffer and semaphores, where several thread blocks share an output."""
    if sum((loop.size - 1) * loop.step for loop in loops) >= _MAX_INDEXED_BYTES:
        # The halves run one after the other and reuse the same workspace.
        at = max(range(len(loops)), key=lambda i: (loops[i].size - 1) * loops[i].step)
        half = _Loop(-(-loops[at].size // 2), loops[at].step, loops[at].out_step)
        return _spread([*loops[:at], half, *loops[at + 1 :]], width, accumulated, gpu)
    summed = [loop for loop in loops if not loop.out_step]
    kept = loops[len(summed) :]
    if not summed:
        return []
    num_inputs, num_outputs = prod(x.size for x in summed), prod(x.size for x in kept)
    if not kept or summed[0].step < kept[0].step:
        return _spread_along_rows(summed, width, (num_inputs, num_outputs, accumulated), gpu)
    vector = _output_vector(loops, len(summed), width) if kept[0].step == width else 1
    block = _shape_block(num_outputs // vector, num_inputs, _MAX_THREADS // vector)
    columns = -(-num_outputs // vector // block[0])
    num_blocks = _count_blocks(num_inputs, columns, block, gpu)
    if num_blocks <= 1:
        return []
    return [accumulated * num_outputs * num_blocks * block[0] * vector, _INT * columns]


def _spread_along_rows(
    summed: list[_Loop], width: int, counts: tuple[int, int, int], gpu: Multiprocessors
) -> list[int]:
    """Where neighbouring threads sum the same output."""
    num_inputs, num_outputs, accumulated = counts
    is_vectorized = summed[0].step == width and len(summed) == 1 and num_inputs >= _MIN_VECTORIZED
    vector = (8 if width == 2 else 4) if is_vectorized else 1
    block = _shape_block(num_inputs // vector, num_outputs, _MAX_THREADS)
    num_blocks = _count_blocks(-(-num_inputs // block[0]), num_outputs, block, gpu)
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
    """`set_block_dimension`: threads per row, and rows."""
    wide = _power_of_two(dim0) if dim0 < most else most
    high = _power_of_two(dim1) if dim1 < most else most
    height = min(high, most // min(wide, _WARP))
    return min(wide, most // height), height


def _power_of_two(count: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << max(count, 1).bit_length() - 1


def _count_blocks(values: int, grid: int, block: tuple[int, int], gpu: Multiprocessors) -> int:
    """`ctas_per_output`: blocks that share an output of which a thread has `values` to sum."""
    width, height = block
    if values < min(height * _MIN_VALUES, _MAX_VALUES):
        return 1  # each row of threads has an output of its own
    values = -(-values // height)
    wanted = gpu.count * (gpu.threads // (width * height))
    if values < _MAX_VALUES or grid > wanted:
        return 1
    return max(min(-(-wanted // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
