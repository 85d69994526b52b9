"""Attention by name: which one a plan means, and the two that transformers does not have.

`tightfit_repeat`: SDPA with repeated keys, for cards without a fused grouped kernel.
`tightfit_varlen`: packed rows without a mask, document by document.
Elsewhere packed rows get transformers' block mask, found from restarted positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.strategy import Attention, Strategy
from tightfit.runtime.varlen import (
    Bounds,
    VarlenCall,
    VarlenKernel,
    attend,
    find_kernel,
    recall_bounds,
    require_kernel,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

REPEAT = "tightfit_repeat"
VARLEN = "tightfit_varlen"
PACKED = "tightfit_packed"
"""Not an implementation: `tightfit_varlen` where the family allows it, SDPA's block mask if not."""

_BLIND_MASKS = frozenset({"falcon", "opt"})
"""Families that take positions and make their masks without them, so that documents which share a
row see each other (transformers 5.22, `create_causal_mask` in their modeling files)."""

_LOOKS_AHEAD = frozenset(
    {
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        *("git", "prophetnet", "reformer", "xlnet"),
        *("blt", "cohere_compass_text", "dbrx", "zamba", "zaya"),
    }
)
"""Families that transformers lists for causal models though their tokens see those behind them
unless the config says otherwise; then those that predict in ways of their own; then some of which
it is not known. All others there that can be made small had the same loss and gradients with a
mask for padding on the right and without it (transformers 5.22)."""

_DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attn_dropout")


def choose_attention_name(
    strategy: Strategy, *, is_packed: bool, has_varlen: bool | None = None
) -> str:
    """What the plan's attention is called; `fit_attention` has the last word.

    `has_varlen`: whether the card has a kernel for documents. None: as this machine's has.
    """
    if strategy.attention is Attention.EAGER:
        return "eager"
    if strategy.attention is Attention.FLASH:
        # transformers' own flash path sees documents only in batches of one row.
        return VARLEN if is_packed or not _has_flash_attn() else "flash_attention_2"
    if has_varlen is None:
        has_varlen = _has_varlen_device()
    if is_packed and strategy.compute is not Dtype.FP32 and has_varlen:
        return PACKED
    return REPEAT if strategy.repeat_keys else "sdpa"


def fit_attention(config: PretrainedConfig, name: str) -> str:
    """The implementation to use for this family.

    Raises UsageError where varlen attention was asked for and cannot do what the
    family needs; the word `tightfit_packed` asks for less, and falls back.
    """
    if name in ("sdpa", REPEAT) and not _supports(config, "_supports_sdpa"):
        raise UsageError(
            f"transformers has no sdpa attention for {config.model_type}.",
            remedy="--set attention=eager",
        )
    if name == REPEAT and not _takes_any(config):
        return "sdpa"
    if name not in (PACKED, VARLEN):
        return name
    reason = find_varlen_fault(config, find_kernel())
    if reason is None:
        return VARLEN
    if name == PACKED:
        return "sdpa" if _supports(config, "_supports_sdpa") else "eager"
    raise UsageError(
        f"Flash attention cannot run {config.model_type}: {reason}.",
        remedy="--set attention=sdpa" if not _softcap(config) else "--set attention=eager",
    )


def find_varlen_fault(config: PretrainedConfig, kernel: VarlenKernel | None) -> str | None:
    """Why this family cannot have varlen attention on this machine, or None."""
    if kernel is None:
        return "this torch has no kernel for it (2.10 has), and flash-attn is not installed"
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    limits = (
        (config.is_encoder_decoder, "it has an encoder and a decoder"),
        (
            not _supports(config, "_supports_flash_attn"),
            "its family does not hand down what the kernel needs",
        ),
        (not _takes_any(config), "its family knows its own attention alone"),
        (head_dim > 256 or head_dim % 8 != 0, f"its heads are {head_dim} wide"),
        (_softcap(text) and not kernel.has_softcap, "it caps attention logits"),
        (_window(text) and not kernel.has_window, "it attends in a window"),
        (_is_chunked(text), "it attends in chunks"),
        (text.model_type == "gpt_oss", "it has attention sinks"),
        (getattr(text, "use_bidirectional_attention", False), "it attends both ways"),
        (
            not kernel.has_dropout and any(getattr(text, f, 0) for f in _DROPOUT_FIELDS),
            "it drops attention weights while training",
        ),
    )
    return next((reason for is_limit, reason in limits if is_limit), None)


def check_packable(model: nn.Module) -> None:
    """Raise where packed rows would be read as one document: the family heeds no positions."""
    import inspect

    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    is_blind = config.model_type in _BLIND_MASKS and config._attn_implementation != VARLEN
    if config.is_encoder_decoder or "position_ids" not in names or is_blind:
        raise UsageError(
            f"{config.model_type} models cannot keep packed documents apart.",
            remedy="--set packing=false",
        )


def needs_padding_mask(config: PretrainedConfig) -> bool:
    """Whether a row's tokens would see the padding behind them if no mask hid it.

    Those of a causal decoder never do. Positions are the same with a mask and without, also where
    a family counts them by the mask (OPT, BLOOM and Falcon with ALiBi), and so are experts, which
    take each token for itself. Not for padding on the left, as generation has it.
    """
    text = config.get_text_config()
    return bool(
        config.is_encoder_decoder
        or config.model_type in _LOOKS_AHEAD
        or not getattr(text, "is_causal", True)
        or getattr(text, "use_bidirectional_attention", False)
    )


def register_attention() -> None:
    """Make both names known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(REPEAT, repeat_attention)
    AttentionMaskInterface.register(REPEAT, sdpa_mask)
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, _mask_nothing)


class _Ungrouped:
    """Stands in for an attention module whose keys have been repeated already."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self.is_causal = getattr(module, "is_causal", True)
        self.layer_idx = getattr(module, "layer_idx", None)


def repeat_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention after repeating grouped keys, mask or no mask.

    With `enable_gqa` torch has a fused kernel only in 16 bit on Ampere and later;
    elsewhere it would hold the whole score matrix (torch 2.11, sdp_utils.cpp).
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = getattr(module, "num_key_value_groups", 1)
    stand_in: Any = _Ungrouped(module)
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        stand_in,
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

    Bounds come from `cu_seq_lens_q`/`max_length_q` or from restarted `position_ids`.
    Padding at a row's end needs no mask: what comes before never looks at it.
    """
    import torch

    _check_call(module, query, key, attention_mask, kwargs)
    num_rows, _, num_tokens, head_dim = query.shape
    target = _kernel_dtype(query, value)
    flat = [_lay_end_to_end(x, target) for x in (query, key, value)]
    if value.shape[-1] != head_dim:  # the kernel wants values as wide as keys
        flat[2] = torch.nn.functional.pad(flat[2], [0, head_dim - value.shape[-1]])
    call = VarlenCall(
        bounds=_bounds(kwargs, num_rows),
        scale=kwargs.get("scaling"),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        dropout=kwargs.get("dropout", 0.0),
    )
    output = attend(require_kernel(), flat[0], flat[1], flat[2], call)
    output = output[..., : value.shape[-1]]
    return output.reshape(num_rows, num_tokens, *output.shape[1:]), None


def _check_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """What the kernel would get silently wrong is refused here."""
    kernel = require_kernel()
    is_causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    limits = (
        (attention_mask is not None, "a mask of its own"),
        (query.shape[2] != key.shape[2], "a key-value cache"),
        (not causal, "attention both ways"),
        (kwargs.get("position_bias") is not None, "a position bias"),
        (kwargs.get("s_aux") is not None, "attention sinks"),
        (kwargs.get("softcap") is not None and not kernel.has_softcap, "capped logits"),
        (kwargs.get("sliding_window") is not None and not kernel.has_window, "a window"),
        (kwargs.get("dropout", 0.0) > 0 and not kernel.has_dropout, "attention dropout"),
    )
    found = next((what for is_limit, what in limits if is_limit), None)
    if found is not None:
        raise UsageError(
            f"Flash attention over packed documents cannot do {found}.",
            remedy="--set attention=sdpa",
        )


def _lay_end_to_end(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[rows, heads, tokens, width] to [rows * tokens, heads, width]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]).to(dtype)


def _kernel_dtype(query: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """16 bit: autocast's where it is on (rotary positions come out in fp32), else the values'."""
    import torch

    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        dtype: torch.dtype = torch.get_autocast_dtype(device_type)
        return dtype
    return value.dtype


def _bounds(kwargs: dict[str, Any], num_rows: int) -> Bounds:
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is not None:
        return Bounds(offsets=offsets, longest=int(kwargs["max_length_q"]))
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        raise UsageError(
            "This model family does not hand positions to its attention.",
            remedy="--set attention=sdpa",
        )
    return recall_bounds(position_ids, num_rows)


def _mask_nothing(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """No mask, unless padding stands before a row's tokens, where a kernel would attend to it."""
    if attention_mask is not None and not bool(attention_mask[:, 0].all()):
        raise InvalidInputError(
            "Rows are padded on the left, which flash attention without a mask would attend to.",
            remedy="--set attention=sdpa",
        )


def _supports(config: PretrainedConfig, flag: str) -> bool:
    """A statement of the family's model class about itself. Unknown families are let try."""
    family = _find_family(config)
    return family is None or bool(getattr(family, flag, False))


def _takes_any(config: PretrainedConfig) -> bool:
    """Whether the family asks transformers for its attention by name, ours included."""
    family = _find_family(config)
    return family is None or bool(family._can_set_attn_implementation())


def _find_family(config: PretrainedConfig) -> Any:
    """The model class, or None for families that transformers does not list."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    kinds = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    known = kinds[0] if config.is_encoder_decoder else kinds[1]
    return known.get(type(config), None)


def _softcap(config: PretrainedConfig) -> bool:
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def _window(config: PretrainedConfig) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) is not None


def _is_chunked(config: PretrainedConfig) -> bool:
    return "chunked_attention" in (getattr(config, "layer_types", None) or ())


def _has_flash_attn() -> bool:
    from transformers.utils import import_utils

    return bool(import_utils.is_flash_attn_2_available())


def _has_varlen_device() -> bool:
    """Ampere or later, with a kernel for it."""
    import torch

    if not torch.cuda.is_available() or find_kernel() is None:
        return False
    return bool(torch.cuda.get_device_capability() >= (8, 0))
