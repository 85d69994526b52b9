"""Fused kernels, Liger's and ours: the same model in fewer passes over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightfit.core.errors import EnvironmentFaultError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply_fused_kernels(model: PreTrainedModel) -> None:
    """Fused norm, rotary and gated MLP in this model. The loss stays as it is.

    Before adapters are attached. Rotary positions are patched in the family's
    module, which is how Liger does it; norms and MLPs in this instance alone.
    """
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as fault:
        raise EnvironmentFaultError(
            "The plan's fused kernels need liger-kernel, which cannot be imported here.",
            remedy="pip install liger-kernel, or --set fused_kernels=false",
        ) from fault
    kind = model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(
            f"Liger has no fused kernels for {kind}.", remedy="--set fused_kernels=false"
        )
    apply: Any = monkey_patch._apply_liger_kernel_to_instance
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    from tightfit.runtime.norm_kernels import quicken_norms

    quicken_norms(model)
