"""fp8 training: casts to e4m3 with a scale per row, and linear layers that multiply in fp8.

Gradients are e4m3 too: rows of one scale need no wider range, and e5m2 would round twice as
coarsely. Scales are powers of two, so scaling loses nothing. Source: torchao's `rowwise` recipe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import inf
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.runtime.layers import decoder_layers, is_dequantized, mark_dequantized, take_matrix

FP8 = torch.float8_e4m3fn
_TOP_EXPONENT = 7
"""Of a row's largest value once it is scaled: 128 to 256, where e4m3 ends at 448."""
_FP32_BIAS, _FP32_FRACTION_BITS = 127, 23

Scaled: TypeAlias = tuple[Tensor, Tensor]
"""Rows in e4m3, and the scale of each row."""


def cast_rows(*parts: Tensor) -> Scaled:
    """Cast matrices side by side to e4m3, each row with a scale of its own; contiguous."""
    if _runs_kernels(parts[0]):
        from tightfit.runtime.kernels import fp8_triton

        return fp8_triton.cast_rows(*parts)
    return scale_rows(_beside(parts))


def cast_columns(*parts: Tensor) -> Scaled:
    """As `cast_rows` of the transpose of matrices side by side."""
    if _runs_kernels(parts[0]):
        from tightfit.runtime.kernels import fp8_triton

        return fp8_triton.cast_columns(*parts)
    return scale_rows(_beside(parts).t())


def cast_stacked_columns(*parts: Tensor) -> Scaled:
    """As `cast_rows` of the transpose of matrices stacked on each other."""
    if len(parts) == 1:
        return cast_columns(*parts)
    if _runs_kernels(parts[0]):
        from tightfit.runtime.kernels import fp8_triton

        return fp8_triton.cast_stacked_columns(*parts)
    return scale_rows(torch.cat(parts).t())


def turn(x: Tensor) -> Tensor:
    """The contiguous transpose of an fp8 matrix."""
    if _runs_kernels(x):
        from tightfit.runtime.kernels import fp8_triton

        return fp8_triton.turn(x)
    return x.t().contiguous()


def _beside(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _runs_kernels(x: Tensor) -> bool:
    """Whether to use the Triton kernels: not inside torch.compile, which fuses casts itself."""
    return x.is_cuda and not torch.compiler.is_compiling()


# Casts in torch


def scale_rows(x: Tensor) -> Scaled:
    """`cast_rows` on any device."""
    return _scale(x, torch.linalg.vector_norm(x, ord=inf, dim=-1, keepdim=True))


def scale_matrix(x: Tensor) -> Scaled:
    """One scale for all rows, so that the transpose has the same scale."""
    largest = torch.linalg.vector_norm(x, ord=inf)
    return _scale(x, largest.expand(x.shape[0], 1).contiguous())


def _scale(x: Tensor, largest: Tensor) -> Scaled:
    # Exponents are read and written as bits: rounding of exp2 and log2 could exceed e4m3's range.
    exponent = (largest.float().view(torch.int32) >> _FP32_FRACTION_BITS) - _FP32_BIAS
    shift = (_TOP_EXPONENT - exponent).clamp(1 - _FP32_BIAS, _FP32_BIAS - 1)
    values = (x * _power_of_two(shift).to(x.dtype)).to(FP8, memory_format=torch.contiguous_format)
    # A cast may saturate infinities: an infinite scale keeps the row's products non-finite.
    return values, _power_of_two(-shift).masked_fill(exponent > _FP32_BIAS, inf)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + _FP32_BIAS) << _FP32_FRACTION_BITS).view(torch.float32)


# One cast of an input for several layers


def cast_input(x: Tensor, *, is_followed: bool) -> Scaled:
    """Cast a layer's input by rows, once for consecutive layers with the same input.

    `is_followed`: the next layer may get the same input; otherwise the cast is not cached.
    """
    return _cast_once(x, _kept_rows, cast_rows, is_kept=is_followed)


def _cast_once(
    x: Tensor, kept: _CastCache, cast_new: Callable[[Tensor], Scaled], *, is_kept: bool
) -> Scaled:
    flat = x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():  # the compiler removes repeated casts
        return cast_new(flat)
    cast = kept.take(x)
    if cast is None:
        cast = cast_new(flat)
    if is_kept:
        kept.keep(x, cast)
    return cast


class _CastCache:
    """Caches the cast of one tensor while the tensor is alive and unmodified."""

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], int, Scaled] | None = None

    def take(self, x: Tensor) -> Scaled | None:
        """Pop the cast of `x`, if it is the cached one."""
        entry, self._entry = self._entry, None
        if entry is None or entry[0]() is not x or entry[1] != x._version:
            return None
        return entry[2]

    def keep(self, x: Tensor, cast: Scaled) -> None:
        if not x.is_inference():  # inference tensors have no version counter
            self._entry = (weakref.ref(x, self._forget), x._version, cast)

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._entry is not None and self._entry[0] is gone:
            self._entry = None


_kept_rows, _kept_columns = _CastCache(), _CastCache()


# fp8 products: linear layers of the blocks multiply in 8 bits; all that is between them is
# bf16.

ALIGNED = 16
"""Both dimensions of a matrix must be multiples of it. Source: torch `_scaled_mm`."""
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Layers that choose experts: small, and a rounded score could choose another expert."""


def use_fp8(model: nn.Module, *, is_backward_alone: bool = False) -> int:
    """Make the blocks' linear layers multiply in fp8 where they can; returns how many.

    After adapters are attached and before `fuse_lora`. A trained weight stays in bf16 and is cast
    at each use; a frozen one is stored in fp8 only, under its old name.
    `is_backward_alone`: trained weights multiply in bf16 forward and in fp8 backward.
    """
    found: list[tuple[nn.Module, str, Any]] = [
        (layer, name, module)
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if takes_fp8(name, module)
    ]
    count = len(found)
    # Siblings of the same width before and after a layer may share its input.
    last: dict[tuple[nn.Module, str, int], Any] = {}
    for layer, name, module in found:
        beside = (layer, name.removesuffix(".base_layer").rpartition(".")[0], module.in_features)
        if beside in last:
            last[beside].is_followed = True
        module.is_preceded, module.is_followed = beside in last, False
        last[beside] = module
    last.clear()
    while found:  # popped, so that replaced matrices are freed at once
        layer, name, module = found.pop()
        if module.weight.requires_grad:
            module.is_backward_alone = is_backward_alone
            # A bound method: a deep copy of the model binds it to the copied layer.
            module.forward = MethodType(_forward_trained, module)
        else:
            layer.set_submodule(name, Fp8Linear(module))
    return count


def multiplies_in_fp8(layer: nn.Module) -> bool:
    """Whether `use_fp8` has changed this trained layer."""
    return "is_backward_alone" in vars(layer)


def takes_fp8(name: str, module: Any) -> bool:
    """Whether this is a plain bf16 layer with dimensions that fp8 kernels support.

    Not adapters, whose products are too thin to gain, nor routers.
    """
    path = [part for part in name.split(".") if part != "base_layer"]
    if type(module) is not nn.Linear or module.weight.dtype is not torch.bfloat16:
        return False
    if any(part.startswith("lora_") or part in _ROUTERS for part in path):
        return False
    return module.in_features % ALIGNED == 0 and module.out_features % ALIGNED == 0


# Products


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


def multiply_columns(*g: Tensor, x: Tensor, is_preceded: bool = False) -> Tensor:
    """`g^T x` of gradients side by side; in bf16 if the number of tokens is not aligned."""
    if len(g[0]) % ALIGNED:
        rows = x.reshape(-1, x.shape[-1])
        return torch.cat([one.t() @ rows for one in g]) if len(g) > 1 else g[0].t() @ rows
    # The backward pass visits the layers with the same input in reverse.
    columns = _cast_once(x, _kept_columns, cast_columns, is_kept=is_preceded)
    return multiply_rows(cast_columns(*g), columns, is_fast=False)


def _is_plain(x: Tensor) -> bool:
    """Whether this input takes the fp8 path. Must not change between calls: recomputation has to
    take the same path."""
    is_cast = torch.is_autocast_enabled(x.device.type)
    return x.dtype is torch.bfloat16 and x.numel() > 0 and not is_cast


# Trained weights


def suits_trained(layer: nn.Linear, x: Tensor) -> bool:
    """Whether a layer that `use_fp8` changed multiplies this input in fp8."""
    return _is_plain(x) and layer.weight.dtype is torch.bfloat16


def _forward_trained(layer: nn.Linear, x: Tensor) -> Tensor:
    if not suits_trained(layer, x):
        return type(layer).forward(layer, x)
    product: Any = _Fp8TrainedProducts
    flags = (layer.is_preceded, layer.is_followed, layer.is_backward_alone)
    (y,) = product.apply(x, flags, layer.weight, layer.bias)
    return y  # type: ignore[no-any-return]


def multiply_fused_projections(x: Tensor, layers: list[Any]) -> tuple[Tensor, ...]:
    """The output of each layer, for `FusedProjections`."""
    product: Any = _Fp8TrainedProducts
    parts = [part for layer in layers for part in (layer.weight, layer.bias)]
    # No layer before or after the group has its input.
    outputs: tuple[Tensor, ...] = product.apply(
        x, (False, False, layers[0].is_backward_alone), *parts
    )
    return outputs


class _Fp8TrainedProducts(torch.autograd.Function):
    """`x W^T + bias` of each layer, with all gradients; saves what plain layers save.

    In backward they are one layer with concatenated outputs: the gradient of x is one product with
    one scale per row, and so are those of all weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, flags: tuple[bool, bool, bool], *parts: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`flags`: whether a layer before, and one after, has this input; fp8 in backward only."""
        ctx.is_preceded, is_followed, is_backward_alone = flags
        pairs: Any = list(zip(parts[::2], parts[1::2], strict=True))
        ctx.save_for_backward(x, *parts[::2])
        if is_backward_alone:
            return tuple(functional.linear(x, weight, bias) for weight, bias in pairs)
        rows = cast_input(x, is_followed=is_followed)
        outputs = [
            multiply_rows(rows, cast_rows(weight), bias, is_fast=True) for weight, bias in pairs
        ]
        return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        g = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        grad_x = None
        if needs_x:
            grad_x = multiply_rows(cast_rows(*g), cast_stacked_columns(*weights), is_fast=False)
            grad_x = grad_x.view_as(x)
        grad_weights: Sequence[Tensor | None] = [None] * len(g)
        if any(needs[::2]):
            grad_weight = multiply_columns(*g, x=x, is_preceded=ctx.is_preceded)
            heights = [len(weight) for weight in weights]
            grad_weights = torch.split(grad_weight, heights) if len(g) > 1 else [grad_weight]
        grad_biases = [
            one.sum(0) if is_needed else None for one, is_needed in zip(g, needs[1::2], strict=True)
        ]
        pairs = zip(grad_weights, grad_biases, strict=True)
        return grad_x, None, *(one for pair in pairs for one in pair)


# Frozen weights


class Fp8Linear(nn.Module):
    """A frozen linear layer with its matrix in fp8, in half the memory of bf16.

    One scale for the whole matrix: it is read by rows forward and by columns backward.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype
        with torch.no_grad():
            values, scale = scale_matrix(take_matrix(linear))
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale: Tensor
        # Repeated for each row: `_scaled_mm` takes row-wise scales.
        scales = scale[:1].repeat(max(linear.weight.shape), 1)
        self.register_buffer("weight_scale", scales, persistent=False)
        self.bias = linear.bias
        self.is_followed = bool(vars(linear).get("is_followed"))
        if is_dequantized(linear):
            mark_dequantized(self)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if not _is_plain(x):
            return functional.linear(x, self.unpack(x.dtype), self.bias)
        product: Any = _FrozenProduct
        y: Tensor = product.apply(x, self.weight, self.weight_scale, self.bias, self.is_followed)
        return y

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The matrix in another dtype, with its scale applied."""
        return self.weight.to(dtype) * self.weight_scale[:1].to(dtype)


class _FrozenProduct(torch.autograd.Function):
    """`x W^T + bias`, with a gradient for x; saves no activation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, is_followed: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        y = multiply_forward(cast_input(x, is_followed=is_followed), weight, scale, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        gradient = gradients[0]
        g = gradient.reshape(-1, gradient.shape[-1])
        grad_x = multiply_back(g, weight, scale)
        return grad_x.view(*gradient.shape[:-1], grad_x.shape[-1]), None, None, None, None


def multiply_forward(rows: Scaled, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + bias` of a frozen matrix."""
    return multiply_rows(rows, (weight, scale[: weight.shape[0]]), bias, is_fast=True)


def multiply_back(g: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`g W` of a frozen matrix, transposed at each call: keeping both layouts would take as much
    memory as bf16."""
    return multiply_rows(cast_rows(g), (turn(weight), scale[: weight.shape[1]]), is_fast=False)
