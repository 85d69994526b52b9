"""How llama.cpp wants a family's tensors to lie, where that is not as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[["Tensor"], "Tensor"]


def choose_change(model_type: str, name: str, config: Any) -> Change | None:
    """What to do with the tensor that transformers calls `name`; None: take it as it is.

    Source: what llama.cpp's own converter does per family (ggml-org/llama.cpp, `conversion/`).
    """
    if model_type in ("llama", "mistral"):
        num_turned = _num_turned_heads(name, config)
        return None if num_turned is None else lambda x: interleave_rotary(x, num_turned)
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
    """The way back from `choose_change`. Gemma's norms lose their last bit on the way there."""
    if model_type in ("llama", "mistral"):
        num_turned = _num_turned_heads(name, config)
        return None if num_turned is None else lambda x: split_rotary(x, num_turned)
    if model_type in ("gemma", "gemma2", "gemma3_text"):
        return _minus_one if name.endswith("norm.weight") else None
    if model_type == "falcon" and ".query_key_value." in name:
        heads = int(config.num_attention_heads)
        return lambda x: _regroup(x, heads, falcon_kv_heads(config))
    if model_type == "bloom" and ".query_key_value." in name:
        heads = int(config.num_attention_heads)
        return lambda x: _regroup(x, heads, heads)
    return choose_change(model_type, name, config)  # a transpose undoes itself


def falcon_kv_heads(config: Any) -> int:
    """As transformers' FalconAttention decides it."""
    if config.new_decoder_architecture or not config.multi_query:
        return int(config.num_kv_heads)
    return 1


def _num_turned_heads(name: str, config: Any) -> int | None:
    """Of the tensors whose rows are rotary pairs: queries and keys."""
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
    """GPT-2's Conv1D keeps inputs first."""
    return values.t().contiguous()


def _ungroup(values: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Per group of heads its queries, key and value; to all queries, all keys, all values.

    Bloom is the case of one head per group.
    """
    import torch

    head_dim = values.shape[0] // (num_heads + 2 * num_kv_heads)
    per_group = num_heads // num_kv_heads + 2
    groups = values.reshape(num_kv_heads, per_group, head_dim, *values.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return torch.cat([part.reshape(-1, *values.shape[1:]) for part in parts])


def _regroup(values: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """What `_ungroup` undoes."""
    import torch

    head_dim = values.shape[0] // (num_heads + 2 * num_kv_heads)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    parts = [
        part.reshape(num_kv_heads, -1, head_dim, *values.shape[1:])
        for part in torch.split(values, sizes)
    ]
    return torch.cat(parts, dim=1).reshape(values.shape)
