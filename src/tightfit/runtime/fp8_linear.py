"""fp8 products: linear layers of the blocks multiply in 8 bits; all that is between them is bf16.

Every operand is e4m3 with a scale per row, gradients too: rows of one scale need no wider range
than e4m3 has, and e5m2 would round twice as coarsely. Scales are powers of two, so that scaling
loses nothing. A trained weight's own gradient stays a bf16 product: it is summed over tokens, both
its operands would have to be cast and turned once more, and it is what the optimizer adds up.
Source: the recipe `rowwise_with_gw_hp` of torchao, which is its most accurate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.runtime.layers import decoder_layers

FP8 = torch.float8_e4m3fn
ALIGNED = 16
"""Values that both widths of a matrix are multiples of. Source: torch `_scaled_mm`."""
_TOP_EXPONENT = 7
"""Of a row's largest value once it is scaled: 128 to 256, where e4m3 ends at 448."""
_FP32_BIAS, _FP32_FRACTION_BITS = 127, 23
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Layers that choose experts: small, and a rounded score would choose another."""

Scaled: TypeAlias = tuple[Tensor, Tensor]
"""Rows in e4m3, and by what to multiply each to have it back."""


def use_fp8(model: nn.Module) -> int:
    """Give every linear layer of the blocks that allows it fp8 products; how many did.

    After adapters are attached and before they are folded. A trained weight stays as it is and is
    cast when it is used; a frozen one is kept in fp8 alone, under the name it had.
    """
    found = [
        (layer, name, module)
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if takes_fp8(name, module)
    ]
    for layer, name, module in found:
        if module.weight.requires_grad:
            # A bound method, which a copy of the model binds to the copy's own layer.
            module.forward = MethodType(_forward_trained, module)
        else:
            layer.set_submodule(name, Fp8Linear(module))
    return len(found)


def takes_fp8(name: str, module: Any) -> bool:
    """Whether this is a plain bf16 matrix with rows that fp8 kernels can read.

    Not adapters, whose products are too thin to gain; nor what chooses experts.
    """
    path = [part for part in name.split(".") if part != "base_layer"]
    if type(module) is not nn.Linear or module.weight.dtype is not torch.bfloat16:
        return False
    if any(part.startswith("lora_") for part in path) or path[-1] in _ROUTERS:
        return False
    return module.in_features % ALIGNED == 0 and module.out_features % ALIGNED == 0


# Casts


def cast_rows(x: Tensor) -> Scaled:
    """Each row with a scale of its own; rows lie one after the other, however they lay."""
    return _scale(x, torch.linalg.vector_norm(x, ord=inf, dim=-1, keepdim=True))


def cast_matrix(x: Tensor) -> Scaled:
    """All rows with one scale, so that columns can be read as rows."""
    largest = torch.linalg.vector_norm(x, ord=inf)
    return _scale(x, largest.expand(x.shape[0], 1).contiguous())


def turn(x: Tensor) -> Tensor:
    """Columns as rows."""
    return x.t().contiguous()


def _scale(x: Tensor, largest: Tensor) -> Scaled:
    # Exponents are read and written as bits: what exp2 and log2 round could pass e4m3's end.
    exponent = (largest.float().view(torch.int32) >> _FP32_FRACTION_BITS) - _FP32_BIAS
    shift = (_TOP_EXPONENT - exponent).clamp(1 - _FP32_BIAS, _FP32_BIAS - 1)
    values = (x * _power_of_two(shift).to(x.dtype)).to(FP8, memory_format=torch.contiguous_format)
    return values, _power_of_two(-shift)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + _FP32_BIAS) << _FP32_FRACTION_BITS).view(torch.float32)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel in place of several passes over memory, for any shape."""
    return torch.compile(function, dynamic=True)


def _fast(function: Callable[..., Any], x: Tensor) -> Any:
    """Compiled on a GPU; inside a layer that is compiled as a whole, part of that."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return function(x)
    # A parameter would be compiled for its own shape alone, and torch stops after eight of those.
    return _compiled(function)(x.detach())


def multiply_rows(
    left: Scaled, right: Scaled, bias: Tensor | None = None, *, is_fast: bool
) -> Tensor:
    """`left right^T` in bf16. Fast accumulation keeps fewer bits of long sums: forward only."""
    (a, scale_a), (b, scale_b) = left, right
    multiply: Callable[..., Tensor] = torch._scaled_mm
    return multiply(
        a,
        b.t(),
        scale_a=scale_a,
        scale_b=scale_b.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )


def _is_plain(x: Tensor) -> bool:
    """Whether a call is one that fp8 is for. The same at every call, since recomputing must take
    the path that was taken first."""
    is_cast = torch.is_autocast_enabled(x.device.type)
    return x.dtype is torch.bfloat16 and x.numel() > 0 and not is_cast


# Trained weights


def _forward_trained(layer: nn.Linear, x: Tensor) -> Tensor:
    if not _is_plain(x) or layer.weight.dtype is not torch.bfloat16:
        return type(layer).forward(layer, x)
    product: Any = _TrainedProduct
    y: Tensor = product.apply(x, layer.weight, layer.bias)
    return y


class _TrainedProduct(torch.autograd.Function):
    """`x W^T + bias`, with gradients for all three; keeps what a plain layer keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = multiply_rows(_fast(cast_rows, rows), _fast(cast_rows, weight), bias, is_fast=True)
        ctx.save_for_backward(x, weight)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        g = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_x = of_weight = None
        if needs_x:
            columns = _fast(cast_rows, weight.t())
            of_x = multiply_rows(_fast(cast_rows, g), columns, is_fast=False).view_as(x)
        if needs_weight:
            of_weight = g.t() @ x.reshape(-1, x.shape[-1])
        return of_x, of_weight, g.sum(0) if needs_bias else None


# Frozen weights


class Fp8Linear(nn.Module):
    """A frozen linear layer that keeps its matrix in fp8, in half the memory of bf16.

    One scale for the whole matrix, since it is read by rows forward and by columns backward.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype
        with torch.no_grad():
            values, scale = cast_matrix(linear.weight)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale: Tensor
        self.register_buffer("weight_scale", scale[:1].clone(), persistent=False)
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if not _is_plain(x):
            return functional.linear(x, self.unpack(x.dtype), self.bias)
        product: Any = _FrozenProduct
        y: Tensor = product.apply(x, self.weight, self.weight_scale, self.bias)
        return y

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The matrix as the products see it."""
        return self.weight.to(dtype) * self.weight_scale.to(dtype)


class _FrozenProduct(torch.autograd.Function):
    """`x W^T + bias`, with a gradient for x; keeps nothing of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        y = multiply_forward(x.reshape(-1, x.shape[-1]), weight, scale, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        gradient = gradients[0]
        g = gradient.reshape(-1, gradient.shape[-1])
        of_x = multiply_back(g, weight, scale)
        return of_x.view(*gradient.shape[:-1], of_x.shape[-1]), None, None, None


def multiply_forward(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + bias` of a frozen matrix."""
    right = (weight, scale.expand(weight.shape[0], 1).contiguous())
    return multiply_rows(_fast(cast_rows, rows), right, bias, is_fast=True)


def multiply_back(g: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`g W` of a frozen matrix. It is turned anew each time: keeping it both ways would take as
    much memory as bf16."""
    right = (_fast(turn, weight), scale.expand(weight.shape[1], 1).contiguous())
    return multiply_rows(_fast(cast_rows, g), right, is_fast=False)
