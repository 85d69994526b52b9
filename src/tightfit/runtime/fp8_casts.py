"""Casts to e4m3 with a scale per row: in torch's own steps, and on a card one kernel for each."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import inf
from typing import TypeAlias

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_TOP_EXPONENT = 7
"""Of a row's largest value once it is scaled: 128 to 256, where e4m3 ends at 448."""
_FP32_BIAS, _FP32_FRACTION_BITS = 127, 23

Scaled: TypeAlias = tuple[Tensor, Tensor]
"""Rows in e4m3, and by what to multiply each to have it back."""


def cast_rows(*parts: Tensor) -> Scaled:
    """Each row of bf16 with a scale of its own, of matrices side by side; rows lie one after the
    other, however they lay."""
    if not _runs_kernels(parts[0]):
        return scale_rows(_beside(parts))
    from tightfit.runtime.fp8_kernels import cast_rows as cast

    return cast(*parts)


def cast_columns(*parts: Tensor) -> Scaled:
    """Each column of matrices side by side as a row."""
    if not _runs_kernels(parts[0]):
        return scale_rows(_beside(parts).t())
    from tightfit.runtime.fp8_kernels import cast_columns as cast

    return cast(*parts)


def cast_stacked_columns(*parts: Tensor) -> Scaled:
    """Each column of matrices on top of each other as a row."""
    if not _runs_kernels(parts[0]):
        return scale_rows(torch.cat(parts).t())
    from tightfit.runtime.fp8_kernels import cast_stacked_columns as cast

    return cast(*parts)


def _beside(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def turn(x: Tensor) -> Tensor:
    """Columns as rows, in fp8 as they were."""
    if not _runs_kernels(x):
        return x.t().contiguous()
    from tightfit.runtime.fp8_kernels import turn as turn_fast

    return turn_fast(x)


def _runs_kernels(x: Tensor) -> bool:
    """Inside a layer that is compiled as a whole, a cast is part of that."""
    return x.is_cuda and not torch.compiler.is_compiling()


# In torch


def scale_rows(x: Tensor) -> Scaled:
    """`cast_rows` on any device."""
    return _scale(x, torch.linalg.vector_norm(x, ord=inf, dim=-1, keepdim=True))


def scale_matrix(x: Tensor) -> Scaled:
    """All rows with one scale, so that columns can be read as rows."""
    largest = torch.linalg.vector_norm(x, ord=inf)
    return _scale(x, largest.expand(x.shape[0], 1).contiguous())


def _scale(x: Tensor, largest: Tensor) -> Scaled:
    # Exponents are read and written as bits: what exp2 and log2 round could pass e4m3's end.
    exponent = (largest.float().view(torch.int32) >> _FP32_FRACTION_BITS) - _FP32_BIAS
    shift = (_TOP_EXPONENT - exponent).clamp(1 - _FP32_BIAS, _FP32_BIAS - 1)
    values = (x * _power_of_two(shift).to(x.dtype)).to(FP8, memory_format=torch.contiguous_format)
    # A cast may take what is infinite for e4m3's largest; what such a row makes is not finite.
    return values, _power_of_two(-shift).masked_fill(exponent > _FP32_BIAS, inf)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + _FP32_BIAS) << _FP32_FRACTION_BITS).view(torch.float32)


# One cast for several layers


def cast_input(x: Tensor, *, is_followed: bool) -> Scaled:
    """Rows of a layer's input, cast once for layers that are given it one after another.

    `is_followed`: a layer comes that may be given the same; else the cast is not kept.
    """
    return _cast_once(x, _kept_rows, cast_rows, is_kept=is_followed)


def cast_input_columns(x: Tensor, *, is_preceded: bool) -> Scaled:
    """Its columns, likewise: the backward pass comes to the layers in the other order."""
    return _cast_once(x, _kept_columns, cast_columns, is_kept=is_preceded)


def _cast_once(
    x: Tensor, kept: _Kept, cast_new: Callable[[Tensor], Scaled], *, is_kept: bool
) -> Scaled:
    flat = x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():  # which finds what is computed twice
        return cast_new(flat)
    cast = kept.take(x)
    if cast is None:
        cast = cast_new(flat)
    if is_kept:
        kept.keep(x, cast)
    return cast


class _Kept:
    """The cast of one tensor, for as long as that is there and nothing is written to it."""

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], int, Scaled] | None = None

    def take(self, x: Tensor) -> Scaled | None:
        """What was kept of `x`; nothing is kept any more."""
        entry, self._entry = self._entry, None
        if entry is None or entry[0]() is not x or entry[1] != x._version:
            return None
        return entry[2]

    def keep(self, x: Tensor, cast: Scaled) -> None:
        if not x.is_inference():  # which count no writes
            self._entry = (weakref.ref(x, self._forget), x._version, cast)

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._entry is not None and self._entry[0] is gone:
            self._entry = None


_kept_rows, _kept_columns = _Kept(), _Kept()
