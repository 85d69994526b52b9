"""Fused LoRA and fused projections.

Fused LoRA: peft multiplies, scales and adds in separate passes over the output, and autograd again
on the way back; here scaling and sum are part of the matrix products.

Augmented weights: `x W^T + (x A^T) (scaling B)^T` is one product of `[x, x A^T]` and
`[W, scaling B]`, and takes as long as without an adapter. The norm that makes x leaves columns
behind each row for `x A^T`, and the frozen matrix has columns for `scaling B`. Layers that read the
same x share its columns; each finds zeros in its own matrix where the others write.

Fused projections: layers with the same input (q, k, v; gate, up) are computed together. The
gradients of x, which autograd would add up, are summed inside the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.estimation.weights import FUSED_PROJECTION_NAMES, count_augmented_columns
from tightfit.runtime.kernels.fp8 import (
    Fp8Linear,
    cast_input,
    multiplies_in_fp8,
    multiply_back,
    multiply_forward,
    multiply_fused_projections,
    suits_trained,
)
from tightfit.runtime.kernels.fused_projections import (
    FUSED_PROJECTIONS,
    FusedProjections,
)
from tightfit.runtime.layers import decoder_layers

AUGMENTED_COLUMNS = "num_augmented_columns"
"""Attribute of a norm: the number of columns it leaves behind each row."""


def augment_weights(norm: Any, linears: list[nn.Linear], *, total_rank: int) -> None:
    """Add columns to what the norm writes and to the matrices that read it."""
    num_added = count_augmented_columns(total_rank)
    setattr(norm, AUGMENTED_COLUMNS, num_added)
    for linear in linears:
        # The same frozen matrix as a view of one with zero columns at the end.
        num_outputs, num_inputs = linear.weight.shape
        wide = linear.weight.new_zeros(num_outputs, num_inputs + num_added)
        wide[:, :num_inputs] = linear.weight.detach()
        linear.weight = nn.Parameter(wide[:, :num_inputs], requires_grad=False)
        del wide
    # The freed matrices are too small for the wider ones and most activations.
    if linears[0].weight.is_cuda:
        torch.cuda.empty_cache()


def augmented_view(x: Tensor) -> Tensor:
    """The rows including their added columns.

    Through `data`: writes there must not bump the version of x, which others have saved.
    """
    rows = x.data.reshape(-1, x.shape[-1])
    width = rows.stride(0)
    return rows.as_strided((len(rows), width), (width, 1), rows.storage_offset())


# Fused projections


def _find_projection_groups(model: nn.Module) -> Iterator[tuple[Any, list[Any]]]:
    """Every norm of the blocks, and the layers that read it."""
    blocks: list[Any] = list(decoder_layers(model))
    for block in blocks:
        norms = (block.input_layernorm, block.post_attention_layernorm)
        owners = (block.self_attn, block.mlp)
        for norm, owner, names in zip(norms, owners, FUSED_PROJECTION_NAMES, strict=True):
            yield norm, [getattr(owner, name) for name in names]


def _fuse_group(
    layers: list[Any], product: Callable[[Tensor, list[Any]], Sequence[Tensor]]
) -> None:
    group = FusedProjections(layers, product)
    for layer in layers:
        setattr(layer, FUSED_PROJECTIONS, group)


# Adapters over frozen matrices


def fuse_lora_projections(model: nn.Module) -> int:
    """Fuse the LoRA layers behind every norm of the blocks, with augmented weights; how many.

    After `fuse_lora` and `use_triton_norms`, where `uses_augmented_weights` allows it.
    """
    count = 0
    for norm, projections in _find_projection_groups(model):
        # Fused LoRA layers over plain frozen matrices.
        layers = [
            layer
            for layer in projections
            if "forward" in vars(layer) and type(getattr(layer, "base_layer", None)) is nn.Linear
        ]
        if layers:
            total_rank = sum(len(_matrices(layer)[1]) for layer in layers)
            augment_weights(norm, [layer.base_layer for layer in layers], total_rank=total_rank)
            _fuse_group(layers, _multiply_adapted)
            count += len(layers)
    return count


def _matrices(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    (name,) = layer.lora_A
    return layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight


def _multiply_adapted(x: Tensor, layers: list[Any]) -> tuple[Tensor, ...]:
    product: Any = _AdaptedProducts
    outputs: tuple[Tensor, ...] = product.apply(
        x, layers, *(matrix for layer in layers for matrix in _matrices(layer))
    )
    return outputs


def _unflatten(rows: Tensor, like: Tensor) -> Tensor:
    """The rows as `like` has them. Not a view to autograd, so that the model may change it in
    place, as Llama 4 does."""
    made: Tensor = torch.ops.aten._unsafe_view(rows, [*like.shape[:-1], rows.shape[-1]])
    return made


class _AdaptedProducts(torch.autograd.Function):
    """`x W^T + bias + scaling * (x A^T) B^T` of each layer, with gradients for x, A's and B's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[Any], *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *matrices)
        ctx.scalings = [next(iter(layer.scaling.values())) for layer in layers]
        weights, a, b = matrices[::3], matrices[1::3], matrices[2::3]
        wide_x, width = augmented_view(x), x.shape[-1]
        # One after another, the added columns hold each layer's `x A^T`.
        ranks = [len(one) for one in a]
        added = slice(width, width + sum(ranks))
        torch.mm(wide_x[:, :width], torch.cat(a).t(), out=wide_x[:, added])
        outputs = []
        for number, layer in enumerate(layers):
            wide_weight = augmented_view(weights[number])
            own_columns = torch.split(wide_weight[:, added], ranks, dim=1)[number]
            torch.mul(b[number], ctx.scalings[number], out=own_columns)
            output = functional.linear(wide_x, wide_weight, layer.base_layer.bias)
            outputs.append(_unflatten(output, x))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        weights, a, b = matrices[::3], matrices[1::3], matrices[2::3]
        wide_x, width = augmented_view(x), x.shape[-1]
        ranks = [len(one) for one in a]
        h = torch.split(wide_x[:, width : width + sum(ranks)], ranks, dim=1)
        grad_h = wide_x.new_empty(len(wide_x), sum(ranks))
        g = [gradient.reshape(len(wide_x), -1) for gradient in gradients]
        grad_b = []
        for number, part in enumerate(torch.split(grad_h, ranks, dim=1)):
            scaling = ctx.scalings[number]
            torch.addmm(part, g[number], b[number], beta=0, alpha=scaling, out=part)
            grad_b.append(torch.addmm(b[number], g[number].t(), h[number], beta=0, alpha=scaling))
        grad_x = None
        if ctx.needs_input_grad[0]:
            # The thin product first: the others accumulate into it.
            grad_x = _add_products(grad_h @ torch.cat(a), g, weights).view_as(x)
        grad_a = torch.split(grad_h.t() @ wide_x[:, :width], ranks)
        grad_matrices = [one for pair in zip(grad_a, grad_b, strict=True) for one in (None, *pair)]
        return grad_x, None, *grad_matrices


def _add_products(total: Tensor, g: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    for one, weight in zip(g, weights, strict=True):
        total.addmm_(one, weight)
    return total


# Trained matrices


def fuse_trained_projections(model: nn.Module) -> int:
    """Fuse the trained layers behind every norm of the blocks; returns how many.

    After `use_fp8`: groups whose layers all multiply in fp8 are fused in fp8.
    """
    count = 0
    for _, layers in _find_projection_groups(model):
        in_fp8 = {multiplies_in_fp8(layer) for layer in layers}
        if len(in_fp8) == 1 and all(type(layer) is nn.Linear for layer in layers):
            _fuse_group(layers, multiply_fused_projections if in_fp8.pop() else _multiply_trained)
            for layer in layers:
                # A bound method: a deep copy of the model binds it to the copied layer.
                layer.forward = MethodType(_forward_trained, layer)
            count += len(layers)
    return count


def _forward_trained(layer: Any, x: Tensor) -> Tensor:
    if multiplies_in_fp8(layer):
        is_suited = suits_trained(layer, x)
    else:
        is_cast = torch.is_autocast_enabled(x.device.type)
        is_suited = x.dtype is layer.weight.dtype and x.numel() > 0 and not is_cast
    if not is_suited:
        return nn.Linear.forward(layer, x)
    group: FusedProjections = layer.fused_projections
    return group.multiply(layer, x)


def _multiply_trained(x: Tensor, layers: list[Any]) -> tuple[Tensor, ...]:
    product: Any = _TrainedProducts
    parts = [part for layer in layers for part in (layer.weight, layer.bias)]
    outputs: tuple[Tensor, ...] = product.apply(x, *parts)
    return outputs


class _TrainedProducts(torch.autograd.Function):
    """`x W^T + bias` of each layer, with all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Tensor | None) -> tuple[Tensor, ...]:
        weights = parts[::2]
        ctx.save_for_backward(x, *weights)
        pairs: Any = zip(weights, parts[1::2], strict=True)
        return tuple(functional.linear(x, weight, bias) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad
        rows = x.reshape(-1, x.shape[-1])
        g = [gradient.reshape(len(rows), -1) for gradient in gradients]
        grad_x = None
        if needs_x:
            grad_x = _add_products(g[0] @ weights[0], g[1:], weights[1:]).view_as(x)
        grad_parts: list[Tensor | None] = []
        for number, one in enumerate(g):
            grad_parts.append(one.t() @ rows if needs[2 * number] else None)
            grad_parts.append(one.sum(0) if needs[2 * number + 1] else None)
        return grad_x, *grad_parts


# Fused LoRA


def fuse_lora(model: nn.Module) -> int:
    """Replace the forward of every LoRA layer that allows it; returns how many.

    After adapters are attached. Names, parameters and saved files stay peft's.
    """
    layers = [module for module in model.modules() if can_fuse_lora(module)]
    for layer in layers:
        # A bound method: a deep copy of the model binds it to the copied layer.
        layer.forward = MethodType(_forward_fused, layer)
    return len(layers)


def can_fuse_lora(module: nn.Module) -> bool:
    """Whether peft's forward of this module is just `base(x) + scaling * B(A(x))`.

    Not with dropout, DoRA and other variants, adapter biases, several adapters, trained base
    weights, or a base that is neither plain, 4-bit nor fp8.
    """
    if not _is_class_of(module, "peft.tuners.lora.", ("Linear", "Linear4bit")):
        return False
    layer: Any = module
    if len(layer.lora_A) != 1 or layer.lora_variant or any(layer.lora_bias.values()):
        return False
    if not all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
        return False
    base = layer.base_layer
    is_plain = type(base) in (nn.Linear, Fp8Linear) or _is_class_of(
        base, "transformers.", ("Conv1D",)
    )
    is_4bit = _is_class_of(base, "bitsandbytes.", ("Linear4bit",))
    is_trained = any(parameter.requires_grad for parameter in base.parameters())
    return (is_plain or is_4bit) and not is_trained


def _is_class_of(module: nn.Module, library: str, names: tuple[str, ...]) -> bool:
    """By name: the library may not be installed."""
    return type(module).__module__.startswith(library) and type(module).__name__ in names


def _forward_fused(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces peft's forward; falls back to it for calls that need more."""
    (name,) = layer.lora_A
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    base = layer.base_layer
    is_mixed = not x.dtype == a.dtype == b.dtype or torch.is_autocast_enabled(x.device.type)
    is_off = layer.disable_adapters or layer.merged or list(layer.active_adapters) != [name]
    if args or kwargs or is_mixed or is_off or not _computes_in(base, x.dtype):
        output: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return output
    group: FusedProjections | None = vars(layer).get(FUSED_PROJECTIONS)
    if group is not None and group.are_augmented(x):
        return group.multiply(layer, x)
    product: Any = _FusedLoraProduct
    y: Tensor = product.apply(x, base.weight, a, b, layer)
    return y


def _computes_in(base: Any, dtype: torch.dtype) -> bool:
    """Whether the base casts neither input nor output. Must not change between calls:
    recomputation has to take the same path."""
    # Quantized weights have a compute dtype beside their storage dtype.
    return vars(base).get("compute_dtype", base.weight.dtype) in (None, dtype)


class _FusedLoraProduct(torch.autograd.Function):
    """`x W^T + bias + scaling * (x A^T) B^T`, with gradients for x, A and B.

    Saves the weight as a parameter, so that FSDP can free and gather it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, layer: Any) -> Tensor:
        base = layer.base_layer
        (ctx.scaling,) = layer.scaling.values()
        scale = base.weight_scale if isinstance(base, Fp8Linear) else None
        rows = x.reshape(-1, x.shape[-1])
        h = rows @ a.t()
        if type(base) is nn.Linear:
            # The thin product first: the other accumulates into it.
            y = nn.functional.linear(h, b * ctx.scaling, base.bias).addmm_(rows, weight.t())
        else:
            y = _multiply_base(base, x).addmm_(h, b.t(), alpha=ctx.scaling)
        ctx.save_for_backward(x, weight, a, b, h, scale)
        # GPT-2's Conv1D stores its matrix transposed.
        ctx.is_transposed = not isinstance(base, nn.Linear)
        # Saved separately: a gathered weight has none until its module has run.
        ctx.quant_state = getattr(base.weight, "quant_state", None)
        return _unflatten(y, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, h, scale = ctx.saved_tensors
        gradient = gradients[0]
        needs_x, _, needs_a, needs_b, _ = ctx.needs_input_grad
        rows = x.reshape(-1, x.shape[-1])
        g = gradient.reshape(-1, gradient.shape[-1])
        grad_h = (g @ b).mul_(ctx.scaling)
        grad_b = (g.t() @ h).mul_(ctx.scaling) if needs_b else None
        grad_a = grad_h.t() @ rows if needs_a else None
        grad_x = None
        if needs_x and scale is None:
            grad_x = (grad_h @ a).addmm_(g, _matrix(weight, ctx, g.dtype)).view_as(x)
        elif needs_x:
            grad_x = multiply_back(g, weight, scale).addmm_(grad_h, a).view_as(x)
        return grad_x, None, grad_a, grad_b, None


def _multiply_base(base: Any, x: Tensor) -> Tensor:
    """The base's product for 4-bit and fp8 weights and Conv1D, as rows by outputs."""
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
