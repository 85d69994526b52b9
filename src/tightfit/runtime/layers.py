"""A model's transformer blocks, and replacements of their layers: dequantized ones, Liger's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tightfit.core.errors import SetupError, UsageError
from tightfit.models.families.registry import find_family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


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
        blocks = max(lists, key=_count_parameters, default=[])
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def _count_parameters(modules: list[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


# Dequantized base: plain layers with the values that every step would dequantize again

_QUANTIZED_LAYER = "quantized_layer"
"""Attribute of a deferred layer: the quantized layer it replaces."""


def dequantize_base(model: nn.Module, *, is_deferred: bool = False) -> int:
    """Replace every 4-bit layer by a plain frozen one; returns how many.

    Call before adapters are attached. Dequantizes one layer at a time, so no more than one matrix
    is in memory twice. The model's config still says nf4, which the adapter was trained on.
    `is_deferred`: a layer keeps its codes until `take_matrix`, so that with fp8 storage the whole
    model is never in 16 bits.
    """
    from bitsandbytes.nn import Linear4bit

    names = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    for name in names:
        model.set_submodule(
            name, _make_dequantized(model.get_submodule(name), is_deferred=is_deferred)
        )
    return len(names)


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
    values = _placeholder(packed) if is_deferred else _dequantize(packed)
    plain.weight = nn.Parameter(values, requires_grad=False)
    if is_deferred:
        vars(plain)[_QUANTIZED_LAYER] = (
            packed  # in vars, not a submodule: it must not be listed or saved
        )
    plain.bias = packed.bias
    mark_dequantized(plain)
    layer: nn.Linear = plain.train(packed.training)
    return layer


def _placeholder(packed: Any) -> Tensor:
    """One value expanded to the matrix's shape: adapters take device and dtype from it."""
    value = torch.zeros(1, dtype=packed.compute_dtype, device=packed.weight.device)
    return value.expand(packed.out_features, packed.in_features)


def _dequantize(packed: Any) -> Tensor:
    """The matrix of a quantized layer, which must not be used afterwards."""
    from bitsandbytes import functional

    dequantize: Any = functional.dequantize_4bit  # not annotated
    values: Tensor = dequantize(packed.weight.data, packed.weight.quant_state)
    packed.weight.module = None  # a reference cycle: codes would stay until garbage collection
    return values.to(packed.compute_dtype)


# Fused kernels


def check_liger(config: PretrainedConfig) -> None:
    """Raise where Liger has nothing for the family."""
    kind = config.get_text_config().model_type
    if not find_family(kind).has_liger:
        raise UsageError(
            f"Liger has no fused kernels for {kind}.", remedy="--set fused_kernels=false"
        )


def apply_fused_kernels(model: PreTrainedModel) -> None:
    """Liger's fused norm, rotary embedding and gated MLP, and our norm kernel; not the loss.

    Call before adapters are attached. Liger patches rotary embeddings in the family's module, norms
    and MLPs in this instance only.
    """
    check_liger(model.config)
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise SetupError(
            "The plan's fused kernels need liger-kernel, which cannot be imported here.",
            remedy="pip install liger-kernel, or --set fused_kernels=false",
        ) from error
    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise SetupError(
            f"The installed liger-kernel has no kernels for {model.config.model_type}.",
            remedy="pip install -U liger-kernel, or --set fused_kernels=false",
        )
    apply: Any = monkey_patch._apply_liger_kernel_to_instance
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    from tightfit.runtime.kernels.norm_triton import use_triton_norms

    use_triton_norms(model)
