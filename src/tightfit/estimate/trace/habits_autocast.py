"""CUDA's autocast on CPU tensors: torch widens more operations on a card than on a CPU.

Source: the lists of aten/src/ATen/autocast_mode.h (`AT_FORALL_FP32` and
`AT_FORALL_FP32_SET_OPT_DTYPE`, which CUDA registers) against those of autocast_mode.cpp under
`AutocastCPU`. Both narrow the same products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
"""Inputs are copied to fp32. Those that a language model may call."""
_GIVEN_DTYPE = (
    "softmax.int",
    "log_softmax.int",
    "cumsum",
    "sum",
    "sum.dim_IntList",
    "linalg_vector_norm",
)
"""Asked for results in fp32, where the caller has not said otherwise."""
_RMS_NORM_SINCE = (2, 9)
"""torch whose CUDA autocast widens `rms_norm` as well."""


@contextmanager
def autocast_as_cuda() -> Iterator[None]:
    """While inside, `torch.autocast("cpu")` treats operations as `torch.autocast("cuda")` would."""
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
