"""Families that can be written as GGUF, what llama.cpp assumes about each, and how it lays out
their tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.core.suggest import did_you_mean
from tightfit.core.validation import printable

if TYPE_CHECKING:
    from torch import Tensor


_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of transformers."""

    architecture: str
    """llama.cpp's name for it."""
    activations: tuple[str, ...]
    """llama.cpp hard-codes the activation; the file does not name it."""
    can_untie: bool = True
    """Whether llama.cpp reads an output matrix of its own."""
    name_of: Callable[[str], str] = str
    """From the names in old checkpoints to those in gguf's tensor map."""


def _with_prefix(name: str) -> str:
    is_bare = not name.startswith(("transformer.", "lm_head."))
    return f"transformer.{name}" if is_bare else name


def _without_prefix(name: str) -> str:
    return name.removeprefix("transformer.")


FAMILIES = {
    "llama": Family(architecture="llama", activations=_SILU),
    "mistral": Family(architecture="llama", activations=_SILU),
    "qwen2": Family(architecture="qwen2", activations=_SILU),
    "qwen3": Family(architecture="qwen3", activations=_SILU),
    "gemma": Family(architecture="gemma", activations=(*_GELU_TANH, "gelu"), can_untie=False),
    "gemma2": Family(architecture="gemma2", activations=_GELU_TANH, can_untie=False),
    "gemma3_text": Family(architecture="gemma3", activations=_GELU_TANH),
    "phi3": Family(architecture="phi3", activations=_SILU),
    "gpt2": Family(architecture="gpt2", activations=_GELU_TANH, name_of=_with_prefix),
    # llama.cpp has the tanh form of GELU where Falcon has the exact one: 1e-3 apart at most.
    "falcon": Family(architecture="falcon", activations=("gelu",), name_of=_with_prefix),
    "bloom": Family(architecture="bloom", activations=("gelu",), name_of=_without_prefix),
}


def find_family(folder: Path) -> tuple[str, Family]:
    """The family of a model folder; raises if it cannot be converted."""
    config = _read_config(folder)
    model_type = str(config.get("model_type", ""))
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        shown = printable(model_type) or "no model_type"
        raise InvalidInputError(
            f"{folder} is of the family {shown}, which cannot be written as GGUF here."
            f"{did_you_mean(model_type, FAMILIES)}",
            remedy=f"name a model of one of: {known}",
        )
    if config.get("quantization_config"):
        raise InvalidInputError(
            f"{folder} is quantized, and its values cannot be had back.",
            remedy="convert the model that it was made from; tightfit quantize makes small GGUFs",
        )
    heads = config.get("architectures") or ["ForCausalLM"]
    if not str(heads[0]).endswith(("ForCausalLM", "LMHeadModel")):
        raise InvalidInputError(
            f"{folder} is a {printable(str(heads[0]))}, not a model that writes text.",
            remedy="name a model whose architecture ends in ForCausalLM",
        )
    return model_type, FAMILIES[model_type]


def check_config(model_type: str, config: Any) -> None:
    """Raise for settings that llama.cpp would silently ignore."""
    family = FAMILIES[model_type]
    activation = _activation(config)
    if activation not in family.activations:
        raise _unsupported(model_type, f"the activation {activation}")
    wrong = {
        "falcon": _falcon_obstacle,
        "gpt2": _gpt2_obstacle,
        "bloom": _bloom_obstacle,
        "gemma2": _gemma_obstacle,
        "gemma3_text": _gemma_obstacle,
        "phi3": _square_obstacle,
        "qwen2": _square_obstacle,
    }.get(model_type)
    found = wrong(config) if wrong is not None else None
    if found:
        raise _unsupported(model_type, found)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{folder / 'config.json'} cannot be read ({error}).",
            remedy="name a folder with config.json and weights",
        ) from error
    return found if isinstance(found, dict) else {}


def _activation(config: Any) -> str:
    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    found = [getattr(config, name, None) for name in names]
    return str(next((name for name in found if name), "gelu"))


def _falcon_obstacle(config: Any) -> str | None:
    if config.alibi:
        return "alibi positions"
    if not config.parallel_attn and not config.new_decoder_architecture:
        return "attention and feed-forward in sequence (parallel_attn: false)"
    return "bias in its linear layers" if config.bias else None


def _gpt2_obstacle(config: Any) -> str | None:
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return "attention scaled by the layer's number"
    return None if getattr(config, "scale_attn_weights", True) else "unscaled attention"


def _bloom_obstacle(config: Any) -> str | None:
    is_odd = config.apply_residual_connection_post_layernorm
    return "residuals taken after the norm" if is_odd else None


def _gemma_obstacle(config: Any) -> str | None:
    """llama.cpp scales attention by the head's size, except for the 27B models' layer counts."""
    is_27b = config.num_hidden_layers == (46 if config.model_type == "gemma2" else 62)
    usual = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    if config.query_pre_attn_scalar != usual:
        return f"query_pre_attn_scalar {config.query_pre_attn_scalar} (it would use {usual})"
    if config.model_type == "gemma3_text" and getattr(config, "use_bidirectional_attention", False):
        return "attention in both directions"
    return None


def _square_obstacle(config: Any) -> str | None:
    head_dim = getattr(config, "head_dim", None)
    if head_dim and head_dim * config.num_attention_heads != config.hidden_size:
        return f"heads of {head_dim} that do not add up to the hidden size"
    return None


def _unsupported(model_type: str, what: str) -> InvalidInputError:
    return InvalidInputError(
        f"This {model_type} model has {what}, which llama.cpp cannot compute.",
        remedy="use it with --engine transformers; tightfit quantize --to nf4 or gptq-4 shrinks it",
    )


# How llama.cpp wants a family's tensors to lie, where that is not as transformers has them.

Change = Callable[["Tensor"], "Tensor"]


def choose_change(model_type: str, name: str, config: Any) -> Change | None:
    """The change of the tensor that transformers calls `name`; None: unchanged.

    Source: what llama.cpp's own converter does per family (ggml-org/llama.cpp, `conversion/`).
    """
    if model_type in ("llama", "mistral"):
        num_rotary = _num_rotary_heads(name, config)
        return None if num_rotary is None else lambda x: interleave_rotary(x, num_rotary)
    if model_type in ("gemma", "gemma2", "gemma3_text"):
        return _plus_one if name.endswith("norm.weight") else None
    if model_type == "gpt2":
        is_conv = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        return _transpose if is_conv else None
    if model_type == "falcon" and ".query_key_value." in name:
        heads = int(config.num_attention_heads)
        return lambda x: _ungroup(x, heads, falcon_kv_heads(config))
    if model_type == "bloom" and ".query_key_value." in name:
        heads = int(config.num_attention_heads)
        return lambda x: _ungroup(x, heads, heads)
    return None


def choose_undo(model_type: str, name: str, config: Any) -> Change | None:
    """The inverse of `choose_change`. Gemma's norms lose their last bit in the round trip."""
    if model_type in ("llama", "mistral"):
        num_rotary = _num_rotary_heads(name, config)
        return None if num_rotary is None else lambda x: split_rotary(x, num_rotary)
    if model_type in ("gemma", "gemma2", "gemma3_text"):
        return _minus_one if name.endswith("norm.weight") else None
    if model_type == "falcon" and ".query_key_value." in name:
        heads = int(config.num_attention_heads)
        return lambda x: _regroup(x, heads, falcon_kv_heads(config))
    if model_type == "bloom" and ".query_key_value." in name:
        heads = int(config.num_attention_heads)
        return lambda x: _regroup(x, heads, heads)
    return choose_change(model_type, name, config)  # a transpose is its own inverse


def falcon_kv_heads(config: Any) -> int:
    """As transformers' FalconAttention computes it."""
    if config.new_decoder_architecture or not config.multi_query:
        return int(config.num_kv_heads)
    return 1


def _num_rotary_heads(name: str, config: Any) -> int | None:
    """The number of heads of a query or key tensor, whose rows are rotary pairs; else None."""
    if name.endswith((".q_proj.weight", ".q_proj.bias")):
        return int(config.num_attention_heads)
    if name.endswith((".k_proj.weight", ".k_proj.bias")):
        return int(config.num_key_value_heads)
    return None


def interleave_rotary(values: Tensor, num_heads: int) -> Tensor:
    """From rotary pairs half a head apart (transformers) to neighbours (Meta, llama.cpp)."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, 2, half, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def split_rotary(values: Tensor, num_heads: int) -> Tensor:
    """From rotary pairs side by side (Meta, llama.cpp) to half a head apart (transformers)."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _plus_one(values: Tensor) -> Tensor:
    """Gemma scales by `1 + weight`; llama.cpp by the weight."""
    return values.float() + 1


def _minus_one(values: Tensor) -> Tensor:
    return values.float() - 1


def _transpose(values: Tensor) -> Tensor:
    """GPT-2's Conv1D stores its matrix transposed."""
    return values.t().contiguous()


def _ungroup(values: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """From queries, key and value per group of heads to all queries, all keys, all values.

    Bloom has one head per group.
    """
    import torch

    head_dim = values.shape[0] // (num_heads + 2 * num_kv_heads)
    per_group = num_heads // num_kv_heads + 2
    groups = values.reshape(num_kv_heads, per_group, head_dim, *values.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return torch.cat([part.reshape(-1, *values.shape[1:]) for part in parts])


def _regroup(values: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The inverse of `_ungroup`."""
    import torch

    head_dim = values.shape[0] // (num_heads + 2 * num_kv_heads)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    parts = [
        part.reshape(num_kv_heads, -1, head_dim, *values.shape[1:])
        for part in torch.split(values, sizes)
    ]
    return torch.cat(parts, dim=1).reshape(values.shape)
