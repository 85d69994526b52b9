"""Work: what one operation does, and how much its tensors hold. Uses torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[str, Any]
"""By the names of the operation's schema."""


TENSORS_PER_KERNEL = 36
"""MultiTensorApply.cuh: up to 110 tensors of one list, 36 of four; large ones come in chunks."""


class Work(NamedTuple):
    """An operation without its place in the step."""

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


def list_tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from list_tensors(value)
    elif isinstance(values, dict):
        yield from list_tensors(tuple(values.values()))


def _bytes(tensor: Tensor) -> int:
    """What there is to read: an expanded dimension is the same values again."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in steps if step) * tensor.element_size()


def count_indexed(inputs: Iterable[Tensor], output: Tensor) -> float:
    """Values that a kernel finds one by one: operands of other shapes, layouts or widths.

    Torch's kernels read and write several values at once only where all operands lie alike; a
    cast from fp32 to 16 bit is the one that has a kernel of its own (CUDALoops.cuh, Copy.cu).
    """
    given = [tensor for tensor in inputs if tensor.dim()]
    lies_alike = all(
        tensor.shape == output.shape and tensor.stride() == output.stride() for tensor in given
    )
    widths = {x.element_size() for x in (*given, output) if x.is_floating_point()}
    narrows = len(given) == 1 and given[0].element_size() > output.element_size()
    if lies_alike and (len(widths) < 2 or narrows):
        return 0.0
    return float(output.numel())


def sum_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(_bytes(tensor) for tensor in tensors))


def name_dtype(dtype: torch.dtype) -> str:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return short.get(dtype) or str(dtype).removeprefix("torch.")
