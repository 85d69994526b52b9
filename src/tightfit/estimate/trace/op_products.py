"""Products, attention, unpacking, optimizers: the work of what computes. Uses torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from tightfit.estimate.trace.op_work import (
    TENSORS_PER_KERNEL,
    Arguments,
    Work,
    list_tensors,
    name_dtype,
    sum_bytes,
)
from tightfit.estimate.trace.operations import (
    ADDED_PRODUCT,
    ATTENTION,
    DEQUANTIZE,
    MATMUL,
    MEMORY_BOUND,
    OPTIMIZER,
)
from tightfit.estimate.trace.shadows import shadow_of
from tightfit.hardware.measured_rates import FP8, FP8_EXACT


def _multiply(args: Arguments, result: Any) -> Work:
    left = args.get("self") if "mat1" not in args else args["mat1"]
    right = args["mat2"]
    return _product(left, right, result)


def _add_product(args: Arguments, result: Any) -> Work:
    """What the product is added to is read as well as written."""
    work = _multiply(args, result)
    return work._replace(num_bytes=work.num_bytes + sum_bytes(list_tensors(result)))


def _multiply_batch(args: Arguments, result: Any) -> Work:
    left = args["batch1"] if "batch1" in args else args["self"]
    right = args["batch2"] if "batch2" in args else args["mat2"]
    return _product(left, right, result)


def _product(left: Any, right: Any, result: Any) -> Work:
    (m, k), n = left.shape[-2:], right.shape[-1]
    times = prod(left.shape[:-2])
    return Work(
        MATMUL,
        dtype=name_dtype(left.dtype),
        shape=(m, n, k, times),
        flops=2.0 * m * n * k * times,
        num_bytes=sum_bytes((left, right)) + sum_bytes(list_tensors(result)),
        num_indexed=sum(x.numel() for x in (left, right, *list_tensors(result)) if _is_crooked(x)),
    )


ROW_BYTES = 16
"""Rows must begin at multiples of it for tensor cores to be fed at full speed. Source: cuBLAS
documentation, "Tensor Core Usage"."""


def _is_crooked(matrix: Any) -> bool:
    """Whether rows begin where they cannot be read several values at once."""
    widest = max(matrix.stride()[-2:])
    return bool(matrix.element_size() < 4 and widest * matrix.element_size() % ROW_BYTES)


def _multiply_fp8(args: Arguments, result: Any) -> Work:
    """As any product; scales are one a row, and count as nothing."""
    dtype = FP8 if args.get("use_fast_accum") else FP8_EXACT
    return _multiply(args, result)._replace(dtype=dtype, num_indexed=0)


_INT8_PRODUCT_CALLS = 8
_INT8_SPLIT_CALLS = 10
"""Operations inside of bitsandbytes' own, where no column is apart. Source: its
backends/cuda/ops.py and backends/default/ops.py, 0.50."""


def _multiply_int8(args: Arguments, result: Any) -> Work:
    """Rounded activations by rounded weights into int32, then scaled; outliers come apart."""
    left = args["CA"] if "CA" in args else args["A"]
    right = args["CB"] if "CB" in args else args["B"]
    m, (n, k) = prod(left.shape[:-1]), right.shape
    written = sum_bytes(list(list_tensors(result))[:1])
    return Work(
        MATMUL,
        dtype="int8",
        shape=(m, n, k, 1),
        flops=2.0 * m * n * k,
        num_bytes=sum_bytes((left, right)) + 8.0 * m * n + 3.0 * written,
        num_kernels=3,
        num_calls=_INT8_PRODUCT_CALLS,
    )


def _round_int8(args: Arguments, result: Any) -> Work:
    """bitsandbytes/backends/cuda/ops.py: columns beyond the threshold are looked for, and the host
    waits to hear how many there are."""
    read = sum_bytes(list_tensors(args["A"]))
    is_split = bool(args.get("threshold"))
    return Work(
        MEMORY_BOUND,
        num_bytes=(4 if is_split else 1) * read + sum_bytes(list_tensors(result)),
        num_kernels=7 if is_split else 1,
        num_calls=_INT8_SPLIT_CALLS if is_split else 1,
        waits=is_split,
    )


def _unpack(args: Arguments, result: Any) -> Work:
    written = list(list_tensors(result)) or list(list_tensors(args.get("out")))
    num_bytes = sum_bytes(list_tensors(args["A"])) + sum_bytes(written)
    return Work(DEQUANTIZE, shape=(sum(x.numel() for x in written),), num_bytes=num_bytes)


def _multiply_4bit(args: Arguments, result: Any) -> Work:
    """Unpacked, then multiplied: its scratch is the unpacked matrix."""
    left, (n, k) = args["A"], args["shapeB"]
    m = prod(left.shape[:-1])
    return Work(
        MATMUL,
        dtype=name_dtype(left.dtype),
        shape=(m, n, k, 1, 1),
        flops=2.0 * m * n * k,
        num_bytes=sum_bytes(list_tensors(tuple(args.values()))) + sum_bytes(list_tensors(result)),
        num_kernels=3,
        num_calls=_GEMM_4BIT_CALLS,
    )


_GEMM_4BIT_CALLS = 12
"""bitsandbytes' Python around one packed product likewise: 0.3 to 0.5 ms on one H200's host."""


# Attention


def _attend(args: Arguments, result: Any) -> Work:
    query, key, value = args["query"], args["key"], args["value"]
    batch, heads, num_queries, width = query.shape
    pairs = float(batch * heads * num_queries * key.shape[-2])
    is_back = "grad_out" in args or "grad_out_" in args
    per_pair = 2.0 * (width + value.shape[-1])
    if is_back:  # the scores again, then the gradients of values, weights, queries and keys
        per_pair = 2.0 * (3 * width + 2 * value.shape[-1])
    return Work(
        ATTENTION,
        dtype=name_dtype(query.dtype),
        shape=(width, num_queries, int(bool(args.get("is_causal"))), int(is_back)),
        flops=per_pair * pairs,
        num_bytes=sum_bytes(list_tensors(tuple(args.values()))) + sum_bytes(list_tensors(result)),
        num_kernels=3 if is_back else 1,
    )


def _attend_documents(args: Arguments, result: Any) -> Work:
    """Documents of unequal length in one row; only their ends tell how many pairs there are.

    The kernel is as fast as with documents of their mean length: the longest keep few of its
    blocks busy.
    """
    query = args["query"]
    num_tokens, heads, width = query.shape
    ends = shadow_of(args["cu_seq_q"])
    if ends is None:  # as if they were equally long
        num_documents = max(1, args["cu_seq_q"].shape[0] - 1)
        lengths = [num_tokens / num_documents] * num_documents
    else:
        with _disable_current_modes():
            lengths = ends.diff().double().tolist()
    squares, total = sum(x * x for x in lengths), max(1.0, sum(lengths))
    pairs = heads * squares * (num_tokens / total)
    is_back = "grad_out" in args
    return Work(
        ATTENTION,
        dtype=name_dtype(query.dtype),
        shape=(width, max(1, round(total / len(lengths))), _is_causal(args), int(is_back)),
        flops=(10.0 if is_back else 4.0) * pairs * width,
        num_bytes=sum_bytes(list_tensors(tuple(args.values()))) + sum_bytes(list_tensors(result)),
        num_kernels=3 if is_back else 1,
    )


def _is_causal(args: Arguments) -> int:
    """torch 2.11 takes a window whose right side is 0 for it."""
    window = args.get("window_size") or (-1, -1)
    return int(bool(args.get("is_causal")) or window[-1] == 0)


# Optimizers


def _update_fused(args: Arguments, _result: Any) -> Work:
    params = args["self"]
    lists = [args[name] for name in ("grads", "exp_avgs", "exp_avg_sqs")]
    num_bytes = 2 * sum_bytes(list_tensors((params, *lists[1:]))) + sum_bytes(lists[0])
    count = len(params)
    return Work(
        OPTIMIZER,
        dtype=name_dtype(params[0].dtype) if params else "",
        shape=(sum(x.numel() for x in params),),
        num_bytes=num_bytes,
        num_kernels=1 + count / TENSORS_PER_KERNEL,
        num_tensors=count,
    )


def _update_8bit(args: Arguments, _result: Any) -> Work:
    kept = [args[name] for name in ("g", "p", "state1", "state2") if args.get(name) is not None]
    return Work(
        OPTIMIZER,
        dtype="int8",
        shape=(args["p"].numel(),),
        num_bytes=2 * sum_bytes(kept),
        num_calls=_8BIT_UPDATE_CALLS,
        waits=True,
    )


_8BIT_UPDATE_CALLS = 7
"""What bitsandbytes' Python does for each tensor beside the kernel, in operations' worth: 0.2 ms a
tensor on one H200's host. It waits for every tensor's kernel (optim/optimizer.py, `sync_gpu`)."""


COMPUTING: dict[str, Callable[[Arguments, Any], Work]] = {
    "aten::mm": _multiply,
    "aten::addmm": _multiply,
    "aten::_addmm_activation": _multiply,
    "aten::addmm.out": _multiply,
    "aten::mm.out": _multiply,
    ADDED_PRODUCT: _add_product,
    "aten::bmm": _multiply_batch,
    "aten::baddbmm": _multiply_batch,
    "aten::_scaled_mm": _multiply_fp8,
    "bitsandbytes::int8_scaled_mm": _multiply_int8,
    "bitsandbytes::int8_mixed_scaled_mm": _multiply_int8,
    "bitsandbytes::int8_linear_matmul": _multiply_int8,
    "bitsandbytes::int8_vectorwise_quant": _round_int8,
    "bitsandbytes::int8_double_quant": _round_int8,
    "bitsandbytes::dequantize_4bit": _unpack,
    "bitsandbytes::dequantize_4bit.out": _unpack,
    "bitsandbytes::gemm_4bit": _multiply_4bit,
    "bitsandbytes::optimizer_update_8bit_blockwise": _update_8bit,
    "aten::_scaled_dot_product_cudnn_attention": _attend,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attend,
    "aten::_scaled_dot_product_flash_attention": _attend,
    "aten::_scaled_dot_product_flash_attention_backward": _attend,
    "aten::_scaled_dot_product_efficient_attention": _attend,
    "aten::_scaled_dot_product_efficient_attention_backward": _attend,
    "torch_attn::_varlen_attn": _attend_documents,
    "torch_attn::_varlen_attn_backward": _attend_documents,
    "aten::_fused_adamw_": _update_fused,
    "aten::_fused_adam_": _update_fused,
}
