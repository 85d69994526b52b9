"""A model's transformer blocks, and plain layers in place of quantized ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    pass


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Every transformer block, encoder's before decoder's, in the order they run.

    A block is a `GradientCheckpointingLayer` of transformers; for families without one, the
    members of the largest ModuleList.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: list[nn.Module] = [
        m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    if not blocks:
        lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        blocks = max(
            lists, key=lambda ms: sum(p.numel() for m in ms for p in m.parameters()), default=[]
        )
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def find_decoder(model: Any) -> Any:
    """What text passes of a model that takes images or sound too; else the model itself."""
    config = model.config
    has_others = not config.is_encoder_decoder and config.get_text_config() is not config
    return model.get_decoder() if has_others else model


def list_other_parts(model: Any) -> list[str]:
    """Names of the modules that text does not pass: towers for images and sound, projectors."""
    decoder, head = find_decoder(model), model.get_output_embeddings()
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if child is decoder or child is head:
                continue
            if any(part is decoder for part in child.modules()):
                visit(child, f"{prefix}{name}.")
            else:
                found.append(f"{prefix}{name}")

    if decoder is not model:
        visit(model, "")
    return found


# Dequantized base: plain layers with the values that every step would dequantize again

_QUANTIZED_LAYER = "quantized_layer"
"""Attribute of a deferred layer: the quantized layer it replaces."""


def dequantize_base(model: nn.Module, *, is_deferred: bool = False) -> int:
    """Replace every 4-bit layer by a plain frozen one, and the codes of experts by their values;
    returns how many matrices.

    Call before adapters are attached. Dequantizes one layer at a time, so no more than one matrix
    is in memory twice. The model's config still says nf4, which the adapter was trained on.
    `is_deferred`: a layer keeps its codes until `take_matrix`, so that with fp8 storage the whole
    model is never in 16 bits.
    """
    from bitsandbytes.nn import Linear4bit

    from tightfit.runtime.packed_experts import unpack_all

    names = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    for name in names:
        model.set_submodule(
            name, _make_dequantized(model.get_submodule(name), is_deferred=is_deferred)
        )
    return len(names) + unpack_all(model)


def dequantize_deferred(model: nn.Module) -> None:
    """Dequantize the deferred layers whose matrix was not taken."""
    for module in model.modules():
        if _QUANTIZED_LAYER in vars(module):
            module.weight = nn.Parameter(take_matrix(module), requires_grad=False)


def take_matrix(layer: Any) -> Tensor:
    """The layer's matrix; a deferred one is dequantized now, and its codes are freed."""
    packed = vars(layer).pop(_QUANTIZED_LAYER, None)
    matrix: Tensor = layer.weight if packed is None else _dequantize(packed)
    return matrix


def is_dequantized(module: nn.Module) -> bool:
    """Whether this layer was quantized when it was loaded."""
    return "was_quantized" in vars(module)


def mark_dequantized(module: nn.Module) -> None:
    """Record that this layer replaces a quantized one."""
    vars(module)["was_quantized"] = True


def _make_dequantized(packed: Any, *, is_deferred: bool) -> nn.Linear:
    with torch.device("meta"):  # its weight is set below
        plain: Any = nn.Linear(packed.in_features, packed.out_features, bias=False)
    if is_deferred:
        # One value expanded to the matrix's shape: adapters take device and dtype from it.
        value = torch.zeros(1, dtype=packed.compute_dtype, device=packed.weight.device)
        values = value.expand(packed.out_features, packed.in_features)
        # In vars, not a submodule: it must not be listed or saved.
        vars(plain)[_QUANTIZED_LAYER] = packed
    else:
        values = _dequantize(packed)
    plain.weight = nn.Parameter(values, requires_grad=False)
    plain.bias = packed.bias
    mark_dequantized(plain)
    layer: nn.Linear = plain.train(packed.training)
    return layer


def _dequantize(packed: Any) -> Tensor:
    """The matrix of a quantized layer, which must not be used afterwards."""
    from bitsandbytes import functional

    dequantize: Any = functional.dequantize_4bit  # not annotated
    values: Tensor = dequantize(packed.weight.data, packed.weight.quant_state)
    packed.weight.module = None  # a reference cycle: codes would stay until garbage collection
    return values.to(packed.compute_dtype)
