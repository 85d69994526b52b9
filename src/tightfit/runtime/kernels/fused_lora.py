"""Fused LoRA: a LoRA layer as one product, and fused projections of layers that share an input.

`x W^T + (x A^T) (scaling B)^T` is one product of `[x, x A^T]` and the augmented weight
`[W, scaling B]`. The norm that makes x and the frozen matrix both leave columns for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.estimate.fused_projections import FUSED_PROJECTION_NAMES, count_augmented_columns
from tightfit.runtime.kernels.fp8 import (
    Fp8Linear,
    cast_input,
    multiplies_in_fp8,
    multiply_back,
    multiply_forward,
    multiply_fused_projections,
    suits_trained,
)
from tightfit.runtime.layers import decoder_layers

AUGMENTED_COLUMNS = "num_spare_columns"
"""The attribute that says how many a norm leaves."""


def augment_weights(norm: Any, linears: list[nn.Linear], *, total_rank: int) -> None:
    """Behind what the norm writes, and behind the matrices that read it."""
    num_spare = count_augmented_columns(total_rank)
    setattr(norm, AUGMENTED_COLUMNS, num_spare)
    for linear in linears:
        _append_zero_columns(linear, num_spare)
    # The wider copies do not fit where the matrices were; nor would most activations.
    if linears[0].weight.is_cuda:
        torch.cuda.empty_cache()


def _append_zero_columns(linear: nn.Linear, num_spare: int) -> None:
    """The same frozen matrix, with columns of zeros behind it."""
    num_outputs, num_inputs = linear.weight.shape
    wide = linear.weight.new_zeros(num_outputs, num_inputs + num_spare)
    wide[:, :num_inputs] = linear.weight.detach()
    linear.weight = nn.Parameter(wide[:, :num_inputs], requires_grad=False)


def is_augmented_like(x: Tensor, weight: Tensor) -> bool:
    """Whether this input was made with the spare columns that the matrix has.

    A model that was moved to another device has lost them.
    """
    if not is_augmented(weight) or x.dtype != weight.dtype:
        return False
    return bool(x.reshape(-1, x.shape[-1]).stride() == weight.stride())


def is_augmented(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.stride(0) > matrix.shape[1] and matrix.stride(1) == 1


def augmented_view(x: Tensor) -> Tensor:
    """Rows with the spare columns behind them.

    Through `data`: writing there must not count as a change of x, which others have saved.
    """
    rows = x.data.reshape(-1, x.shape[-1])
    width = rows.stride(0)
    return rows.as_strided((len(rows), width), (width, 1), rows.storage_offset())


# Readers: the layers that multiply one norm's output, joined to do it together.

FUSED_PROJECTIONS = "readers"
"""The attribute that leads from a layer to the group that it is part of."""


class FusedProjections:
    """Asked by the first of them, it multiplies for all; the others find their result waiting."""

    def __init__(
        self, layers: list[Any], product: Callable[[Tensor, list[Any]], Sequence[Tensor]]
    ) -> None:
        self.layers = layers
        self._product = product
        self._x: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def have_room(self, x: Tensor) -> bool:
        """Whether x and all matrices have spare columns. The same at every call, since recomputing
        must take the path that was taken first."""
        return self._x is x or all(
            is_augmented_like(x, layer.base_layer.weight) for layer in self.layers
        )

    def multiply(self, layer: Any, x: Tensor) -> Tensor:
        """The layer's output for x."""
        place = self.layers.index(layer)
        if self._x is not x or place not in self._waiting:
            answers = self._product(x, self.layers)
            self._x, self._waiting = x, dict(enumerate(answers))
        answer = self._waiting.pop(place)
        if not self._waiting:
            self._x = None
        return answer


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
    readers = FusedProjections(layers, product)
    for layer in layers:
        setattr(layer, FUSED_PROJECTIONS, readers)


# Adapters over frozen matrices


def fuse_lora_projections(model: nn.Module) -> int:
    """Join the adapted layers behind every norm of the blocks, with room to write; how many.

    After adapters are folded and norms have our kernels, where `leaves_spare_columns` says so.
    """
    count = 0
    for norm, beside in _find_projection_groups(model):
        layers = [layer for layer in beside if _is_fused_lora(layer)]
        if layers:
            total_rank = sum(len(_matrices(layer)[1]) for layer in layers)
            augment_weights(norm, [layer.base_layer for layer in layers], total_rank=total_rank)
            _fuse_group(layers, _multiply_adapted)
            count += len(layers)
    return count


def _is_fused_lora(layer: Any) -> bool:
    """Whether this is a folded adapter over a plain frozen matrix."""
    base = getattr(layer, "base_layer", None)
    return "forward" in vars(layer) and type(base) is nn.Linear


def _matrices(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    (name,) = layer.lora_A
    return layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight


def _multiply_adapted(x: Tensor, layers: list[Any]) -> tuple[Tensor, ...]:
    product: Any = _AdaptedProducts
    answers: tuple[Tensor, ...] = product.apply(
        x, layers, *(matrix for layer in layers for matrix in _matrices(layer))
    )
    return answers


class _AdaptedProducts(torch.autograd.Function):
    """`x W^T + bias + scaling * (x A^T) B^T` of each reader, with gradients for x, A's and B's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[Any], *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *matrices)
        ctx.scalings = [next(iter(layer.scaling.values())) for layer in layers]
        weights, a, b = matrices[::3], matrices[1::3], matrices[2::3]
        wide_x, width = augmented_view(x), x.shape[-1]
        places = _find_columns(width, a)
        torch.mm(wide_x[:, :width], torch.cat(a).t(), out=wide_x[:, width : places[-1].stop])
        answers = []
        for number, layer in enumerate(layers):
            wide_weight = augmented_view(weights[number])
            torch.mul(b[number], ctx.scalings[number], out=wide_weight[:, places[number]])
            answer = functional.linear(wide_x, wide_weight, layer.base_layer.bias)
            answers.append(answer.view(*x.shape[:-1], answer.shape[-1]))
        return tuple(answers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        weights, a, b = matrices[::3], matrices[1::3], matrices[2::3]
        wide_x, width = augmented_view(x), x.shape[-1]
        places = _find_columns(width, a)
        of_h = wide_x.new_empty(len(wide_x), places[-1].stop - width)
        g = [gradient.reshape(len(wide_x), -1) for gradient in gradients]
        of_b = []
        for number, place in enumerate(places):
            part, scaling = of_h[:, _behind(place, width)], ctx.scalings[number]
            torch.addmm(part, g[number], b[number], beta=0, alpha=scaling, out=part)
            h = wide_x[:, place]
            of_b.append(torch.addmm(b[number], g[number].t(), h, beta=0, alpha=scaling))
        of_x = None
        if ctx.needs_input_grad[0]:
            # The thin product first: the others then add to it in passing.
            of_x = _add_products(of_h @ torch.cat(a), g, weights).view_as(x)
        of_all = of_h.t() @ wide_x[:, :width]
        of_a = [of_all[_behind(place, width)] for place in places]
        of_matrices = [one for pair in zip(of_a, of_b, strict=True) for one in (None, *pair)]
        return of_x, None, *of_matrices


def _find_columns(width: int, a: Sequence[Tensor]) -> list[slice]:
    """The columns behind x that hold each reader's `x A^T`, one after another."""
    places, first = [], width
    for one in a:
        places.append(slice(first, first + len(one)))
        first += len(one)
    return places


def _behind(place: slice, width: int) -> slice:
    """Counted from the end of x."""
    return slice(place.start - width, place.stop - width)


def _add_products(total: Tensor, g: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    for one, weight in zip(g, weights, strict=True):
        total.addmm_(one, weight)
    return total


# Trained matrices


def fuse_trained_projections(model: nn.Module) -> int:
    """Join the trained layers behind every norm of the blocks; how many.

    After some were given fp8 products: those that all have them are joined in fp8.
    """
    count = 0
    for _, layers in _find_projection_groups(model):
        in_fp8 = {multiplies_in_fp8(layer) for layer in layers}
        if len(in_fp8) == 1 and all(type(layer) is nn.Linear for layer in layers):
            _fuse_group(layers, multiply_fused_projections if in_fp8.pop() else _multiply_trained)
            for layer in layers:
                # A bound method, which a copy of the model binds to the copy's own layer.
                layer.forward = MethodType(_forward_trained, layer)
            count += len(layers)
    return count


def _forward_trained(layer: Any, x: Tensor) -> Tensor:
    suits = suits_trained if multiplies_in_fp8(layer) else _suits_plain
    if not suits(layer, x):
        return nn.Linear.forward(layer, x)
    readers: FusedProjections = layer.readers
    return readers.multiply(layer, x)


def _suits_plain(layer: nn.Linear, x: Tensor) -> bool:
    is_cast = torch.is_autocast_enabled(x.device.type)
    return x.dtype is layer.weight.dtype and x.numel() > 0 and not is_cast


def _multiply_trained(x: Tensor, layers: list[Any]) -> tuple[Tensor, ...]:
    product: Any = _TrainedProducts
    parts = [part for layer in layers for part in (layer.weight, layer.bias)]
    answers: tuple[Tensor, ...] = product.apply(x, *parts)
    return answers


class _TrainedProducts(torch.autograd.Function):
    """`x W^T + bias` of each reader, with all gradients."""

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
        of_x = None
        if needs_x:
            of_x = _add_products(g[0] @ weights[0], g[1:], weights[1:]).view_as(x)
        of_parts: list[Tensor | None] = []
        for number, one in enumerate(g):
            of_parts.append(one.t() @ rows if needs[2 * number] else None)
            of_parts.append(one.sum(0) if needs[2 * number + 1] else None)
        return of_x, *of_parts


# Fused LoRA: a LoRA layer in as many passes over memory as its products need.


def fuse_lora(model: nn.Module) -> int:
    """Give every LoRA layer that allows it the folded product; how many did.

    After the adapters are attached. Names, parameters and what is saved stay peft's.
    """
    layers = [module for module in model.modules() if can_fuse_lora(module)]
    for layer in layers:
        # A bound method, which a copy of the model binds to the copy's own layer.
        layer.forward = MethodType(_forward_fused, layer)
    return len(layers)


def can_fuse_lora(module: nn.Module) -> bool:
    """Whether peft's forward of this module is base, plus B of A, times a number, and no more.

    Not so with dropout, DoRA and other variants, biases of adapters, several adapters, trained
    base weights, or a base whose matrix is neither plain nor packed in 4 bits or fp8.
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
    is_packed = _is_class_of(base, "bitsandbytes.", ("Linear4bit",))
    is_trained = any(parameter.requires_grad for parameter in base.parameters())
    return (is_plain or is_packed) and not is_trained


def _is_class_of(module: nn.Module, library: str, names: tuple[str, ...]) -> bool:
    """By name: most jobs have not all of these libraries."""
    return type(module).__module__.startswith(library) and type(module).__name__ in names


def _forward_fused(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of peft's forward, and peft's forward itself wherever a call asks for more."""
    (name,) = layer.lora_A
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    base = layer.base_layer
    is_mixed = not x.dtype == a.dtype == b.dtype or torch.is_autocast_enabled(x.device.type)
    is_off = layer.disable_adapters or layer.merged or list(layer.active_adapters) != [name]
    if args or kwargs or is_mixed or is_off or not _computes_in(base, x.dtype):
        answer: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return answer
    readers: FusedProjections | None = vars(layer).get(FUSED_PROJECTIONS)
    if readers is not None and readers.have_room(x):
        return readers.multiply(layer, x)
    product: Any = _FusedLoraProduct
    y: Tensor = product.apply(x, base.weight, a, b, layer)
    return y


def _computes_in(base: Any, dtype: torch.dtype) -> bool:
    """Whether the base neither casts its input nor its result. The same at every call, since
    recomputing must take the path that was taken first."""
    # Packed weights have a compute dtype beside the one they are stored in.
    return vars(base).get("compute_dtype", base.weight.dtype) in (None, dtype)


class _FusedLoraProduct(torch.autograd.Function):
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
