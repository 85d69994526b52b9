"""What a card's kernels allocate beyond their results, which fake CPU tensors do not show."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tightfit.estimate.trace import habits_attention_scratch as attention
from tightfit.estimate.trace import habits_scratch as other
from tightfit.estimate.trace.habits_attention import CardAttention
from tightfit.estimate.trace.habits_backend import Capability, Software, default_cudnn
from tightfit.estimate.trace.habits_functions import functions_of_card
from tightfit.estimate.trace.habits_reduce import find_multiprocessors, reduce_scratch

_MIB = 2**20
_UNKNOWN_CARD = (8, 0)
"""Cards of other makers have flash and efficient kernels of the same shapes (AOTriton)."""
_LARGE_WORKSPACE_BYTES = 32 * _MIB
_SMALL_WORKSPACE_BYTES = 2 * 4 * _MIB + 8 * 16 * 2**10
"""`:4096:2:16:8` of CUBLAS_WORKSPACE_CONFIG."""
_LT_WORKSPACE_BYTES = _MIB

_MATMULS = frozenset(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "_addmm_activation",
    )
) | {"bitsandbytes::gemm_4bit"}
_LT_MATMULS = frozenset({"aten::addmm", "aten::_addmm_activation"})

_REDUCTIONS = {
    "aten::sum": 1,
    "aten::sum.dim_IntList": 1,
    "aten::mean": 1,
    "aten::mean.dim": 1,
    "aten::linalg_vector_norm": 2,
}
"""With the place of the dimensions among the arguments."""

_BEFORE_RESULTS = frozenset(
    {
        "bitsandbytes::gemm_4bit",
        "bitsandbytes::int8_scaled_mm",
        "bitsandbytes::int8_mixed_scaled_mm",
        "aten::_safe_softmax",
        "aten::_foreach_norm.Scalar",
        "aten::index.Tensor",
    }
)

_HALF = (torch.float16, torch.bfloat16)

_SECOND_FIRST = frozenset(
    f"bitsandbytes::{name}"
    for name in ("quantize_4bit", "quantize_blockwise", "int8_vectorwise_quant")
)
"""Kernels that allocate the scales before the codes, which they return first
(backends/cuda/ops.py)."""

_Scratch = Callable[[tuple[Any, ...], dict[str, Any]], list[int]]


class CardHabits:
    """Memory of one card's kernels, by operation. One for each recording."""

    def __init__(
        self,
        compute_capability: Capability | None = None,
        torch_version: str | None = None,
        cudnn_version: int | None = None,
        num_multiprocessors: int | None = None,
    ) -> None:
        """Versions are this machine's where they are not given, multiprocessors the usual."""
        self._card = compute_capability or _UNKNOWN_CARD
        numbers = (torch_version or torch.__version__).split(".")
        self._torch = (int(numbers[0]), int(numbers[1]))
        if cudnn_version is None:
            cudnn_version = _find_cudnn() or default_cudnn(self._torch)
        self._software = Software(torch=self._torch, cudnn=cudnn_version)
        self._multiprocessors = find_multiprocessors(self._card, num_multiprocessors)
        self._scratch = self._collect()
        self._standing: set[tuple[str, str]] = set()

    def scratch_bytes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Blocks that the kernel takes while it runs."""
        measure = self._scratch.get(func.name())
        return [] if measure is None else measure(args, kwargs)

    def takes_scratch_first(self, func: Any) -> bool:
        """Whether scratch is allocated before the results, not after."""
        return func.name() in _BEFORE_RESULTS

    def as_made(self, func: Any, result: Any) -> Any:
        """Results of an operation as the card makes them, where a CPU's are of another type.

        layer_norm_kernel.cu keeps the statistics of half precision in fp32 (`acc_type`).
        """
        if func.name() != "aten::native_layer_norm" or result[0].dtype not in _HALF:
            return result
        return (result[0], *(torch.empty_like(x, dtype=torch.float32) for x in result[1:]))

    def order_results(self, func: Any, results: list[Any]) -> list[Any]:
        """An operation's results in the order in which they are allocated."""
        if func.name() in _SECOND_FIRST:
            return [*results[1::-1], *results[2:]]
        return results

    def standing_bytes(self, func: Any, args: tuple[Any, ...], thread: str) -> list[int]:
        """Blocks that this call makes and that stay for good: cuBLAS workspaces.

        CublasHandlePool.cpp keeps one for every handle and stream, and a handle for every
        thread: the one that runs the forward pass and autograd's. From 2.14 on every product
        takes its own and gives it back (PR 194311).
        """
        if self._torch >= (2, 14) or func.name() not in _MATMULS:
            return []
        wanted = [("cublas", self.workspace_bytes)]
        if self._torch < (2, 12) and _is_biased(func, args):
            # Until PR 175879 cuBLASLt, which adds biases, had a workspace of its own.
            wanted.append(("cublaslt", _LT_WORKSPACE_BYTES))
        new = [(name, size) for name, size in wanted if (name, thread) not in self._standing]
        self._standing.update((name, thread) for name, _ in new)
        return [size for _, size in new]

    def functions(self) -> AbstractContextManager[None]:
        """While inside, torch runs on fake CPU tensors what it would run on the card."""
        return functions_of_card(CardAttention(self._card, self._software))

    @property
    def workspace_bytes(self) -> int:
        """`parseChosenWorkspaceSize`: 32 MiB on Hopper, from 2.12 on Blackwell too (PR 175344)."""
        large = (9,) if self._torch < (2, 12) else (9, 10, 11, 12)
        return _LARGE_WORKSPACE_BYTES if self._card[0] in large else _SMALL_WORKSPACE_BYTES

    def _collect(self) -> dict[str, _Scratch]:
        """By the operation's name, since not all are registered from the start."""
        card = self._card
        found: dict[str, _Scratch] = {
            "aten::_scaled_dot_product_flash_attention_backward": _plain(attention.flash_backward),
            "aten::_scaled_dot_product_cudnn_attention_backward": _plain(attention.cudnn_backward),
            "aten::_scaled_dot_product_efficient_attention": _plain(attention.efficient_forward),
            "aten::_scaled_dot_product_efficient_attention_backward": _plain(
                lambda args: attention.efficient_backward(args, card)
            ),
            "torch_attn::_varlen_attn_backward": _plain(attention.varlen_backward),
            "aten::_safe_softmax": _plain(attention.safe_softmax),
            "aten::_softmax_backward_data": _plain(other.softmax_backward),
            "aten::embedding_dense_backward": _plain(other.embedding_backward),
            "aten::index.Tensor": _plain(other.index),
            "aten::_index_put_impl_": _plain(other.index_put),
            "aten::_foreach_norm.Scalar": _plain(other.foreach_norm),
            "bitsandbytes::gemm_4bit": other.multiply_4bit,
            "bitsandbytes::int8_scaled_mm": other.multiply_int8,
            "bitsandbytes::int8_mixed_scaled_mm": other.multiply_mixed_int8,
            "bitsandbytes::int8_vectorwise_quant": other.quantize_int8,
        }
        found |= {name: self._reducing(dims_at) for name, dims_at in _REDUCTIONS.items()}
        if self._torch >= (2, 14):
            workspace = [self.workspace_bytes]
            found |= {name: lambda _args, _kwargs: workspace for name in _MATMULS - set(found)}
        return found

    def _reducing(self, dims_at: int) -> _Scratch:
        card = self._multiprocessors
        return lambda args, kwargs: reduce_scratch(args, kwargs, card, dims_at=dims_at)


def _plain(measure: Callable[[tuple[Any, ...]], list[int]]) -> _Scratch:
    return lambda args, _kwargs: measure(args)


def _is_biased(func: Any, args: tuple[Any, ...]) -> bool:
    """Blas.cpp: cuBLASLt takes products to which a vector is added."""
    return func.name() in _LT_MATMULS and args[0].dim() == 1


def _find_cudnn() -> int | None:
    """This machine's, if its torch is built for cards."""
    if torch.version.cuda is None:
        return None
    found: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found
