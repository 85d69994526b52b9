"""Readers: the layers that multiply one norm's output, joined to do it together.

What autograd would add up, gradients of the same x, is summed inside the products that they are
made of. Of adapters, `x A^T` is one product with all A's on top of each other, and so are its
gradients: each for itself would read x once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.estimate.spare_columns import SPARE_READERS
from tightfit.runtime.fp8_linear import multiplies_in_fp8, multiply_readers, suits_trained
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.spare_columns import has_room, leave_spare_columns, widen

READERS = "readers"
"""The attribute that leads from a layer to the group that it is part of."""


class Readers:
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
        return self._x is x or all(has_room(x, layer.base_layer.weight) for layer in self.layers)

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


def _find_beside(model: nn.Module) -> Iterator[tuple[Any, list[Any]]]:
    """Every norm of the blocks, and the layers that read it."""
    blocks: list[Any] = list(decoder_layers(model))
    for block in blocks:
        norms = (block.input_layernorm, block.post_attention_layernorm)
        owners = (block.self_attn, block.mlp)
        for norm, owner, names in zip(norms, owners, SPARE_READERS, strict=True):
            yield norm, [getattr(owner, name) for name in names]


def _join(layers: list[Any], product: Callable[[Tensor, list[Any]], Sequence[Tensor]]) -> None:
    readers = Readers(layers, product)
    for layer in layers:
        setattr(layer, READERS, readers)


# Adapters over frozen matrices


def join_adapters(model: nn.Module) -> int:
    """Join the adapted layers behind every norm of the blocks, with room to write; how many.

    After adapters are folded and norms have our kernels, where `leaves_spare_columns` says so.
    """
    count = 0
    for norm, beside in _find_beside(model):
        layers = [layer for layer in beside if _is_folded(layer)]
        if layers:
            total_rank = sum(len(_matrices(layer)[1]) for layer in layers)
            leave_spare_columns(norm, [layer.base_layer for layer in layers], total_rank=total_rank)
            _join(layers, _multiply_adapted)
            count += len(layers)
    return count


def _is_folded(layer: Any) -> bool:
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
        wide_x, width = widen(x), x.shape[-1]
        places = _find_places(width, a)
        torch.mm(wide_x[:, :width], torch.cat(a).t(), out=wide_x[:, width : places[-1].stop])
        answers = []
        for number, layer in enumerate(layers):
            wide_weight = widen(weights[number])
            torch.mul(b[number], ctx.scalings[number], out=wide_weight[:, places[number]])
            answer = functional.linear(wide_x, wide_weight, layer.base_layer.bias)
            answers.append(answer.view(*x.shape[:-1], answer.shape[-1]))
        return tuple(answers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        weights, a, b = matrices[::3], matrices[1::3], matrices[2::3]
        wide_x, width = widen(x), x.shape[-1]
        places = _find_places(width, a)
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


def _find_places(width: int, a: Sequence[Tensor]) -> list[slice]:
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


def join_trained(model: nn.Module) -> int:
    """Join the trained layers behind every norm of the blocks; how many.

    After some were given fp8 products: those that all have them are joined in fp8.
    """
    count = 0
    for _, layers in _find_beside(model):
        in_fp8 = {multiplies_in_fp8(layer) for layer in layers}
        if len(in_fp8) == 1 and all(type(layer) is nn.Linear for layer in layers):
            _join(layers, multiply_readers if in_fp8.pop() else _multiply_trained)
            for layer in layers:
                # A bound method, which a copy of the model binds to the copy's own layer.
                layer.forward = MethodType(_forward_trained, layer)
            count += len(layers)
    return count


def _forward_trained(layer: Any, x: Tensor) -> Tensor:
    suits = suits_trained if multiplies_in_fp8(layer) else _suits_plain
    if not suits(layer, x):
        return nn.Linear.forward(layer, x)
    readers: Readers = layer.readers
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
