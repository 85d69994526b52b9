"""Scratch memory of kernels other than attention: what they allocate beside their results.

Left out is what stays far below a thousandth of a job: scan buffers of nonzero are a few KiB
(Nonzero.cu), nll_loss keeps one number (NLLLoss*.cu), softmax, dropout, cat, fused AdamW and
in-place foreach kernels nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FLOAT = 4
_INDEX = 8
_SMALL_BATCH_INDICES = 3072
"""Up to so many tokens Embedding.cu adds rows up without sorting them."""
_ROWS_PER_THREAD = 10
"""`NROWS_PER_THREAD` of EmbeddingBackwardKernel.cu."""
_FOREACH_CHUNK = 65536
"""`kChunkSize` of MultiTensorApply.cuh, in elements."""
_SIMPLE_4BIT_TOKENS = 4
"""`_GEMM_4BIT_CUSTOM_FLOOR_M` of bitsandbytes: so few are multiplied without unpacking."""


def embedding_backward(args: tuple[Any, ...]) -> list[int]:
    """`embedding_dense_backward_cuda` and `embedding_backward_cuda_kernel`.

    Token numbers are sorted with their places; sums over at most ten equal tokens are kept
    in fp32, for as many as there could be at most.
    """
    gradient, indices, num_weights = args[:3]
    blocks = [] if gradient.is_contiguous() else [_bytes(gradient)]
    count = indices.numel()
    if count <= _SMALL_BATCH_INDICES:
        return blocks
    segments = min(count, num_weights)
    partials = count // _ROWS_PER_THREAD + segments
    sorting = [_INDEX * count] * 3
    places = [_INDEX * segments] * 2 + [_INDEX * partials]
    width = max(gradient.element_size(), _FLOAT)
    return [*blocks, *sorting, *places, width * partials * gradient.shape[-1]]


def index(args: tuple[Any, ...]) -> list[int]:
    """`expandTensors` of IndexingUtils.h: a mask becomes the places where it is true."""
    masks = [x for x in args[1] if x is not None and x.dtype is torch.bool]
    return [_INDEX * mask.dim() * mask.numel() for mask in masks]  # at most


def index_put(args: tuple[Any, ...]) -> list[int]:
    """`index_put_with_sort_kernel` of Indexing.cu, where values are added up.

    Linear places, sorted ones, where they came from, their numbers, and cub's second copy of
    both.
    """
    indices, values = args[1], args[2]
    if len(args) < 4 or not args[3]:
        return index(args)
    count = max((i.numel() for i in indices if i is not None), default=0)
    copied = [] if values.is_contiguous() else [_bytes(values)]
    return [*copied, *[_INDEX * count] * 4, 2 * _INDEX * count]


_ONE_OUTLIER_IN = 8
"""Columns, of which one holds a value beyond the threshold. Only values tell: with drawn weights it
was one in twelve of the widest (h200_trace_dev.json), in trained ones fewer (arXiv:2208.07339,
section 3.1). A trace that takes more than there are is never too low."""


def foreach_norm(args: tuple[Any, ...]) -> list[int]:
    """ForeachReduceOp.cu: a partial sum for every chunk of the longest tensor, for each."""
    tensors = args[0]
    if not tensors:
        return []
    chunks = max(-(-t.numel() // _FOREACH_CHUNK) for t in tensors)
    return [_FLOAT * len(tensors) * chunks]


def multiply_4bit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """`_dequant_linear_fallback` of bitsandbytes' backends/cuda/ops.py: the whole matrix.

    Between 5 and 1536 tokens the library has tables of cards by which it may do without;
    here it never does.
    """
    tokens, shape = args[0], args[2]
    if tokens.numel() // tokens.shape[-1] <= _SIMPLE_4BIT_TOKENS:
        return []
    nested = args[7] if len(args) > 7 else kwargs.get("absmax_8bit")
    scales = [] if nested is None else [_FLOAT * nested.numel()] * 2
    return [*scales, shape[0] * shape[1] * tokens.element_size()]


def multiply_int8(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """`int8_scaled_mm`: the product in int32, then in fp16, then in what was asked for."""
    tokens, weight = args[0], args[1]
    dtype = args[5] if len(args) > 5 else kwargs.get("dtype")
    return _int8_products(tokens.numel() // tokens.shape[-1] * weight.shape[0], dtype)


def multiply_mixed_int8(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> list[int]:
    """`int8_mixed_scaled_mm`: the same with the activation's own type, and a product of outliers.

    Their weights are taken out, unpacked and cast; adding the product makes the output anew.
    """
    tokens, weight = args[0], args[2]
    count = tokens.numel() // tokens.shape[-1] * weight.shape[0]
    taken = weight.shape[0] * count_outliers(tokens)
    size = tokens.element_size()
    return [taken, 4 * taken, size * taken, *_int8_products(count, tokens.dtype), size * count]


def count_outliers(tokens: Tensor) -> int:
    """Columns of an activation that int8 leaves in their own type."""
    return int(tokens.shape[-1] // _ONE_OUTLIER_IN)


def _int8_products(count: int, dtype: torch.dtype | None) -> list[int]:
    return [4 * count] if dtype in (None, torch.float16) else [4 * count, 2 * count]


def quantize_int8(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """`int8_vectorwise_quant`: magnitudes, and which of them exceed the threshold."""
    tokens = args[0]
    threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
    return [_bytes(tokens), tokens.numel()] if threshold > 0 else []


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def softmax_backward(args: tuple[Any, ...]) -> list[int]:
    """The product of gradient and output, before the kernel (SoftMax.cu,
    `softmax_backward_cuda_out`); the logarithm's needs none."""
    return [_bytes(args[0])]
