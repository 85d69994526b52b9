"""Casts to fp8 without kernels: in a trace they are launched, and do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from tightfit.estimate.trace.no_kernels import triton_without_kernels
from tightfit.runtime import fp8_casts


@contextmanager
def fp8_without_kernels() -> Iterator[None]:
    """What a cast allocates is allocated, and whoever listens is told of each launch."""
    with triton_without_kernels(), patch.object(fp8_casts, "_runs_kernels", _would_run):
        yield


def _would_run(_x: Tensor) -> bool:
    """Fake tensors say that they are on a CPU."""
    return not torch.compiler.is_compiling()
