"""GPU emulation: torch on fake CPU tensors allocates and dispatches as it would on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer
from torch.utils import _foreach_utils

from tightfit.trace import kernel_workspace as kernels
from tightfit.trace.attention import Capability, GpuAttention, SoftwareVersions, find_default_cudnn

_WIDENED = (
    "exp",
    "log",
    "log1p",
    "reciprocal",
    "rsqrt",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "logsumexp",
    "cosine_similarity",
)
"""Operations that language models call and whose inputs CUDA's autocast casts to fp32."""
_GIVEN_DTYPE = (
    "softmax.int",
    "log_softmax.int",
    "cumsum",
    "sum",
    "sum.dim_IntList",
    "linalg_vector_norm",
)
"""Operations whose results are in fp32 unless the caller passes a dtype."""
_RMS_NORM_SINCE = (2, 9)
"""The first torch whose CUDA autocast runs `rms_norm` in fp32 as well."""


@contextmanager
def autocast_as_cuda() -> Iterator[None]:
    """`torch.autocast("cpu")` treats operations as `torch.autocast("cuda")` does."""
    make: Any = torch.library.Library  # not annotated
    library = make("aten", "IMPL")
    try:
        for name in (*_WIDENED, *_rms_norm()):
            library.impl(name, _widen(_find(name)), "AutocastCPU")
        for name in _GIVEN_DTYPE:
            library.impl(name, _ask_for_fp32(_find(name)), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _rms_norm() -> tuple[str, ...]:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return ("rms_norm",) if version >= _RMS_NORM_SINCE else ()


def _find(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _widen(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            wide = [_to_fp32(x) for x in args]
            return operation(*wide, **{k: _to_fp32(v) for k, v in kwargs.items()})

    return run


def _ask_for_fp32(operation: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operation._schema.arguments]
    place = names.index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            given = args[place] if len(args) > place else kwargs.get("dtype")
            if given is None and _is_narrow(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return operation(*args, **kwargs)

    return run


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


# Functions that torch runs differently on a GPU

_aten: Any = torch.ops.aten
_softmax = functional.softmax
_log_softmax = functional.log_softmax
_dropout = functional.dropout


@contextmanager
def use_gpu_functions(attention: GpuAttention) -> Iterator[None]:
    """torch use_functions take the GPU's code path on CPU tensors. Not thread-safe."""
    with ExitStack() as stack:
        for name, function in (
            ("scaled_dot_product_attention", attention),
            ("dropout", _native_dropout),
            ("softmax", _widening(_softmax, _aten._softmax)),
            ("log_softmax", _widening(_log_softmax, _aten._log_softmax)),
        ):
            stack.enter_context(patch.object(functional, name, function))
        _enable_foreach(stack)
        _make_masks_readable(stack)
        stack.enter_context(autocast_as_cuda())
        yield


def _make_masks_readable(stack: ExitStack) -> None:
    """transformers drops a mask that masks nothing, but never reads fake ones."""
    loaded = sys.modules.get("transformers.utils.import_utils")
    if hasattr(loaded, "is_fake_tensor"):
        stack.enter_context(patch.object(loaded, "is_fake_tensor", lambda _tensor: False))


def _enable_foreach(stack: ExitStack) -> None:
    """Optimizers use their foreach version where the device supports it (optim/optimizer.py)."""
    name = "_get_foreach_kernels_supported_devices"
    stack.enter_context(patch.object(optimizer, name, lambda: ["cpu", "cuda"]))
    for module in (optimizer, _foreach_utils):
        known = [*module._foreach_supported_types, FakeTensor]
        stack.enter_context(patch.object(module, "_foreach_supported_types", known))


def _native_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout.cpp, `is_fused_kernel_acceptable`: a GPU keeps a mask of bytes, not of values."""
    if not training or inplace or not 0.0 < p < 1.0 or not input.numel():
        return _dropout(input, p, training, inplace)
    output: Tensor = _aten.native_dropout(input, p, True)[0]
    return output


def _widening(whole: Callable[..., Tensor], kernel: Any) -> Callable[..., Tensor]:
    """SoftMax.cpp: a GPU reads fp16 and writes fp32; other types are cast first."""

    def run(
        input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> Tensor:
        if dim is None or input.dtype is not torch.float16 or dtype is not torch.float32:
            return whole(input, dim, _stacklevel, dtype)
        output: Tensor = kernel(input, dim, True)
        return output

    return run


# What kernels allocate beside their results

_MIB = 2**20
_DEFAULT_CAPABILITY = (8, 0)
"""GPUs of other vendors have flash and efficient kernels of the same shapes (AOTriton)."""
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
"""With the position of the dimensions among the arguments."""

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

_HALF_DTYPES = (torch.float16, torch.bfloat16)

_SECOND_FIRST = frozenset(
    f"bitsandbytes::{name}"
    for name in ("quantize_4bit", "quantize_blockwise", "int8_vectorwise_quant")
)
"""Kernels that allocate the scales before the codes, which they return first
(backends/cuda/ops.py)."""

_Workspace = Callable[[tuple[Any, ...], dict[str, Any]], list[int]]


class GpuEmulation:
    """Memory of one GPU's kernels, by operation. Make a new one for each recording."""

    def __init__(
        self,
        compute_capability: Capability | None = None,
        torch_version: str | None = None,
        cudnn_version: int | None = None,
        num_multiprocessors: int | None = None,
    ) -> None:
        """Versions default to this machine's, multiprocessors to the capability's usual number."""
        self._capability = compute_capability or _DEFAULT_CAPABILITY
        numbers = (torch_version or torch.__version__).split(".")
        self._torch = (int(numbers[0]), int(numbers[1]))
        if cudnn_version is None:
            cudnn_version = _find_cudnn() or find_default_cudnn(self._torch)
        self._software = SoftwareVersions(torch=self._torch, cudnn=cudnn_version)
        self._multiprocessors = kernels.find_multiprocessors(self._capability, num_multiprocessors)
        self._workspaces = self._collect_workspaces()
        self._allocated: set[tuple[str, str]] = set()

    def workspace_blocks(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """Sizes of the blocks that the kernel allocates while it runs."""
        measure = self._workspaces.get(func.name())
        return [] if measure is None else measure(args, kwargs)

    def allocates_workspace_first(self, func: Any) -> bool:
        """Whether workspace is allocated before the results, not after."""
        return func.name() in _BEFORE_RESULTS

    def cast_results(self, func: Any, result: Any) -> Any:
        """Results in the dtype that a GPU returns, where a CPU's differ.

        layer_norm_kernel.cu keeps the statistics of half precision in fp32 (`acc_type`).
        """
        if func.name() != "aten::native_layer_norm" or result[0].dtype not in _HALF_DTYPES:
            return result
        return (result[0], *(torch.empty_like(x, dtype=torch.float32) for x in result[1:]))

    def order_results(self, func: Any, results: list[Any]) -> list[Any]:
        """An operation's results in the order in which they are allocated."""
        if func.name() in _SECOND_FIRST:
            return [*results[1::-1], *results[2:]]
        return results

    def persistent_blocks(self, func: Any, args: tuple[Any, ...], thread: str) -> list[int]:
        """Blocks that this call allocates and never frees: cuBLAS workspaces.

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
        new = [(name, size) for name, size in wanted if (name, thread) not in self._allocated]
        self._allocated.update((name, thread) for name, _ in new)
        return [size for _, size in new]

    def use_functions(self) -> AbstractContextManager[None]:
        """torch runs on fake CPU tensors what it would run on this GPU."""
        return use_gpu_functions(GpuAttention(self._capability, self._software))

    @property
    def workspace_bytes(self) -> int:
        """`parseChosenWorkspaceSize`: 32 MiB on Hopper, from 2.12 on Blackwell too (PR 175344)."""
        large = (9,) if self._torch < (2, 12) else (9, 10, 11, 12)
        return _LARGE_WORKSPACE_BYTES if self._capability[0] in large else _SMALL_WORKSPACE_BYTES

    def _collect_workspaces(self) -> dict[str, _Workspace]:
        """By the operation's name, since not all are registered at import."""
        sdpa = "aten::_scaled_dot_product_"
        by_arguments: dict[str, Callable[[tuple[Any, ...]], list[int]]] = {
            f"{sdpa}flash_attention_backward": kernels.flash_backward,
            f"{sdpa}cudnn_attention_backward": kernels.cudnn_backward,
            f"{sdpa}efficient_attention": kernels.efficient_forward,
            f"{sdpa}efficient_attention_backward": partial(
                kernels.efficient_backward, capability=self._capability
            ),
            "aten::_flash_attention_backward": kernels.flash_rows_backward,
            "torch_attn::_varlen_attn_backward": kernels.varlen_backward,
            "aten::_safe_softmax": kernels.safe_softmax,
            "aten::_softmax_backward_data": kernels.softmax_backward,
            "aten::embedding_dense_backward": kernels.embedding_backward,
            "aten::index.Tensor": kernels.index_workspace,
            "aten::_index_put_impl_": kernels.index_put_workspace,
            "aten::_foreach_norm.Scalar": kernels.foreach_norm,
        }
        found: dict[str, _Workspace] = {
            **{name: _without_kwargs(measure) for name, measure in by_arguments.items()},
            "bitsandbytes::gemm_4bit": kernels.multiply_4bit,
            "bitsandbytes::int8_scaled_mm": kernels.multiply_int8,
            "bitsandbytes::int8_mixed_scaled_mm": kernels.multiply_mixed_int8,
            "bitsandbytes::int8_vectorwise_quant": kernels.quantize_int8,
        }
        found |= {
            name: partial(kernels.reduction_workspace, gpu=self._multiprocessors, dims_at=dims_at)
            for name, dims_at in _REDUCTIONS.items()
        }
        if self._torch >= (2, 14):
            workspace = [self.workspace_bytes]
            found |= {name: lambda _args, _kwargs: workspace for name in _MATMULS - set(found)}
        return found


def _without_kwargs(measure: Callable[[tuple[Any, ...]], list[int]]) -> _Workspace:
    return lambda args, _kwargs: measure(args)


def _is_biased(func: Any, args: tuple[Any, ...]) -> bool:
    """Blas.cpp: cuBLASLt runs products with a bias vector."""
    return func.name() in _LT_MATMULS and args[0].dim() == 1


def _find_cudnn() -> int | None:
    """This machine's cuDNN, if its torch is a CUDA build."""
    if torch.version.cuda is None:
        return None
    found: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found
