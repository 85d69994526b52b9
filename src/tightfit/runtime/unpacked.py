"""An nf4 base unpacked once: plain layers with the very values that every step would unpack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_CODES = "packed_layer"
"""Under which a layer that waits keeps the one it stands in for."""


def unpack_base(model: nn.Module, *, waits: bool = False) -> int:
    """Put a plain, frozen layer in the place of each that is packed in 4 bits; how many were.

    Before adapters are attached. One at a time, so that no more than one matrix is there twice.
    What the model says of itself stays: it is still the nf4 base that the adapter belongs to.
    A layer that waits keeps its codes until its matrix is taken: fp8 never has all of them plain.
    """
    from bitsandbytes.nn import Linear4bit

    packed = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    for name in packed:
        model.set_submodule(name, _unpack(model.get_submodule(name), waits=waits))
    return len(packed)


def unpack_waiting(model: nn.Module) -> None:
    """What `unpack_base` would have done at once, for layers that still wait."""
    for module in model.modules():
        if _CODES in vars(module):
            module.weight = nn.Parameter(take_matrix(module), requires_grad=False)


def take_matrix(layer: Any) -> Tensor:
    """A plain layer's matrix; of one that waits it is unpacked now, and its codes are gone."""
    packed = vars(layer).pop(_CODES, None)
    matrix: Tensor = layer.weight if packed is None else _values_of(packed)
    return matrix


def is_unpacked(module: nn.Module) -> bool:
    """Whether this layer was packed when it was loaded."""
    return "was_packed" in vars(module)


def mark_unpacked(module: nn.Module) -> None:
    """Note that this layer was: whatever stands in its place."""
    vars(module)["was_packed"] = True


def _unpack(packed: Any, *, waits: bool) -> nn.Linear:
    with torch.device("meta"):  # the matrix is here already
        plain: Any = nn.Linear(packed.in_features, packed.out_features, bias=False)
    values = _stand_in(packed) if waits else _values_of(packed)
    plain.weight = nn.Parameter(values, requires_grad=False)
    if waits:
        vars(plain)[_CODES] = packed  # no module of the model's any more
    plain.bias = packed.bias
    mark_unpacked(plain)
    layer: nn.Linear = plain.train(packed.training)
    return layer


def _stand_in(packed: Any) -> Tensor:
    """One value, as often as the matrix has any: device and dtype are what adapters go by."""
    value = torch.zeros(1, dtype=packed.compute_dtype, device=packed.weight.device)
    return value.expand(packed.out_features, packed.in_features)


def _values_of(packed: Any) -> Tensor:
    """Unpacked, of a layer that is then done with."""
    from bitsandbytes import functional

    dequantize: Any = functional.dequantize_4bit  # not annotated
    values: Tensor = dequantize(packed.weight.data, packed.weight.quant_state)
    packed.weight.module = None  # the two hold each other: codes would wait for the collector
    return values.to(packed.compute_dtype)
