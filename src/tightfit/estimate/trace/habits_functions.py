"""Functions that torch runs differently on a card than on fake CPU tensors, as on the card.

Below the dispatcher a recorder sees only what torch chose for the CPU. Where a card's choice
is another one, it is put in its place while a trace runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer
from torch.utils import _foreach_utils

from tightfit.estimate.trace.habits_attention import CardAttention
from tightfit.estimate.trace.habits_autocast import autocast_as_cuda

_aten: Any = torch.ops.aten
_softmax = functional.softmax
_log_softmax = functional.log_softmax
_dropout = functional.dropout


@contextmanager
def functions_of_card(attention: CardAttention) -> Iterator[None]:
    """While inside, torch takes a card's ways on CPU tensors. Not for several threads."""
    with ExitStack() as stack:
        for name, function in (
            ("scaled_dot_product_attention", attention),
            ("dropout", _drop_out),
            ("softmax", _widening(_softmax, _aten._softmax)),
            ("log_softmax", _widening(_log_softmax, _aten._log_softmax)),
        ):
            stack.enter_context(patch.object(functional, name, function))
        _update_together(stack)
        _read_masks(stack)
        stack.enter_context(autocast_as_cuda())
        yield


def _read_masks(stack: ExitStack) -> None:
    """transformers leaves a mask out that masks nothing, but takes fake ones for unreadable."""
    loaded = sys.modules.get("transformers.utils.import_utils")
    if hasattr(loaded, "is_fake_tensor"):
        stack.enter_context(patch.object(loaded, "is_fake_tensor", lambda _tensor: False))


def _update_together(stack: ExitStack) -> None:
    """Optimizers take all parameters at once where the device can (optim/optimizer.py)."""
    name = "_get_foreach_kernels_supported_devices"
    stack.enter_context(patch.object(optimizer, name, lambda: ["cpu", "cuda"]))
    for module in (optimizer, _foreach_utils):
        known = [*module._foreach_supported_types, FakeTensor]
        stack.enter_context(patch.object(module, "_foreach_supported_types", known))


def _drop_out(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout.cpp, `is_fused_kernel_acceptable`: a card keeps a mask of bytes, not of values."""
    if not training or inplace or not 0.0 < p < 1.0 or not input.numel():
        return _dropout(input, p, training, inplace)
    output: Tensor = _aten.native_dropout(input, p, True)[0]
    return output


def _widening(whole: Callable[..., Tensor], kernel: Any) -> Callable[..., Tensor]:
    """SoftMax.cpp: a card reads fp16 and writes fp32; other types are copied first."""

    def run(
        input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> Tensor:
        if dim is None or input.dtype is not torch.float16 or dtype is not torch.float32:
            return whole(input, dim, _stacklevel, dtype)
        output: Tensor = kernel(input, dim, True)
        return output

    return run
