"""Readers: the adapted layers that multiply one norm's output, their adapters as one.

`x A^T` of all of them is one product with their A's on top of each other, and so are its gradients;
the gradient of x is summed inside the products that it is made of. Each for itself would read x
once more for its own A, forward and backward, and write a whole gradient of x for autograd to add.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.estimate.spare_columns import SPARE_READERS
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.spare_columns import has_room, leave_spare_columns, widen

READERS = "readers"
"""The attribute that leads from an adapted layer to the group that it is part of."""


def join_readers(model: nn.Module) -> int:
    """Join the adapted layers behind every norm of the blocks, with room to write; how many.

    After adapters are folded and norms have our kernels, where `leaves_spare_columns` says so.
    """
    count = 0
    for block in decoder_layers(model):
        for norm, beside in _find_beside(block):
            layers = [layer for layer in beside if _can_join(layer)]
            if layers:
                _join(norm, layers)
                count += len(layers)
    return count


def _find_beside(block: Any) -> Iterator[tuple[Any, list[Any]]]:
    norms = (block.input_layernorm, block.post_attention_layernorm)
    for norm, owner, names in zip(norms, (block.self_attn, block.mlp), SPARE_READERS, strict=True):
        yield norm, [getattr(owner, name) for name in names]


def _can_join(layer: Any) -> bool:
    """Whether this is a folded adapter over a plain frozen matrix."""
    base = getattr(layer, "base_layer", None)
    return "forward" in vars(layer) and type(base) is nn.Linear


def _join(norm: Any, layers: list[Any]) -> None:
    ranks = [len(a) for _, a, _ in map(_matrices, layers)]
    leave_spare_columns(norm, [layer.base_layer for layer in layers], total_rank=sum(ranks))
    readers = Readers(layers)
    for layer in layers:
        setattr(layer, READERS, readers)


class Readers:
    """Asked by the first of them, it multiplies for all; the others find their result waiting."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._x: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def have_room(self, x: Tensor) -> bool:
        """The same at every call, since recomputing must take the path that was taken first."""
        return self._x is x or all(has_room(x, layer.base_layer.weight) for layer in self.layers)

    def multiply(self, layer: Any, x: Tensor) -> Tensor:
        """The layer's output for x."""
        place = self.layers.index(layer)
        if self._x is not x or place not in self._waiting:
            matrices = [_matrices(one) for one in self.layers]
            product: Any = _ReadersProduct
            answers = product.apply(x, self, *(matrix for three in matrices for matrix in three))
            self._x, self._waiting = x, dict(enumerate(answers))
        answer = self._waiting.pop(place)
        if not self._waiting:
            self._x = None
        return answer


def _matrices(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    (name,) = layer.lora_A
    return layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight


class _ReadersProduct(torch.autograd.Function):
    """`x W^T + bias + scaling * (x A^T) B^T` of each reader, with gradients for x, A's and B's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, readers: Readers, *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *matrices)
        ctx.scalings = [next(iter(layer.scaling.values())) for layer in readers.layers]
        weights, a, b = matrices[::3], matrices[1::3], matrices[2::3]
        wide_x, width = widen(x), x.shape[-1]
        places = _find_places(width, a)
        torch.mm(wide_x[:, :width], torch.cat(a).t(), out=wide_x[:, width : places[-1].stop])
        answers = []
        for number, layer in enumerate(readers.layers):
            wide_weight = widen(weights[number])
            torch.mul(b[number], ctx.scalings[number], out=wide_weight[:, places[number]])
            answer = nn.functional.linear(wide_x, wide_weight, layer.base_layer.bias)
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
            of_x = of_h @ torch.cat(a)
            for one, weight in zip(g, weights, strict=True):
                of_x.addmm_(one, weight)
            of_x = of_x.view_as(x)
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
