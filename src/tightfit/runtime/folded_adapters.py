"""Folded adapters: a LoRA layer in as many passes over memory as its products need.

peft multiplies, scales and adds in steps of their own, each a pass over the whole output, and
autograd does the same on the way back. Here scaling and sum are part of the products.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.runtime.fp8_casts import cast_input
from tightfit.runtime.fp8_linear import Fp8Linear, multiply_back, multiply_forward
from tightfit.runtime.readers import READERS, Readers


def fold_adapters(model: nn.Module) -> int:
    """Give every LoRA layer that allows it the folded product; how many did.

    After the adapters are attached. Names, parameters and what is saved stay peft's.
    """
    layers = [module for module in model.modules() if is_foldable(module)]
    for layer in layers:
        # A bound method, which a copy of the model binds to the copy's own layer.
        layer.forward = MethodType(_forward_folded, layer)
    return len(layers)


def is_foldable(module: nn.Module) -> bool:
    """Whether peft's forward of this module is base, plus B of A, times a number, and no more.

    Not so with dropout, DoRA and other variants, biases of adapters, several adapters, trained
    base weights, or a base whose matrix is neither plain nor packed in 4 bits or fp8.
    """
    if not _is_of(module, "peft.tuners.lora.", ("Linear", "Linear4bit")):
        return False
    layer: Any = module
    if len(layer.lora_A) != 1 or layer.lora_variant or any(layer.lora_bias.values()):
        return False
    if not all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
        return False
    base = layer.base_layer
    is_plain = type(base) in (nn.Linear, Fp8Linear) or _is_of(base, "transformers.", ("Conv1D",))
    is_packed = _is_of(base, "bitsandbytes.", ("Linear4bit",))
    is_trained = any(parameter.requires_grad for parameter in base.parameters())
    return (is_plain or is_packed) and not is_trained


def _is_of(module: nn.Module, library: str, names: tuple[str, ...]) -> bool:
    """By name: most jobs have not all of these libraries."""
    return type(module).__module__.startswith(library) and type(module).__name__ in names


def _forward_folded(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of peft's forward, and peft's forward itself wherever a call asks for more."""
    (name,) = layer.lora_A
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    base = layer.base_layer
    is_mixed = not x.dtype == a.dtype == b.dtype or torch.is_autocast_enabled(x.device.type)
    is_off = layer.disable_adapters or layer.merged or list(layer.active_adapters) != [name]
    if args or kwargs or is_mixed or is_off or not _computes_in(base, x.dtype):
        answer: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return answer
    readers: Readers | None = vars(layer).get(READERS)
    if readers is not None and readers.have_room(x):
        return readers.multiply(layer, x)
    product: Any = _FoldedProduct
    y: Tensor = product.apply(x, base.weight, a, b, layer)
    return y


def _computes_in(base: Any, dtype: torch.dtype) -> bool:
    """Whether the base neither casts its input nor its result. The same at every call, since
    recomputing must take the path that was taken first."""
    # Packed weights have a compute dtype beside the one they are stored in.
    return vars(base).get("compute_dtype", base.weight.dtype) in (None, dtype)


class _FoldedProduct(torch.autograd.Function):
    """`x W^T + bias + scaling * (x A^T) B^T`, with gradients for x, A and B.

    The weight is saved as the parameter it is, so that what shards it can free and gather it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, layer: Any) -> Tensor:
        base = layer.base_layer
        (ctx.scaling,) = layer.scaling.values()
        scale = base.weight_scale if isinstance(base, Fp8Linear) else None
        rows = x.reshape(-1, x.shape[-1])
        h = rows @ a.t()
        if type(base) is nn.Linear:
            # The thin product first: the other then adds to it in passing.
            y = nn.functional.linear(h, b * ctx.scaling, base.bias).addmm_(rows, weight.t())
        else:
            y = _multiply_base(base, x).addmm_(h, b.t(), alpha=ctx.scaling)
        ctx.save_for_backward(x, weight, a, b, h, scale)
        # GPT-2's layers have a matrix with its inputs first.
        ctx.is_transposed = not isinstance(base, nn.Linear)
        # Beside the weight, since a gathered one has none until its module has run.
        ctx.quant_state = getattr(base.weight, "quant_state", None)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, h, scale = ctx.saved_tensors
        gradient = gradients[0]
        needs_x, _, needs_a, needs_b, _ = ctx.needs_input_grad
        rows = x.reshape(-1, x.shape[-1])
        g = gradient.reshape(-1, gradient.shape[-1])
        of_h = (g @ b).mul_(ctx.scaling)
        of_b = (g.t() @ h).mul_(ctx.scaling) if needs_b else None
        of_a = of_h.t() @ rows if needs_a else None
        of_x = None
        if needs_x and scale is None:
            of_x = (of_h @ a).addmm_(g, _matrix(weight, ctx, g.dtype)).view_as(x)
        elif needs_x:
            of_x = multiply_back(g, weight, scale).addmm_(of_h, a).view_as(x)
        return of_x, None, of_a, of_b, None


def _multiply_base(base: Any, x: Tensor) -> Tensor:
    """Packed weights, fp8 ones, and those of GPT-2; rows by outputs."""
    if isinstance(base, Fp8Linear):
        cast = cast_input(x, is_followed=base.is_followed)
        return multiply_forward(cast, base.weight, base.weight_scale, base.bias)
    y: Tensor = type(base).forward(base, x.reshape(-1, x.shape[-1]))
    return y


def _matrix(weight: Tensor, ctx: Any, dtype: torch.dtype) -> Tensor:
    """The base weight, outputs first."""
    if ctx.quant_state is not None:
        from bitsandbytes import functional

        unpacked: Tensor = functional.dequantize_4bit(weight, ctx.quant_state)
        return unpacked.to(dtype)
    return weight.t() if ctx.is_transposed else weight
