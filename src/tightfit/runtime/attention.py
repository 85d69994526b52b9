"""Attention implementations by name: which one a plan or an inference engine uses, and those that
transformers does not have.

`tightfit_repeat`: SDPA with repeated keys, for GPUs without a fused grouped-query kernel.
`tightfit_varlen`: packed rows without a mask, document by document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UsageError
from tightfit.core.strategy import Attention, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig


# Attention over documents of varying length, laid end to end: bounds, and the kernel called.

_BOUNDS_ATTRIBUTE = "_tightfit_bounds"


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
    scale: float | None
    window: int | None
    """Tokens a query sees, itself included. None: all before it."""
    softcap: float | None
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """A kernel and what it can do."""

    run: Callable[..., Any]
    is_flash_attn: bool
    """The flash-attn package's calling convention instead of torch's."""
    has_scale: bool
    has_window: bool
    has_grouped_heads: bool
    has_softcap: bool
    has_dropout: bool


def find_bounds(position_ids: torch.Tensor) -> Bounds:
    """Document bounds of `[rows, tokens]` positions, which restart where a document begins.

    A document never spans two rows. Positions need not start at zero: a document
    ends where the next position is not one more.
    """
    import torch

    num_rows, num_columns = position_ids.shape
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    offsets = starts.reshape(-1).nonzero().reshape(-1).to(torch.int32)
    end = offsets.new_tensor([num_rows * num_columns])
    offsets = torch.cat([offsets, end])
    return Bounds(offsets=offsets, longest=int(offsets.diff().max()))


def varlen_inputs(position_ids: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for the model's forward, so that no layer has to find the bounds.

    Made where the batch still lies in host memory, they cost the GPU no wait. The
    names are those of transformers' FlashAttentionKwargs, which the models hand down.
    """
    bounds = find_bounds(position_ids)
    return {
        "cu_seq_lens_q": bounds.offsets,
        "cu_seq_lens_k": bounds.offsets,
        "max_length_q": bounds.longest,
        "max_length_k": bounds.longest,
    }


def cached_bounds(position_ids: torch.Tensor, num_rows: int) -> Bounds:
    """`find_bounds`, once per batch: every layer is handed the same tensor of positions."""
    known: Bounds | None = getattr(position_ids, _BOUNDS_ATTRIBUTE, None)
    if known is None or known.offsets.device != position_ids.device:
        # transformers passes one row of positions where all rows have the same.
        known = find_bounds(position_ids.expand(num_rows, -1))
        setattr(position_ids, _BOUNDS_ATTRIBUTE, known)
    return known


@lru_cache(maxsize=1)
def find_varlen_kernel() -> VarlenKernel | None:
    """torch's own kernel where this torch has one, else the flash-attn package's, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return _find_flash_attn()
    known = inspect.signature(varlen_attn).parameters
    return VarlenKernel(
        run=varlen_attn,
        is_flash_attn=False,
        # torch 2.10 has `is_causal` alone; 2.11 a scale and a window; 2.12 grouped heads.
        has_scale="scale" in known,
        has_window="window_size" in known,
        has_grouped_heads="enable_gqa" in known,
        has_softcap=False,
        has_dropout=False,
    )


def _find_flash_attn() -> VarlenKernel | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return VarlenKernel(
        run=flash_attn_varlen_func,
        is_flash_attn=True,
        has_scale=True,
        has_window=True,
        has_grouped_heads=True,
        has_softcap="softcap" in inspect.signature(flash_attn_varlen_func).parameters,
        has_dropout=True,
    )


def require_varlen_kernel() -> VarlenKernel:
    kernel = find_varlen_kernel()
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
    """Causal attention inside each document; grouped keys are repeated where a kernel must."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not kernel.has_grouped_heads:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    bounds = (call.bounds.offsets, call.bounds.offsets, call.bounds.longest, call.bounds.longest)
    run = _run_flash_attn if kernel.is_flash_attn else _run_torch
    return run(kernel, (query, key, value, *bounds), call)


def _run_torch(kernel: VarlenKernel, inputs: tuple[Any, ...], call: VarlenCall) -> torch.Tensor:
    options: dict[str, Any] = {}
    if kernel.has_scale:
        options["scale"] = call.scale
    elif call.scale is not None:
        # The kernel divides by the root of the width; what is asked for beyond goes in before.
        query = inputs[0] * (call.scale * inputs[0].shape[-1] ** 0.5)
        inputs = (query, *inputs[1:])
    if kernel.has_window:
        options["window_size"] = _kernel_window(call)
    else:
        options["is_causal"] = True
    if kernel.has_grouped_heads:
        options["enable_gqa"] = inputs[0].shape[1] != inputs[1].shape[1]
    output: torch.Tensor = kernel.run(*inputs, **options)
    return output


def _run_flash_attn(
    kernel: VarlenKernel, inputs: tuple[Any, ...], call: VarlenCall
) -> torch.Tensor:
    options: dict[str, Any] = {
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": _kernel_window(call),
        "dropout_p": call.dropout,
    }
    if call.softcap is not None:
        options["softcap"] = call.softcap
    output: torch.Tensor = kernel.run(*inputs, **options)
    return output


def _kernel_window(call: VarlenCall) -> tuple[int, int]:
    """(tokens back, tokens ahead), -1 for no limit; the query itself is not counted."""
    return (-1 if call.window is None else call.window - 1, 0)


REPEAT = "tightfit_repeat"
VARLEN = "tightfit_varlen"
PACKED = "tightfit_packed"
"""Not an implementation: `tightfit_varlen` where the family allows it, SDPA's block mask if not."""

_POSITION_BLIND = frozenset({"falcon", "opt"})
"""Families that take positions and make their masks without them, so that documents which share a
row see each other (transformers 5.22, `create_causal_mask` in their modeling files)."""

_NOT_CAUSAL = frozenset(
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
    """What the plan's attention is called; `resolve_attention` has the last word.

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


def resolve_attention(config: PretrainedConfig, name: str) -> str:
    """The implementation to use for this family.

    Raises UsageError where varlen attention was asked for and cannot do what the
    family needs; the word `tightfit_packed` asks for less, and falls back.
    """
    if name in ("sdpa", REPEAT) and not _supports(config, "_supports_sdpa"):
        raise UsageError(
            f"transformers has no sdpa attention for {config.model_type}.",
            remedy="--set attention=eager",
        )
    if name == REPEAT and not _accepts_custom_attention(config):
        return "sdpa"
    if name not in (PACKED, VARLEN):
        return name
    reason = find_varlen_obstacle(config, find_varlen_kernel())
    if reason is None:
        return VARLEN
    if name == PACKED:
        return "sdpa" if _supports(config, "_supports_sdpa") else "eager"
    raise UsageError(
        f"Flash attention cannot run {config.model_type}: {reason}.",
        remedy="--set attention=sdpa" if not _softcap(config) else "--set attention=eager",
    )


def find_varlen_obstacle(config: PretrainedConfig, kernel: VarlenKernel | None) -> str | None:
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
        (not _accepts_custom_attention(config), "its family knows its own attention alone"),
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
    is_blind = config.model_type in _POSITION_BLIND and config._attn_implementation != VARLEN
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
        or config.model_type in _NOT_CAUSAL
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
    AttentionMaskInterface.register(VARLEN, _no_mask)


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
    flat = [_flatten_rows(x, target) for x in (query, key, value)]
    if value.shape[-1] != head_dim:  # the kernel wants values as wide as keys
        flat[2] = torch.nn.functional.pad(flat[2], [0, head_dim - value.shape[-1]])
    call = VarlenCall(
        bounds=_bounds(kwargs, num_rows),
        scale=kwargs.get("scaling"),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        dropout=kwargs.get("dropout", 0.0),
    )
    output = run_varlen_kernel(require_varlen_kernel(), flat[0], flat[1], flat[2], call)
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
    kernel = require_varlen_kernel()
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


def _flatten_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
    return cached_bounds(position_ids, num_rows)


def _no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
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


def _accepts_custom_attention(config: PretrainedConfig) -> bool:
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

    if not torch.cuda.is_available() or find_varlen_kernel() is None:
        return False
    return bool(torch.cuda.get_device_capability() >= (8, 0))


# Which attention answers: torch's own, unless the family needs what that has not.

GROUPED_DECODE = "tightfit_folded"


def choose_inference_attention(folder: Path) -> str:
    """`sdpa`, or `eager` for a family without it or with capped scores, which it would not cap.

    The attention of packed training keeps no key-value cache, so it never answers.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInputError(
            f"transformers cannot read {folder / 'config.json'}: {lines[0].rstrip('.')}.",
            remedy="name a model of a family that transformers knows: tightfit models",
        ) from error
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return "eager"
    try:
        return resolve_attention(config, "sdpa")
    except UsageError:
        return "eager"


def register_grouped_decode() -> None:
    """Make the name known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(GROUPED_DECODE, grouped_decode_attention)
    AttentionMaskInterface.register(GROUPED_DECODE, sdpa_mask)


def grouped_decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' own `sdpa`, which it is for more than one token a row."""
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, num_new, width = query.shape
    num_shared = heads // key.shape[1]
    if num_new != 1 or num_shared == 1 or attention_mask is None:
        attend: Any = sdpa_attention_forward
        found: tuple[torch.Tensor, None] = attend(
            module, query, key, value, attention_mask, **options
        )
        return found
    output = scaled_dot_product_attention(
        query.view(rows, key.shape[1], num_shared, width),
        key,
        value,
        attn_mask=attention_mask.expand(-1, -1, num_shared, -1),
        scale=options.get("scaling"),
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None
