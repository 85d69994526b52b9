"""Attention implementations by name: which one a plan or an inference engine uses, and those that
transformers does not have.

`tightfit_repeat`: SDPA with repeated keys, for GPUs without a fused grouped-query kernel.
`tightfit_varlen`: packed rows without a mask, document by document.
`tightfit_window`: rows that are not packed, without a mask, windows included.
`tightfit_causal`, `tightfit_causal_repeat`: those of families with an attention of their own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tightfit.core.attention import Attention, AttentionFeature
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UsageError, first_line
from tightfit.core.strategy import Strategy
from tightfit.models.attention import (
    AttentionNeeds,
    find_attention_problem,
    find_flash_problem,
    find_sdpa_problem,
    find_varlen_problem,
    needs_of,
)
from tightfit.models.config import read_config
from tightfit.models.families.registry import find_family
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig


# Varlen kernels: attention over documents laid end to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where documents begin and end in a batch laid out as one row."""

    offsets: torch.Tensor
    """int32, one more than there are documents: 0, end of the first, ..., number of tokens."""
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenCall:
    """One attention over documents. Tensors are [tokens, heads, head_dim]."""

    bounds: Bounds
    scale: float | None = None
    window: int | None = None
    """Tokens a query sees, itself included. None: all before it."""
    softcap: float | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """A kernel and what it can do."""

    run: Callable[..., Any]
    is_flash_attn: bool
    """The flash-attn package's calling convention instead of torch's."""
    has_scale: bool
    has_grouped_heads: bool
    features: frozenset[AttentionFeature]
    """What it computes besides a causal softmax."""


def find_bounds(position_ids: torch.Tensor) -> Bounds:
    """Document bounds of `[rows, tokens]` positions, which restart where a document begins.

    A document never spans two rows. Positions need not start at zero: a document
    ends where the next position is not one more.
    """
    import torch

    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    offsets = starts.reshape(-1).nonzero().reshape(-1).to(torch.int32)
    end = offsets.new_tensor([position_ids.numel()])
    offsets = torch.cat([offsets, end])
    return Bounds(offsets=offsets, longest=int(offsets.diff().max()))


def find_varlen_kernel(
    features: frozenset[AttentionFeature] = frozenset(),
) -> VarlenKernel | None:
    """The kernel that computes `features`: torch's own, else the flash-attn package's.

    Where neither does, the first that is there; None where this machine has none.
    """
    found = [kernel for kernel in (_find_torch_kernel(), _find_flash_attn()) if kernel is not None]
    able = [kernel for kernel in found if features <= kernel.features]
    return next(iter(able or found), None)


@lru_cache(maxsize=1)
def _find_torch_kernel() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return VarlenKernel(
        run=varlen_attn,
        is_flash_attn=False,
        # torch 2.10 has `is_causal` alone; 2.11 a scale and a window; 2.12 grouped heads.
        has_scale="scale" in known,
        has_grouped_heads="enable_gqa" in known,
        features=Attention.FLASH.record.features if "window_size" in known else frozenset(),
    )


@lru_cache(maxsize=1)
def _find_flash_attn() -> VarlenKernel | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    features = Attention.FLASH.record.package_features
    if "softcap" not in inspect.signature(flash_attn_varlen_func).parameters:  # older versions
        features = features - {AttentionFeature.SOFTCAP}
    return VarlenKernel(
        run=flash_attn_varlen_func,
        is_flash_attn=True,
        has_scale=True,
        has_grouped_heads=True,
        features=features,
    )


def require_varlen_kernel(
    features: frozenset[AttentionFeature] = frozenset(),
) -> VarlenKernel:
    kernel = find_varlen_kernel(features)
    if kernel is None:
        raise SetupError(
            "Attention over packed documents needs torch 2.10 or the flash-attn package.",
            remedy="pip install -U torch, or --set attention=sdpa",
        )
    return kernel


def run_varlen_kernel(
    kernel: VarlenKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: VarlenCall,
) -> torch.Tensor:
    """Causal attention inside each document; repeats grouped keys if the kernel needs it."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not kernel.has_grouped_heads:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    # (tokens back, tokens ahead), -1 for no limit; the query itself is not counted.
    window = (-1 if call.window is None else call.window - 1, 0)
    options: dict[str, Any] = {}
    if kernel.is_flash_attn:
        options = {"softmax_scale": call.scale, "causal": True, "window_size": window}
        options["dropout_p"] = call.dropout
        if call.softcap is not None:
            options["softcap"] = call.softcap
    else:
        if kernel.has_scale:
            options["scale"] = call.scale
        elif call.scale is not None:
            # The kernel divides by sqrt(head_dim); any other scale is applied to the query.
            query = query * (call.scale * query.shape[-1] ** 0.5)
        if AttentionFeature.WINDOW in kernel.features:
            options["window_size"] = window
        else:
            options["is_causal"] = True
        if kernel.has_grouped_heads:
            options["enable_gqa"] = groups > 1
    offsets, longest = call.bounds.offsets, call.bounds.longest
    output: torch.Tensor = kernel.run(
        query, key, value, offsets, offsets, longest, longest, **options
    )
    return output


REPEAT = "tightfit_repeat"
VARLEN = "tightfit_varlen"
WINDOW = "tightfit_window"
FLASH_ATTN_2 = Attention.FLASH.implementation_name
"""transformers' own name for the flash-attn package."""
CAUSAL = "tightfit_causal"
"""SDPA without a mask, or flex attention with a bias by distance: `own_attention.py`."""
CAUSAL_REPEAT = "tightfit_causal_repeat"
"""`tightfit_repeat` without a mask."""
PACKED = "tightfit_packed"
"""Not an implementation: `tightfit_varlen` if the family allows it, else SDPA's block mask."""


def choose_attention_name(strategy: Strategy, *, has_varlen: bool | None = None) -> str:
    """The name of the plan's attention, which `resolve_attention` then fits to the family.

    `has_varlen`: whether the GPU has a varlen kernel. None: ask this machine.
    """
    if strategy.attention is Attention.FLASH:
        # transformers' own flash path separates documents only in batches of one row.
        if strategy.packing:
            return VARLEN
        return FLASH_ATTN_2 if _has_flash_attn() else WINDOW
    if strategy.attention is not Attention.SDPA:
        return strategy.attention.implementation_name
    if has_varlen is None:
        has_varlen = _has_varlen_device()
    if strategy.packing and strategy.compute is not Dtype.FP32 and has_varlen:
        return PACKED
    return REPEAT if strategy.repeat_keys else "sdpa"


def resolve_attention(config: PretrainedConfig, name: str) -> str:
    """The implementation to use for this family.

    Raises UsageError where the plan's attention cannot do what the family needs; the word
    `tightfit_packed` asks for less, and falls back.
    """
    needs = read_needs(config)
    sdpa_problem = find_sdpa_problem(needs)
    if name in ("sdpa", REPEAT) and sdpa_problem is not None:
        raise UsageError(
            f"sdpa attention cannot run {config.model_type}: {sdpa_problem}.",
            remedy="--set attention=eager",
        )
    if name == REPEAT and not needs.family.accepts_custom_attention:
        return "sdpa"
    if name == REPEAT and needs.family.own_attention:
        name = CAUSAL_REPEAT
    has_bias = AttentionFeature.ALIBI in needs.features
    if name == "sdpa" and needs.family.own_attention and not has_bias:
        return CAUSAL
    if name == FLASH_ATTN_2:
        problem = find_flash_problem(needs, is_packed=False)
    elif name in (PACKED, VARLEN, WINDOW):
        problem = find_varlen_obstacle(config, find_varlen_kernel(needs.features))
    else:
        for kind in _list_own():
            own_problem = find_attention_problem(kind, needs, is_packed=False)
            if kind.implementation_name == name and own_problem is not None:
                raise UsageError(
                    f"{kind.value} attention cannot run {config.model_type}: {own_problem}.",
                    remedy="--set attention=eager",
                )
        is_causal = needs.family.own_attention and name == Attention.FLEX.implementation_name
        return CAUSAL if is_causal else name
    if problem is None:
        return VARLEN if name == PACKED else name
    fallback = "sdpa" if sdpa_problem is None else "eager"
    if name == PACKED:
        return fallback
    raise UsageError(
        f"Flash attention cannot run {config.model_type}: {problem}.",
        remedy=f"--set attention={fallback}",
    )


def _list_own() -> list[Attention]:
    return [kind for kind in Attention if kind.record.is_own]


def find_varlen_obstacle(config: PretrainedConfig, kernel: VarlenKernel | None) -> str | None:
    """Why this family cannot use varlen attention on this machine, or None."""
    if kernel is None:
        return "this torch has no kernel for it (2.10 has), and flash-attn is not installed"
    return find_varlen_problem(read_needs(config), kernel.features)


def read_needs(config: PretrainedConfig) -> AttentionNeeds:
    """What the loaded config needs of an attention kernel, as the planner reads it."""
    needs = needs_of(read_loaded_config(config.get_text_config()))
    if needs.family.is_known:
        return needs
    return replace(needs, family=_read_family(config, needs.family))


def read_loaded_config(text: PretrainedConfig) -> ModelSpec:
    """The sizes of a loaded model whose family has a reader, as the planner reads them."""
    values = json.loads(text.to_json_string(use_diff=False))
    return read_config(values, name=text.model_type, source="the loaded config")


def _read_family(config: PretrainedConfig, family: Family) -> Family:
    """What the model class of a family without a record says of itself.

    Families that transformers does not list are let try.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    model_class = known.get(type(config), None)
    if model_class is None:
        return family
    return replace(
        family,
        has_sdpa=bool(getattr(model_class, "_supports_sdpa", False)),
        has_flash=bool(getattr(model_class, "_supports_flash_attn", False)),
        accepts_custom_attention=bool(model_class._can_set_attn_implementation()),
    )


def check_packable(model: nn.Module) -> None:
    """Raise if the family ignores positions: it would read packed rows as one document."""
    config: Any = model.config
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    check_packing(config, takes_positions=takes_positions)


def check_packing(config: PretrainedConfig, *, takes_positions: bool = True) -> None:
    """The same of a config."""
    needs = read_needs(config)
    if not needs.can_pack or not (takes_positions or needs.family.alibi == "always"):
        raise UsageError(
            f"{config.model_type} models cannot keep packed documents apart.",
            remedy="--set packing=false",
        )


def needs_padding_mask(config: PretrainedConfig) -> bool:
    """Whether tokens would attend to padding on their right without a mask.

    Those of a causal decoder do not. Positions are the same with and without a mask, also for
    families that count them by the mask (OPT, BLOOM and Falcon with ALiBi), and experts see each
    token alone. Does not hold for padding on the left, as in generation.
    """
    text = config.get_text_config()
    return bool(
        config.is_encoder_decoder
        or not find_family(config.model_type).is_causal
        or not getattr(text, "is_causal", True)
        or getattr(text, "use_bidirectional_attention", False)
    )


def register_attention() -> None:
    """Register our implementations with transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from tightfit.runtime import own_attention
    from tightfit.runtime.decoding import SLOTS, slot_attention
    from tightfit.runtime.window_attention import window_attention

    implementations: dict[str, Any] = {
        REPEAT: repeat_attention,
        VARLEN: varlen_attention,
        WINDOW: window_attention,
        SLOTS: slot_attention,
        CAUSAL: own_attention.causal_attention,
        CAUSAL_REPEAT: repeat_attention,
    }
    masks: dict[str, Any] = {
        VARLEN: _no_mask,
        WINDOW: _no_mask,
        CAUSAL: own_attention.make_mask,
        CAUSAL_REPEAT: own_attention.make_mask,
    }
    for kind in _list_own():
        implementations[kind.implementation_name] = _find_function(kind.record.implementation)
        masks[kind.implementation_name] = _find_function(kind.record.mask)
    for name, attend in implementations.items():
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, masks.get(name, sdpa_mask))


def _find_function(address: str) -> Any:
    module, _, function = address.partition(":")
    return getattr(import_module(module), function)


def repeat_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention after repeating grouped keys, mask or no mask.

    With `enable_gqa` torch has a fused kernel only for 16-bit dtypes on Ampere and later; elsewhere
    it materializes the whole score matrix (torch 2.11, sdp_utils.cpp).
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = getattr(module, "num_key_value_groups", 1)
    # transformers repeats keys itself if the module says that they are grouped.
    ungrouped: Any = SimpleNamespace(
        num_key_value_groups=1,
        is_causal=getattr(module, "is_causal", True),
        layer_idx=getattr(module, "layer_idx", None),
    )
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        ungrouped,
        query,
        repeat_kv(key, groups),
        repeat_kv(value, groups),
        attention_mask,
        **kwargs,
    )
    return output


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document of `[rows, heads, tokens, head_dim]` tensors.

    Documents begin where `position_ids` restart.
    Padding at a row's end needs no mask: tokens before it never attend to it.
    """
    import torch

    kernel = _check_call(module, query, key, attention_mask, kwargs)
    num_rows, _, num_tokens, head_dim = query.shape
    # Under autocast its dtype (rotary embeddings return fp32), else the values' own.
    on = query.device.type
    dtype = torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else value.dtype
    flat = [  # [rows, heads, tokens, width] to [rows * tokens, heads, width]
        x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]).to(dtype) for x in (query, key, value)
    ]
    if value.shape[-1] != head_dim:  # the kernel requires values as wide as keys
        flat[2] = torch.nn.functional.pad(flat[2], [0, head_dim - value.shape[-1]])
    call = VarlenCall(
        bounds=_cached_bounds(kwargs.get("position_ids"), num_rows),
        scale=kwargs.get("scaling"),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        dropout=kwargs.get("dropout", 0.0),
    )
    output = run_varlen_kernel(kernel, flat[0], flat[1], flat[2], call)
    output = output[..., : value.shape[-1]]
    return output.reshape(num_rows, num_tokens, *output.shape[1:]), None


def _check_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> VarlenKernel:
    """The kernel for this call; what it would get silently wrong is refused here."""
    asked = {
        AttentionFeature.SOFTCAP: (kwargs.get("softcap") is not None, "capped logits"),
        AttentionFeature.WINDOW: (kwargs.get("sliding_window") is not None, "a window"),
        AttentionFeature.DROPOUT: (kwargs.get("dropout", 0.0) > 0, "attention dropout"),
    }
    features = frozenset(feature for feature, (is_asked, _) in asked.items() if is_asked)
    kernel = require_varlen_kernel(features)
    is_causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    limits = [
        (attention_mask is not None, "a mask of its own"),
        (query.shape[2] != key.shape[2], "a key-value cache"),
        (not causal, "attention both ways"),
        (kwargs.get("position_bias") is not None, "a position bias"),
        (kwargs.get("s_aux") is not None, "attention sinks"),
        *((True, asked[feature][1]) for feature in features - kernel.features),
    ]
    found = next((what for is_limit, what in limits if is_limit), None)
    if found is not None:
        raise UsageError(
            f"Flash attention over packed documents cannot do {found}.",
            remedy="--set attention=sdpa",
        )
    return kernel


def _cached_bounds(position_ids: torch.Tensor | None, num_rows: int) -> Bounds:
    """`find_bounds`, once per batch: all layers get the same tensor of positions."""
    if position_ids is None:
        raise UsageError(
            "This model family does not hand positions to its attention.",
            remedy="--set attention=sdpa",
        )
    known: Bounds | None = getattr(position_ids, "_tightfit_bounds", None)
    if known is None or known.offsets.device != position_ids.device:
        # transformers passes one row of positions if all rows have the same.
        known = find_bounds(position_ids.expand(num_rows, -1))
        position_ids._tightfit_bounds = known  # type: ignore[attr-defined]
    return known


def _no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """No mask; raises for padding on the left, which the kernel would attend to."""
    if attention_mask is not None and not bool(attention_mask[:, 0].all()):
        raise InvalidInputError(
            "Rows are padded on the left, which flash attention without a mask would attend to.",
            remedy="--set attention=sdpa",
        )


def _has_flash_attn() -> bool:
    from transformers.utils import import_utils

    return bool(import_utils.is_flash_attn_2_available())


def _has_varlen_device() -> bool:
    """Ampere or later, with a kernel for it."""
    import torch

    if not torch.cuda.is_available() or find_varlen_kernel() is None:
        return False
    return bool(torch.cuda.get_device_capability() >= (8, 0))


# Attention for inference


def read_model_config(folder: Path) -> PretrainedConfig:
    """The folder's config, as transformers reads it."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"transformers cannot read {folder / 'config.json'}: {first_line(error)}.",
            remedy="name a model of a family that transformers knows: tightfit models",
        ) from error
    return config


def choose_inference_attention(folder: Path) -> str:
    """`sdpa`, or `eager` for a family without SDPA or with a softcap, which SDPA lacks.

    Varlen attention has no key-value cache, so it is never used for inference.
    """
    return name_inference_attention(read_model_config(folder))


def name_inference_attention(config: PretrainedConfig) -> str:
    """The same for a config."""
    return "sdpa" if find_sdpa_problem(read_needs(config)) is None else "eager"
