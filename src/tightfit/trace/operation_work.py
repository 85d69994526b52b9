"""The work of each traced operation (FLOPs, bytes, kernels), and the collector that logs a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.hardware.types import FP8, FP8_EXACT
from tightfit.trace.concrete_values import get_concrete_value
from tightfit.trace.result import (
    ADAPTER,
    ADDED_PRODUCT,
    AGAIN,
    ATTENTION,
    COMMUNICATION,
    DEQUANTIZE,
    HOST,
    LOSS,
    MATMUL,
    MEMORY_BOUND,
    OPTIMIZER,
    RECOMPUTE,
    SHARD,
    UPDATE,
    Operation,
    OperationLog,
    RepeatedOperations,
    sum_up,
)

Arguments = dict[str, Any]
"""By the names of the operation's schema."""


TENSORS_PER_KERNEL = 36
"""MultiTensorApply.cuh: up to 110 tensors of one list, 36 of four; large ones come in chunks."""


class Work(NamedTuple):
    """The work of one operation."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    flops: float = 0.0
    num_bytes: float = 0.0
    num_indexed: float = 0.0
    num_kernels: float = 1.0
    num_tensors: float = 1.0
    num_calls: float = 1.0
    around: str = ""
    waits: bool = False


_Describe = Callable[[Arguments, Any], Work]


def list_tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from list_tensors(value)
    elif isinstance(values, dict):
        yield from list_tensors(tuple(values.values()))


def count_indexed(inputs: Iterable[Tensor], output: Tensor) -> float:
    """Values that a kernel addresses one by one: operands of other shapes, layouts or widths.

    Torch's kernels vectorize loads and stores only where all operands have one layout; a
    cast from fp32 to 16 bit is the one that has a kernel of its own (CUDALoops.cuh, Copy.cu).
    """
    given = [tensor for tensor in inputs if tensor.dim()]
    has_one_layout = all(
        tensor.shape == output.shape and tensor.stride() == output.stride() for tensor in given
    )
    widths = {x.element_size() for x in (*given, output) if x.is_floating_point()}
    narrows = len(given) == 1 and given[0].element_size() > output.element_size()
    if has_one_layout and (len(widths) < 2 or narrows):
        return 0.0
    return float(output.numel())


def sum_bytes(*values: Any) -> float:
    """Bytes to read of all tensors in these values: an expanded dimension repeats the same ones."""
    return float(
        sum(
            prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step)
            * x.element_size()
            for x in list_tensors(values)
        )
    )


def name_dtype(dtype: torch.dtype) -> str:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return short.get(dtype) or str(dtype).removeprefix("torch.")


# Matrix products, attention, dequantization and optimizers


def _multiply(args: Arguments, result: Any) -> Work:
    """A product, or a batch of them; a bias or a tensor to add to comes first, as `self`."""
    left = next(args[name] for name in ("batch1", "mat1", "self") if name in args)
    right = next(args[name] for name in ("batch2", "mat2") if name in args)
    (m, k), n = left.shape[-2:], right.shape[-1]
    times = prod(left.shape[:-2])
    return Work(
        MATMUL,
        dtype=name_dtype(left.dtype),
        shape=(m, n, k, times),
        flops=2.0 * m * n * k * times,
        num_bytes=sum_bytes(left, right, result),
        num_indexed=sum(
            x.numel() for x in (left, right, *list_tensors(result)) if _is_unaligned(x)
        ),
    )


ROW_BYTES = 16
"""Rows must begin at multiples of it for tensor cores to run at full speed. Source: cuBLAS
documentation, "Tensor Core Usage"."""


def _is_unaligned(matrix: Any) -> bool:
    """Whether rows begin at addresses that rule out vectorized loads."""
    widest = max(matrix.stride()[-2:])
    return bool(matrix.element_size() < 4 and widest * matrix.element_size() % ROW_BYTES)


def _add_product(args: Arguments, result: Any) -> Work:
    """The tensor that the product is added to is read as well as written."""
    work = _multiply(args, result)
    return work._replace(num_bytes=work.num_bytes + sum_bytes(result))


def _multiply_groups(args: Arguments, result: Any) -> Work:
    """Rows of each expert times its matrix, or, for a matrix's gradient, within each group."""
    left = args["input"] if "input" in args else args["self"]
    right = args["weight"] if "weight" in args else args["mat2"]
    rows, inner = left.shape[-2:]
    num_groups = (right if right.dim() == 3 else result).shape[0]
    m, k = (rows / num_groups, inner) if right.dim() == 3 else (rows, inner / num_groups)
    n = right.shape[-1]
    return Work(
        MATMUL,
        dtype=name_dtype(left.dtype),
        shape=(max(1, round(m)), n, max(1, round(k)), num_groups),
        flops=2.0 * rows * inner * n,
        num_bytes=sum_bytes(left, right, result),
    )


def _multiply_fp8(args: Arguments, result: Any) -> Work:
    """As any product; the scales, one per row, are not counted."""
    dtype = FP8 if args.get("use_fast_accum") else FP8_EXACT
    return _multiply(args, result)._replace(dtype=dtype, num_indexed=0)


_INT8_PRODUCT_CALLS = 8
_INT8_SPLIT_CALLS = 10
"""torch operations inside bitsandbytes' own, without outlier columns. Source: its
backends/cuda/ops.py and backends/default/ops.py, 0.50."""


def _multiply_int8(args: Arguments, result: Any) -> Work:
    """int8 activations times int8 weights into int32, then scaled; outliers are separate."""
    left = args["CA"] if "CA" in args else args["A"]
    right = args["CB"] if "CB" in args else args["B"]
    m, (n, k) = prod(left.shape[:-1]), right.shape
    written = sum_bytes(list(list_tensors(result))[:1])
    return Work(
        MATMUL,
        dtype="int8",
        shape=(m, n, k, 1),
        flops=2.0 * m * n * k,
        num_bytes=sum_bytes(left, right) + 8.0 * m * n + 3.0 * written,
        num_kernels=3,
        num_calls=_INT8_PRODUCT_CALLS,
    )


def _round_int8(args: Arguments, result: Any) -> Work:
    """bitsandbytes/backends/cuda/ops.py: looks for columns beyond the threshold, and the host waits
    for their number."""
    read = sum_bytes(args["A"])
    is_split = bool(args.get("threshold"))
    return Work(
        MEMORY_BOUND,
        num_bytes=(4 if is_split else 1) * read + sum_bytes(result),
        num_kernels=7 if is_split else 1,
        num_calls=_INT8_SPLIT_CALLS if is_split else 1,
        waits=is_split,
    )


def _dequantize(args: Arguments, result: Any) -> Work:
    written = list(list_tensors(result)) or list(list_tensors(args.get("out")))
    num_values = sum(x.numel() for x in written)
    return Work(DEQUANTIZE, shape=(num_values,), num_bytes=sum_bytes(args["A"], written))


def _multiply_4bit(args: Arguments, result: Any) -> Work:
    """Dequantized, then multiplied: the workspace is the dequantized matrix."""
    left, (n, k) = args["A"], args["shapeB"]
    m = prod(left.shape[:-1])
    return Work(
        MATMUL,
        dtype=name_dtype(left.dtype),
        shape=(m, n, k, 1, 1),
        flops=2.0 * m * n * k,
        num_bytes=sum_bytes(args, result),
        num_kernels=3,
        num_calls=_GEMM_4BIT_CALLS,
    )


_GEMM_4BIT_CALLS = 12
"""The same for bitsandbytes' Python around one 4-bit product: 0.3 to 0.5 ms on one H200's host."""


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
        num_bytes=sum_bytes(args, result),
        num_kernels=3 if is_back else 1,
    )


def _attend_flex(args: Arguments, result: Any) -> Work:
    """Pairs of a window count as half a square that has as many."""
    work = _attend({**args, "is_causal": True}, result)
    return work._replace(flops=work.flops * _square_share(args["query"].shape[2], args["window"]))


def _attend_window(args: Arguments, result: Any) -> Work:
    """FlashAttention over whole rows of `[rows, tokens, heads, width]`."""
    query, key, value = (args[name] for name in ("query", "key", "value"))
    batch, tokens, heads, width = query.shape
    is_back = "grad_out" in args
    per_pair = (10.0 if is_back else 4.0) * width
    left = args.get("window_size_left")
    share = 1.0 if left is None else _square_share(tokens, min(left + 1, tokens))
    return Work(
        ATTENTION,
        dtype=name_dtype(query.dtype),
        shape=(width, tokens, 1, int(is_back)),
        flops=per_pair * batch * heads * tokens**2 * share,
        num_bytes=sum_bytes((query, key, value), result),
        num_kernels=3 if is_back else 1,
    )


def _square_share(tokens: int, window: int) -> float:
    """Pairs of a causal window, of those of a causal square."""
    return (2 * window * tokens - window**2) / tokens**2


def _attend_documents(args: Arguments, result: Any) -> Work:
    """Documents of unequal length in one row; the number of pairs follows from their ends.

    The kernel is as fast as with documents of their mean length: the longest keep few of its
    blocks busy.
    """
    query = args["query"]
    num_tokens, heads, width = query.shape
    ends = get_concrete_value(args["cu_seq_q"])
    if ends is None:  # assume equal lengths
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
        num_bytes=sum_bytes(args, result),
        num_kernels=3 if is_back else 1,
    )


def _is_causal(args: Arguments) -> int:
    """torch 2.11 expresses causal attention as a window whose right side is 0."""
    window = args.get("window_size") or (-1, -1)
    return int(bool(args.get("is_causal")) or window[-1] == 0)


# Optimizers


def _update_fused(args: Arguments, _result: Any) -> Work:
    params = args["self"]
    lists = [args[name] for name in ("grads", "exp_avgs", "exp_avg_sqs")]
    num_bytes = 2 * sum_bytes((params, *lists[1:])) + sum_bytes(lists[0])
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
"""bitsandbytes' Python per tensor, in units of one operation: 0.2 ms a tensor on one H200's host.
It waits for every tensor's kernel (optim/optimizer.py, `sync_gpu`)."""


# All other operations


def describe_operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Work:
    """The work of one call."""
    name: str = func.name()
    if is_host_only(func):
        return NO_WORK
    space = name.split("::", 1)[0]
    if space in ("c10d", "_c10d_functional"):
        around = SHARD if space == "c10d" else ""
        return Work(COMMUNICATION, num_bytes=sum_bytes(args), around=around)
    special = SPECIAL_WORK.get(name)
    if special is not None:
        return special(_bind(func, args, kwargs), result)
    if name.startswith("aten::_foreach_") or name in _LISTS:
        return _describe_lists(func, args, kwargs, result)
    return _describe_memory_bound(func, args, kwargs, result)


NO_WORK = Work(HOST, num_kernels=0.0)
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh")
_LISTS = ("fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "aten::split_with_sizes_copy.out")


@lru_cache(maxsize=4096)
def is_host_only(func: Any) -> bool:
    """Whether this is a view, or an allocation that nothing is written to."""
    if func.name().removeprefix("aten::").split(".")[0] in _EMPTY:
        return True
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


# Memory-bound kernels


def _describe_memory_bound(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Work:
    """Arguments are read and results written; tensors changed in place are both."""
    outputs = list(list_tensors(result))
    inputs = list(list_tensors((args, kwargs)))
    changed = outputs or list(_list_written(func, args, kwargs))
    read, written = sum_bytes(inputs), sum_bytes(changed)
    if not outputs and not written:
        return NO_WORK if not read else Work(MEMORY_BOUND, num_bytes=read)
    shapes = [tuple(x.shape) for x in (*outputs, *list_tensors(args)) if x.dim()]
    widest = max(shapes, key=prod, default=())
    has_own_loop = func.name().startswith(_BY_ROWS)
    indexed = 0.0 if has_own_loop else _count_indexed(changed, inputs)
    return Work(MEMORY_BOUND, shape=widest, num_bytes=read + written, num_indexed=indexed)


def _safe_softmax(args: Arguments, result: Any) -> Work:
    """SDPA's softmax, which finds fully masked rows and fills them with zeros.

    softmax, isneginf, all, where. Source: torch's transformers/attention.cpp, `_safe_softmax`.
    """
    read, written = sum_bytes(args["self"]), sum_bytes(result)
    flags = float(result.numel())  # a byte each
    return Work(
        MEMORY_BOUND,
        shape=tuple(result.shape),
        num_bytes=2 * read + 3 * written + 2 * flags,
        num_kernels=4.0,
        num_calls=4.0,
    )


def _softmax_backward(args: Arguments, result: Any) -> Work:
    """The product of gradient and result is written out first (SoftMax.cu)."""
    read = sum_bytes(args["grad_output"], args["output"])
    written = sum_bytes(result)
    return Work(
        MEMORY_BOUND,
        shape=tuple(args["output"].shape),
        num_bytes=2 * read + 2 * written,
        num_kernels=2.0,
    )


_BY_ROWS = tuple(
    f"aten::{name}"
    for name in (
        *("_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm"),
        *("native_dropout", "native_group_norm"),
    )
)
"""Kernels with loops of their own, whose operands may have different layouts."""


def _count_indexed(outputs: list[Tensor], inputs: list[Tensor]) -> float:
    """Of an elementwise kernel with one output; reductions read more than they write."""
    if len(outputs) != 1:
        return 0.0
    (output,) = outputs
    if any(tensor.numel() > output.numel() for tensor in inputs):
        return 0.0
    return count_indexed(inputs, output)


def _list_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    bound = _bind(func, args, kwargs)
    for argument in func._schema.arguments:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            yield from list_tensors(bound.get(argument.name))


def _describe_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """`_foreach_*`: one kernel per few dozen tensors."""
    bound = _bind(func, args, kwargs)
    count = max((len(x) for x in bound.values() if isinstance(x, list | tuple)), default=1)
    has_out = "out" in bound
    out = bound.pop("out", ())  # written, not read
    num_bytes = sum_bytes(bound) + sum_bytes((out, result))
    if not has_out and not list(list_tensors(result)):
        num_bytes += sum_bytes(list(_list_written(func, args, kwargs)))
    kernels = 1 + count / TENSORS_PER_KERNEL
    return Work(MEMORY_BOUND, num_bytes=num_bytes, num_kernels=kernels, num_tensors=count)


def describe_launch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """A triton kernel: each tensor argument goes through memory once."""
    given = {id(x): x for x in list_tensors((args, kwargs))}
    return Work(MEMORY_BOUND, num_bytes=sum_bytes(list(given.values())))


def _write(tensors: Callable[[Arguments, Any], Any], num_kernels: int = 1) -> _Describe:
    """Work of a kernel that reads or writes only these tensors, once."""

    def work(args: Arguments, result: Any) -> Work:
        found = list(list_tensors(tensors(args, result)))
        shape = max((tuple(x.shape) for x in found), key=prod, default=())
        return Work(MEMORY_BOUND, shape=shape, num_bytes=sum_bytes(found), num_kernels=num_kernels)

    return work


def _move(num_bytes: Callable[[Arguments, Any], float], num_kernels: int = 1) -> _Describe:
    """Work of a kernel that moves so many bytes."""
    return lambda args, result: Work(
        MEMORY_BOUND, num_bytes=num_bytes(args, result), num_kernels=num_kernels
    )


_SORT_KERNELS = 6
"""Of a sort by keys and the sums after it in Embedding.cu and Indexing.cu."""
_take_rows = _move(lambda _, result: 2 * sum_bytes(result))
"""Reads as many values as it writes."""
_put_rows = _move(lambda args, _: 3 * sum_bytes(args["values"]), _SORT_KERNELS)
"""Reads values and adds them to the destination; positions are sorted first."""


def _copy(args: Arguments, _result: Any) -> Work:
    target, source = args["self"], args["src"]
    return Work(
        MEMORY_BOUND,
        shape=tuple(target.shape),
        num_bytes=sum_bytes(target, source),
        num_indexed=count_indexed((source,), target),
    )


def _cat(_args: Arguments, result: Any) -> Work:
    """Every value looks up its source in the list."""
    return Work(
        MEMORY_BOUND,
        shape=tuple(result.shape),
        num_bytes=2 * sum_bytes(result),
        num_indexed=float(result.numel()),
    )


def _copy_shards(args: Arguments, _result: Any) -> Work:
    """Copies into this rank's part of the all-gather buffer."""
    given = args["all_gather_inputs"]
    return Work(MEMORY_BOUND, num_bytes=2 * sum_bytes(given), num_tensors=len(given))


def _slice_backward(args: Arguments, result: Any) -> Work:
    """The gradient of a slice: zeros are written, then the slice is copied into them."""
    part = args["grad_output"]
    moved = sum_bytes(result) + 2 * sum_bytes(part)
    return Work(MEMORY_BOUND, num_bytes=moved, num_indexed=float(part.numel()), num_kernels=2.0)


def _read_value(args: Arguments, _result: Any) -> Work:
    return Work(MEMORY_BOUND, num_bytes=sum_bytes(args), waits=True)


SPECIAL_WORK: dict[str, _Describe] = {
    "aten::mm": _multiply,
    "aten::addmm": _multiply,
    "aten::_addmm_activation": _multiply,
    "aten::addmm.out": _multiply,
    "aten::mm.out": _multiply,
    ADDED_PRODUCT: _add_product,
    "aten::bmm": _multiply,
    "aten::baddbmm": _multiply,
    "aten::_grouped_mm": _multiply_groups,
    "transformers::grouped_mm_fallback": _multiply_groups,
    "aten::_scaled_mm": _multiply_fp8,
    "bitsandbytes::int8_scaled_mm": _multiply_int8,
    "bitsandbytes::int8_mixed_scaled_mm": _multiply_int8,
    "bitsandbytes::int8_linear_matmul": _multiply_int8,
    "bitsandbytes::int8_vectorwise_quant": _round_int8,
    "bitsandbytes::int8_double_quant": _round_int8,
    "bitsandbytes::dequantize_4bit": _dequantize,
    "bitsandbytes::dequantize_4bit.out": _dequantize,
    "bitsandbytes::gemm_4bit": _multiply_4bit,
    "bitsandbytes::optimizer_update_8bit_blockwise": _update_8bit,
    "aten::_scaled_dot_product_cudnn_attention": _attend,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attend,
    "aten::_scaled_dot_product_flash_attention": _attend,
    "aten::_scaled_dot_product_flash_attention_backward": _attend,
    "aten::_scaled_dot_product_efficient_attention": _attend,
    "aten::_scaled_dot_product_efficient_attention_backward": _attend,
    "tightfit::flex_attention": _attend_flex,
    "tightfit::flex_attention_backward": _attend_flex,
    "aten::_flash_attention_forward": _attend_window,
    "aten::_flash_attention_backward": _attend_window,
    "torch_attn::_varlen_attn": _attend_documents,
    "torch_attn::_varlen_attn_backward": _attend_documents,
    "aten::_fused_adamw_": _update_fused,
    "aten::_fused_adam_": _update_fused,
    "fsdp::all_gather_copy_in": _copy_shards,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::copy_": _copy,
    "aten::cat": _cat,
    "aten::zero_": _write(lambda args, _: args["self"]),
    "aten::fill_.Scalar": _write(lambda args, _: args["self"]),
    "aten::embedding": _take_rows,
    "aten::index.Tensor": _take_rows,
    "aten::index_select": _take_rows,
    "aten::gather": _take_rows,
    "aten::nll_loss_forward": _write(lambda args, _: args["target"]),
    "aten::nll_loss_backward": _write(lambda _, result: result, num_kernels=2),
    "aten::embedding_dense_backward": _move(
        lambda args, result: 2 * sum_bytes(args["grad_output"]) + sum_bytes(result),
        _SORT_KERNELS + 1,
    ),
    "aten::slice_backward": _slice_backward,
    "aten::select_backward": _slice_backward,
    "aten::index_put_": _put_rows,
    "aten::_index_put_impl_": _put_rows,
    "aten::_local_scalar_dense": _read_value,
    "aten::nonzero": _read_value,
}


# The log of one step

_OF_TRACING = ("prim", "profiler")
"""Namespaces of operations that exist only in a trace: fake tensor queries, profiler marks."""
_FIRST_OF_ADAPTER = ".lora_A."
"""Part of the name of the module that a LoRA layer calls first."""


class OperationContext(NamedTuple):
    """When and where an operation runs."""

    step: int
    stage: str
    layer: int | None
    module: str


class OperationCollector:
    """Collects the operations of each step and keeps those of the last."""

    def __init__(self, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.problem = ""
        """The operation that was not understood; there is no log then."""
        self._start()

    def _start(self, step: int = 0) -> None:
        self._step, self._recomputed_layer = step, -1
        self._indices: dict[Any, int] = {}
        self._table: list[Operation] = []
        self._runs: list[tuple[int | None, list[int]]] = [(None, [])]
        self._update: list[Operation] = []

    def note(self, context: OperationContext, call: tuple[Any, Any, Any, Any]) -> None:
        """Record one call: the operation, its positional and keyword arguments, and its result."""
        func, args, kwargs, result = call
        if not context.step or func.namespace in _OF_TRACING or self.problem:
            return
        try:
            work = describe_operation(func, args, kwargs, result)
        except Exception as error:  # the memory trace goes on without a time
            self.problem = f"{func.name()}: {type(error).__name__}"
            return
        self.add(context, func.name(), work)

    def add(self, context: OperationContext, name: str, work: Work) -> None:
        step, stage, layer, _ = context
        if not step:
            return
        if step != self._step:
            self._start(step)
        work = work._replace(around=self._find_python(context, name, work) or work.around)
        if work.shape and work.kind == MEMORY_BOUND:
            # Kernels over the vocabulary have a rate of their own: a row exceeds a thread block.
            kind = LOSS if work.shape[-1] == self._vocab_size and stage != UPDATE else work.kind
            work = work._replace(kind=kind, shape=())
        if stage == UPDATE:
            is_reading = work.waits and work.kind != OPTIMIZER
            if is_reading and any(one.waits for one in self._update):
                work = NO_WORK  # step counters, which foreach optimizers keep in host memory
            self._update.append(_make_operation(name, stage, work))
            return
        key = (name, stage, work)
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._table)
            self._table.append(_make_operation(name, stage, work))
        if layer is not None and layer != self._runs[-1][0]:
            self._runs.append((layer, []))
        self._runs[-1][1].append(index)

    def position(self) -> tuple[int, int]:
        """Position of the next operation: the number of its run, and its index in the run."""
        return len(self._runs) - 1, len(self._runs[-1][1])

    def repeat(self, since: tuple[int, int], times: int) -> bool:
        """Repeat the operations since that position `times` more. Returns False and does nothing
        where they began in another layer than the one that is running now."""
        number, index = since
        layer, indices = self._runs[number]
        if layer != self._runs[-1][0]:
            return False
        first = indices[index:]
        others = [(in_layer, list(called)) for in_layer, called in self._runs[number + 1 :]]
        for _ in range(times):
            self._runs[-1][1].extend(first)
            self._runs.extend((in_layer, list(called)) for in_layer, called in others)
        return True

    def _find_python(self, context: OperationContext, name: str, work: Work) -> str:
        if (
            context.stage == RECOMPUTE
            and context.layer is not None
            and context.layer != self._recomputed_layer
        ):
            self._recomputed_layer = context.layer
            return AGAIN
        is_first = work.kind == MATMUL and _FIRST_OF_ADAPTER in context.module
        return ADAPTER if is_first or name == ADDED_PRODUCT else ""

    def finish(self) -> OperationLog | None:
        """The log; None where an operation was not understood, or no step was run."""
        if self.problem or not self._step:
            return None
        update = sum_up(self._update)
        first = len(self._table)
        runs = [
            RepeatedOperations(layer=layer, operations=tuple(indices))
            for layer, indices in self._runs
            if indices
        ]
        if update:
            indices = tuple(range(first, first + len(update)))
            runs.append(RepeatedOperations(operations=indices))
        return OperationLog(operations=(*self._table, *update), stretches=tuple(runs))


def _make_operation(name: str, stage: str, work: Work) -> Operation:
    return Operation(name=name, stage=stage, **work._asdict())
