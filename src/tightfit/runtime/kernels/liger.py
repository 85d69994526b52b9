"""Liger's fused kernels, with our norm kernel in place of theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    with _keep_experts(model):
        apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    from tightfit.runtime.kernels.norm_triton import use_triton_norms

    use_triton_norms(model)


@contextmanager
def _keep_experts(model: PreTrainedModel) -> Iterator[None]:
    """Undo what Liger does to experts: `experts.py` has faster products, which a trace can follow.

    Qwen3-30B-A3B had not made a step after 199 s on one H200 (liger-kernel 0.8.5).
    """
    library = vars(sys.modules[type(model).__module__])
    classes = {name: value for name, value in library.items() if name.endswith(("Experts", "Moe"))}
    experts = [module for module in model.modules() if hasattr(module, "gate_up_proj")]
    experts = [module for module in experts if "gate_up_proj" in module._parameters]
    before = [dict(vars(module)) for module in experts]
    yield
    library.update(classes)
    for module, attributes in zip(experts, before, strict=True):
        vars(module).clear()
        vars(module).update(attributes)
