"""Which libraries a job runs whose kernels are left out of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tightfit.core.strategy import Loss, Strategy
from tightfit.estimate.trace.no_kernels import liger_without_kernels
from tightfit.estimate.trace.seen_as_card import autocast_of
from tightfit.planning.needs import BITSANDBYTES
from tightfit.runtime.quiet import silence_libraries
from tightfit.train.tracing.fp8_casts import fp8_without_kernels
from tightfit.train.tracing.packed import bitsandbytes_without_kernels

_LIGER_LOSSES = (Loss.FUSED, Loss.KERNEL)


@contextmanager
def without_kernels(
    strategy: Strategy, device: torch.device, capability: tuple[int, int] | None
) -> Iterator[None]:
    """Around everything that a trace of `strategy` on fake tensors of `device` does."""
    silence_libraries()  # before the imports that make libraries talk
    with ExitStack() as stack:
        stack.enter_context(autocast_of(device.type))
        if BITSANDBYTES.is_wanted(strategy):
            stack.enter_context(bitsandbytes_without_kernels())
        if strategy.fused_kernels or strategy.loss in _LIGER_LOSSES:
            stack.enter_context(liger_without_kernels(capability))
        if strategy.has_fp8:
            stack.enter_context(fp8_without_kernels())
        yield


def import_libraries() -> None:
    """What every trace imports, before processes part that would each import it."""
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401
