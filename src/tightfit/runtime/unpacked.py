"""An nf4 base unpacked once: plain layers with the very values that every step would unpack."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def unpack_base(model: nn.Module) -> int:
    """Put a plain, frozen layer in the place of each that is packed in 4 bits; how many were.

    Before adapters are attached. One at a time, so that no more than one matrix is there twice.
    What the model says of itself stays: it is still the nf4 base that the adapter belongs to.
    """
    from bitsandbytes.nn import Linear4bit

    packed = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    for name in packed:
        model.set_submodule(name, _unpack(model.get_submodule(name)))
    return len(packed)


def is_unpacked(module: nn.Module) -> bool:
    """Whether this layer was packed when it was loaded."""
    return "was_packed" in vars(module)


def mark_unpacked(module: nn.Module) -> None:
    """Note that this layer was: whatever stands in its place."""
    vars(module)["was_packed"] = True


def _unpack(packed: Any) -> nn.Linear:
    from bitsandbytes import functional

    dequantize: Any = functional.dequantize_4bit  # not annotated
    values = dequantize(packed.weight.data, packed.weight.quant_state).to(packed.compute_dtype)
    with torch.device("meta"):  # the matrix is here already
        plain: Any = nn.Linear(packed.in_features, packed.out_features, bias=False)
    plain.weight = nn.Parameter(values, requires_grad=False)
    plain.bias = packed.bias
    mark_unpacked(plain)
    layer: nn.Linear = plain.train(packed.training)
    return layer
