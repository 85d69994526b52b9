"""From a call of an operation to its work. Uses torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Any

from torch import Tensor

from tightfit.estimate.trace.op_products import COMPUTING
from tightfit.estimate.trace.op_work import (
    TENSORS_PER_KERNEL,
    Arguments,
    Work,
    count_indexed,
    list_tensors,
    sum_bytes,
)
from tightfit.estimate.trace.operations import COMMUNICATION, HOST, MEMORY_BOUND, SHARD


def describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """The work of one call."""
    name: str = func.name()
    if is_host_only(func):
        return NOTHING
    space = name.split("::", 1)[0]
    if space in ("c10d", "_c10d_functional"):
        around = SHARD if space == "c10d" else ""
        return Work(COMMUNICATION, num_bytes=sum_bytes(list_tensors(args)), around=around)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(_bind(func, args, kwargs), result)
    if name.startswith("aten::_foreach_") or name in _LISTS:
        return _describe_lists(func, args, kwargs, result)
    return _describe_moving(func, args, kwargs, result)


NOTHING = Work(HOST, num_kernels=0.0)
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh")
_LISTS = ("fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "aten::split_with_sizes_copy.out")


@lru_cache(maxsize=4096)
def is_host_only(func: Any) -> bool:
    """Views, and memory that nothing is written to."""
    if func.name().removeprefix("aten::").split(".")[0] in _EMPTY:
        return True
    aliases = [told.alias_info for told in func._schema.returns]
    return any(told is not None and not told.is_write for told in aliases)


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


# Kernels that move data


def _describe_moving(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Arguments are read, results written; what is changed in place is both."""
    outputs = list(list_tensors(result))
    inputs = list(list_tensors((args, kwargs)))
    changed = outputs or list(_list_written(func, args, kwargs))
    read, written = sum_bytes(inputs), sum_bytes(changed)
    if not outputs and not written:
        return NOTHING if not read else Work(MEMORY_BOUND, num_bytes=read)
    shapes = [tuple(x.shape) for x in (*outputs, *list_tensors(args)) if x.dim()]
    widest = max(shapes, key=prod, default=())
    has_own_loop = func.name().startswith(_BY_ROWS)
    indexed = 0.0 if has_own_loop else _count_indexed(changed, inputs)
    return Work(MEMORY_BOUND, shape=widest, num_bytes=read + written, num_indexed=indexed)


def _soften(args: Arguments, result: Any) -> Work:
    """SDPA's softmax for rows that may be hidden whole, which are looked for and filled with zeros.

    softmax, isneginf, all, where. Source: torch's transformers/attention.cpp, `_safe_softmax`.
    """
    read, written = sum_bytes(list_tensors(args["self"])), sum_bytes((result,))
    flags = float(result.numel())  # a byte each
    return Work(
        MEMORY_BOUND,
        shape=tuple(result.shape),
        num_bytes=2 * read + 3 * written + 2 * flags,
        num_kernels=4.0,
        num_calls=4.0,
    )


def _soften_backward(args: Arguments, result: Any) -> Work:
    """The product of gradient and result is written out first (SoftMax.cu)."""
    read = sum_bytes(list_tensors((args["grad_output"], args["output"])))
    written = sum_bytes(list_tensors(result))
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
"""Kernels with loops of their own, whose operands need not be alike."""


def _count_indexed(outputs: list[Tensor], inputs: list[Tensor]) -> float:
    """Of one kernel with one output; a sum reads more than it writes, in a loop of its own."""
    if len(outputs) != 1:
        return 0.0
    (output,) = outputs
    if any(tensor.numel() > output.numel() for tensor in inputs):
        return 0.0
    return count_indexed(inputs, output)


def _list_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    bound = _bind(func, args, kwargs)
    for argument in func._schema.arguments:
        told = argument.alias_info
        if told is not None and told.is_write:
            yield from list_tensors(bound.get(argument.name))


def _describe_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """`_foreach_*`: a kernel for every few dozens of tensors."""
    bound = _bind(func, args, kwargs)
    count = max((len(x) for x in bound.values() if isinstance(x, list | tuple)), default=1)
    has_out = "out" in bound
    out = bound.pop("out", ())  # written, not read
    num_bytes = sum_bytes(list_tensors(bound)) + sum_bytes(list_tensors((out, result)))
    if not has_out and not list(list_tensors(result)):
        num_bytes += sum_bytes(_list_written(func, args, kwargs))
    kernels = 1 + count / TENSORS_PER_KERNEL
    return Work(MEMORY_BOUND, num_bytes=num_bytes, num_kernels=kernels, num_tensors=count)


def describe_launch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """A triton kernel: each tensor that it is given goes through memory once."""
    given = {id(x): x for x in list_tensors((args, kwargs))}
    return Work(MEMORY_BOUND, num_bytes=sum_bytes(given.values()))


def _write(tensors: Callable[[Arguments, Any], Any], num_kernels: int = 1) -> Any:
    """Only these are touched, once."""

    def work(args: Arguments, result: Any) -> Work:
        found = list(list_tensors(tensors(args, result)))
        shape = max((tuple(x.shape) for x in found), key=prod, default=())
        return Work(MEMORY_BOUND, shape=shape, num_bytes=sum_bytes(found), num_kernels=num_kernels)

    return work


def _copy(args: Arguments, _result: Any) -> Work:
    target, source = args["self"], args["src"]
    return Work(
        MEMORY_BOUND,
        shape=tuple(target.shape),
        num_bytes=sum_bytes((target, source)),
        num_indexed=count_indexed((source,), target),
    )


def _join(_args: Arguments, result: Any) -> Work:
    """Every value is looked for in the list."""
    moved = 2 * sum_bytes((result,))
    return Work(
        MEMORY_BOUND, shape=tuple(result.shape), num_bytes=moved, num_indexed=float(result.numel())
    )


def _copy_shards(args: Arguments, _result: Any) -> Work:
    """Into this rank's part of the buffer that is gathered."""
    given = args["all_gather_inputs"]
    moved = 2 * sum_bytes(list_tensors(given))
    return Work(MEMORY_BOUND, num_bytes=moved, num_tensors=len(given))


def _take_rows(_args: Arguments, result: Any) -> Work:
    """As many values are read as written."""
    return Work(MEMORY_BOUND, num_bytes=2 * sum_bytes(list_tensors(result)))


def _put_rows(args: Arguments, _result: Any) -> Work:
    """Values are read, and added to what stands there; positions are sorted first."""
    values = sum_bytes(list_tensors(args["values"]))
    return Work(MEMORY_BOUND, num_bytes=3 * values, num_kernels=_SORT_KERNELS)


_SORT_KERNELS = 6
"""Of a sort by keys and what follows it in Embedding.cu and Indexing.cu."""


def _add_embeddings(args: Arguments, result: Any) -> Work:
    moved = 2 * sum_bytes(list_tensors(args["grad_output"])) + sum_bytes(list_tensors(result))
    return Work(MEMORY_BOUND, num_bytes=moved, num_kernels=_SORT_KERNELS + 1)


def _widen(args: Arguments, result: Any) -> Work:
    """A part's gradient among zeros: all are written, then the part is copied."""
    part = args["grad_output"]
    moved = sum_bytes((result,)) + 2 * sum_bytes((part,))
    indexed = float(part.numel())
    return Work(MEMORY_BOUND, num_bytes=moved, num_indexed=indexed, num_kernels=2.0)


def _read_value(args: Arguments, _result: Any) -> Work:
    return Work(MEMORY_BOUND, num_bytes=sum_bytes(list_tensors(tuple(args.values()))), waits=True)


_SPECIAL: dict[str, Callable[[Arguments, Any], Work]] = COMPUTING | {
    "fsdp::all_gather_copy_in": _copy_shards,
    "aten::_safe_softmax": _soften,
    "aten::_softmax_backward_data": _soften_backward,
    "aten::copy_": _copy,
    "aten::cat": _join,
    "aten::zero_": _write(lambda args, _: args["self"]),
    "aten::fill_.Scalar": _write(lambda args, _: args["self"]),
    "aten::embedding": _take_rows,
    "aten::index.Tensor": _take_rows,
    "aten::index_select": _take_rows,
    "aten::gather": _take_rows,
    "aten::nll_loss_forward": _write(lambda args, _: args["target"]),
    "aten::nll_loss_backward": _write(lambda _, result: result, num_kernels=2),
    "aten::embedding_dense_backward": _add_embeddings,
    "aten::slice_backward": _widen,
    "aten::select_backward": _widen,
    "aten::index_put_": _put_rows,
    "aten::_index_put_impl_": _put_rows,
    "aten::_local_scalar_dense": _read_value,
    "aten::nonzero": _read_value,
}
