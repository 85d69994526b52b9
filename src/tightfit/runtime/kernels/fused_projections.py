"""Layers that read the same rows (q, k, v; gate, up), computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

FUSED_PROJECTIONS = "fused_projections"
"""Attribute of a layer: the group that it is part of."""


def is_augmented(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.stride(0) > matrix.shape[1] and matrix.stride(1) == 1


class FusedProjections:
    """The first layer called computes the products of all; the others take their result."""

    def __init__(
        self, layers: list[Any], product: Callable[[Tensor, list[Any]], Sequence[Tensor]]
    ) -> None:
        self.layers = layers
        self._product = product
        self._x: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    def are_augmented(self, x: Tensor) -> bool:
        """Whether x and all matrices have added columns. Must not change between calls:
        recomputation has to take the same path."""
        if self._x is x:
            return True
        strides = x.reshape(-1, x.shape[-1]).stride()
        weights = [layer.base_layer.weight for layer in self.layers]
        # A model that was moved to another device has lost its added columns.
        return all(
            is_augmented(weight) and x.dtype == weight.dtype and strides == weight.stride()
            for weight in weights
        )

    def multiply(self, layer: Any, x: Tensor) -> Tensor:
        """The layer's output for x."""
        index = self.layers.index(layer)
        if self._x is not x or index not in self._results:
            self._x, self._results = x, dict(enumerate(self._product(x, self.layers)))
        result = self._results.pop(index)
        if not self._results:
            self._x = None
        return result
