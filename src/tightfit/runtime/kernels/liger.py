"""Liger's fused kernels, with our norm kernel in place of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightfit.core.errors import SetupError, UsageError
from tightfit.models.families.registry import find_family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


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
    options = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    if _has_stacked_experts(model):
        apply(model=model, **options, swiglu=False)
        _fuse_dense_mlps(model)
    else:
        apply(model=model, **options)
    from tightfit.runtime.kernels.norm_triton import use_triton_norms

    use_triton_norms(model)


def _has_stacked_experts(model: PreTrainedModel) -> bool:
    return any("gate_up_proj" in module._parameters for module in model.modules())


def _fuse_dense_mlps(model: PreTrainedModel) -> None:
    """Liger's gated MLP for a mixture's dense and shared layers alone.

    Its kernels for experts had not made a step after minutes (Qwen3-30B-A3B on one H200,
    liger-kernel 0.8.5), and it takes every layer of such a family for a mixture.
    """
    from liger_kernel.transformers import monkey_patch
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    patch_module: Any = monkey_patch._patch_swiglu_module
    for module in model.modules():
        parts: dict[str, Any] = dict(module.named_children())
        act = parts.get("act_fn", parts.get("activation_fn"))
        is_silu = type(act).__name__ in ("SiLU", "SiLUActivation")
        if is_silu and {"gate_proj", "up_proj", "down_proj"} <= parts.keys():
            patch_module(module, LigerSwiGLUMLP)
