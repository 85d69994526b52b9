"""Casts to fp8 without kernels: on a card each is compiled into one, which a trace cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tightfit.estimate.trace.no_kernels import LISTENERS
from tightfit.runtime import fp8_linear


@contextmanager
def fp8_without_kernels() -> Iterator[None]:
    """What a cast allocates is allocated, and whoever listens is told of one launch."""
    with patch.object(fp8_linear, "_fast", _launch):
        yield


def _launch(function: Callable[..., Any], x: Tensor) -> Any:
    is_turn = function is fp8_linear.turn
    shape = x.shape[::-1] if is_turn else x.shape
    values = torch.empty(shape, dtype=fp8_linear.FP8, device=x.device)
    scale = None if is_turn else torch.empty(shape[0], 1, device=x.device)
    for hear in LISTENERS:
        hear((x, values, scale), {})
    return values if is_turn else (values, scale)
