"""A model's transformer blocks, and what replaces their layers before training: Liger's fused
kernels, and a dequantized nf4 base.
"""

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

    A block is what transformers can checkpoint (`GradientCheckpointingLayer`);
    where a family has none, the members of its largest ModuleList are taken.
    """
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: list[nn.Module] = [
        m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    if not blocks:
        lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        blocks = max(lists, key=_count_values, default=[])
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def _count_values(modules: list[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


# An nf4 base unpacked once: plain layers with the very values that every step would unpack.

_QUANTIZED_LAYER = "packed_layer"
"""Under which a layer that waits keeps the one it stands in for."""


def dequantize_base(model: nn.Module, *, waits: bool = False) -> int:
    """Put a plain, frozen layer in the place of each that is packed in 4 bits; how many were.

    Before adapters are attached. One at a time, so that no more than one matrix is there twice.
    What the model says of itself stays: it is still the nf4 base that the adapter belongs to.
    A layer that waits keeps its codes until its matrix is taken: fp8 never has all of them plain.
    """
    from bitsandbytes.nn import Linear4bit

    packed = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    for name in packed:
        model.set_submodule(name, _make_dequantized(model.get_submodule(name), waits=waits))
    return len(packed)


def dequantize_deferred(model: nn.Module) -> None:
    """What `dequantize_base` would have done at once, for layers that still wait."""
    for module in model.modules():
        if _QUANTIZED_LAYER in vars(module):
            module.weight = nn.Parameter(take_matrix(module), requires_grad=False)


def take_matrix(layer: Any) -> Tensor:
    """A plain layer's matrix; of one that waits it is unpacked now, and its codes are gone."""
    packed = vars(layer).pop(_QUANTIZED_LAYER, None)
    matrix: Tensor = layer.weight if packed is None else _dequantize(packed)
    return matrix


def is_dequantized(module: nn.Module) -> bool:
    """Whether this layer was packed when it was loaded."""
    return "was_packed" in vars(module)


def mark_dequantized(module: nn.Module) -> None:
    """Note that this layer was: whatever stands in its place."""
    vars(module)["was_packed"] = True


def _make_dequantized(packed: Any, *, waits: bool) -> nn.Linear:
    with torch.device("meta"):  # the matrix is here already
        plain: Any = nn.Linear(packed.in_features, packed.out_features, bias=False)
    values = _placeholder(packed) if waits else _dequantize(packed)
    plain.weight = nn.Parameter(values, requires_grad=False)
    if waits:
        vars(plain)[_QUANTIZED_LAYER] = packed  # no module of the model's any more
    plain.bias = packed.bias
    mark_dequantized(plain)
    layer: nn.Linear = plain.train(packed.training)
    return layer


def _placeholder(packed: Any) -> Tensor:
    """One value, as often as the matrix has any: device and dtype are what adapters go by."""
    value = torch.zeros(1, dtype=packed.compute_dtype, device=packed.weight.device)
    return value.expand(packed.out_features, packed.in_features)


def _dequantize(packed: Any) -> Tensor:
    """Unpacked, of a layer that is then done with."""
    from bitsandbytes import functional

    dequantize: Any = functional.dequantize_4bit  # not annotated
    values: Tensor = dequantize(packed.weight.data, packed.weight.quant_state)
    packed.weight.module = None  # the two hold each other: codes would wait for the collector
    return values.to(packed.compute_dtype)


# Fused kernels, Liger's and ours: the same model in fewer passes over memory.


def check_liger(config: PretrainedConfig) -> None:
    """Raise where Liger has nothing for the family."""
    kind = config.get_text_config().model_type
    if not find_family(kind).has_liger:
        raise UsageError(
            f"Liger has no fused kernels for {kind}.", remedy="--set fused_kernels=false"
        )


def apply_fused_kernels(model: PreTrainedModel) -> None:
    """Fused norm, rotary and gated MLP in this model. The loss stays as it is.

    Before adapters are attached. Rotary positions are patched in the family's
    module, which is how Liger does it; norms and MLPs in this instance alone.
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
