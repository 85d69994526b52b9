"""LoRA on embeddings and head: one adapter where they are one matrix, and the head's matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftModel


class _Transposed(nn.Module):
    """A LoRA matrix of the head that is one of the embeddings', transposed.

    peft ties the two as parameters with one storage, each with a gradient and optimizer state of
    its own, so that one adapter would be updated twice.
    """

    def __init__(self, embeddings: Any, attribute: str, adapter: str) -> None:
        super().__init__()
        self._embeddings = (embeddings,)  # not as a part of this module
        self.attribute = attribute
        self._adapter = adapter

    @property
    def weight(self) -> Tensor:
        held: Tensor = getattr(self._embeddings[0], self.attribute)[self._adapter]
        return held.t()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


_SHARED = {"lora_A": "lora_embedding_B", "lora_B": "lora_embedding_A"}
"""Matrices of a tied head's adapter, and those of the embeddings' that they are transposed."""


def share_adapter(adapted: PeftModel) -> None:
    """One adapter for embeddings and head that are one matrix, as full tuning would have it."""
    embeddings: Any = adapted.get_input_embeddings()
    head: Any = adapted.get_output_embeddings()
    for name, attribute in _SHARED.items():
        held = getattr(head, name)
        for adapter in list(held):
            held[adapter] = _Transposed(embeddings, attribute, adapter)


def find_shared_head(model: Any) -> Any | None:
    """The head, where its adapter is the embeddings'."""
    head = model.get_output_embeddings()
    held = getattr(head, "lora_A", None) or {}
    return head if any(isinstance(part, _Transposed) for part in held.values()) else None


def list_shared_values(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The head's matrices, by peft's names, from the embeddings' values in `state`."""
    head: Any = find_shared_head(model)
    paths = {id(module): path for path, module in model.named_modules()}
    source = paths[id(model.get_input_embeddings())]
    found = {}
    for name, attribute in _SHARED.items():
        for adapter in getattr(head, name):
            value = state[f"{source}.{attribute}.{adapter}"]
            found[f"{paths[id(head)]}.{name}.{adapter}.weight"] = value.t().contiguous()
    return found


def head_weight(head: Any) -> Tensor:
    """The matrix that the head multiplies with, its adapter added where it has one."""
    if not getattr(head, "lora_A", None) or head.disable_adapters:
        weight: Tensor = head.weight
        return weight
    (name,) = head.active_adapters
    base = head.base_layer.weight
    a, b = (part[name].weight.to(base.dtype) for part in (head.lora_A, head.lora_B))
    return torch.addmm(base, b, a, alpha=head.scaling[name])
