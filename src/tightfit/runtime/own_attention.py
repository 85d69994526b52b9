"""Attention of Falcon, BLOOM and MPT through the kernels that other families look up by name.

Their own modelling code computes plain products, or gives SDPA a mask that rules out its flash
kernels (transformers 5.22). The causal mask is the kernel's own here: padding is on the right, so
none is needed, and a bias by distance is computed inside flex attention. Packed rows have a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tightfit.runtime.flex_attention import flex_attention, make_block_mask
from tightfit.runtime.packed_masks import is_packed


def accept_kernels(config: Any) -> None:
    """Let this config's family be made with our kernels: Falcon chooses a class by the name."""
    if config.model_type == "falcon":
        from transformers.models.falcon import modeling_falcon

        classes: dict[str, Any] = modeling_falcon.FALCON_ATTENTION_CLASSES
        classes.setdefault(config._attn_implementation, modeling_falcon.FalconAttention)


def use_own_attention(model: Any) -> None:
    """Replace the forward of each attention of these families."""
    for module in model.modules():
        forward = _FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.config = model.config
            module.tightfit_original = module.forward
            module.forward = MethodType(forward, module)


def causal_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of whole rows, with grouped heads, or with `slopes` of a bias.

    `mask`: of packed documents; else None.
    """
    if options.get("slopes") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attend: Any = sdpa_attention_forward
        output: tuple[Tensor, None] = attend(module, query, key, value, mask, **options)
        return output
    if mask is None:
        mask = _make_causal_mask(query.shape[2], query.device)
    return flex_attention(module, query, key, value, mask, **options)


class PackedMask:
    """A mask of packed documents that these families' code hands to attention as it is."""

    ndim = 0
    """Falcon adds a bias to a mask of four dimensions."""

    def __init__(self, mask: Any) -> None:
        self.mask = mask

    def to(self, *_: Any) -> PackedMask:
        """MPT makes its mask boolean."""
        return self


def make_mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """Of packed rows; else one that is not used, since these families' code expects a tensor."""
    if not is_packed():
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if getattr(config, "alibi", True):  # only Falcon has models without
        return PackedMask(make_block_mask(*args, **kwargs))
    from transformers.masking_utils import sdpa_mask

    make: Any = sdpa_mask
    return PackedMask(make(*args, **kwargs))


@lru_cache(maxsize=8)
def _make_causal_mask(num_tokens: int, device: torch.device) -> Any:
    return make_block_mask(1, num_tokens, num_tokens, device=device)


def _is_ours(module: Any) -> bool:
    return str(module.config._attn_implementation).startswith("tightfit_")


def _attend(module: Any, parts: tuple[Tensor, Tensor, Tensor], mask: Any, **options: Any) -> Tensor:
    """`[rows, tokens, width]` from `[rows, heads, tokens, head_dim]`, by the config's kernel."""
    from transformers import AttentionInterface

    query, key, _ = parts
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    functions: Any = AttentionInterface
    attend = functions()[module.config._attn_implementation]
    documents = mask.mask if isinstance(mask, PackedMask) else None
    output: Tensor = attend(module, *parts, documents, **options)[0]
    return output.flatten(2)


def _forward_falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if layer_past is not None or not _is_ours(self):
        usual = {"position_ids": position_ids, "layer_past": layer_past, **options}
        made: tuple[Tensor, None] = self.tightfit_original(
            hidden_states, alibi, attention_mask, **usual
        )
        return made
    heads, kv_heads = self.num_heads, self.num_kv_heads
    if not self.new_decoder_architecture:
        kv_heads = 1 if self.multi_query else heads
    fused = self.query_key_value(hidden_states)
    rows, tokens, _ = fused.shape
    # Each group of queries, then its key and its value.
    grouped = fused.view(rows, tokens, kv_heads, heads // kv_heads + 2, self.head_dim)
    query = grouped[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
    key, value = (grouped[:, :, :, at].transpose(1, 2) for at in (-2, -1))
    bias: dict[str, Any] = {}
    if alibi is None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        rotate: Any = apply_rotary_pos_emb
        query, key = rotate(query, key, *options["position_embeddings"])
    else:  # scaled as the scores are
        bias["slopes"] = _list_slopes(heads, query.device) * self.inv_norm_factor
    output = _attend(
        self,
        (query, key, value),
        attention_mask,
        scaling=self.inv_norm_factor,
        dropout=self.attention_dropout.p if alibi is not None and self.training else 0.0,
        position_ids=position_ids,
        **bias,
    )
    return self.dense(output), None


def _forward_bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.models.bloom.modeling_bloom import dropout_add

    is_split = self.pretraining_tp > 1 and self.slow_but_exact
    if layer_past is not None or is_split or not _is_ours(self):
        usual = {"layer_past": layer_past, **options}
        made: tuple[Tensor, None] = self.tightfit_original(
            hidden_states, residual, alibi, attention_mask, **usual
        )
        return made
    output = _attend(
        self,
        self._reshape(self.query_key_value(hidden_states)),
        attention_mask,
        scaling=self.inv_norm_factor,
        dropout=self.attention_dropout.p if self.training else 0.0,
        slopes=_list_slopes(self.num_heads, hidden_states.device),
    )
    add: Any = dropout_add
    return add(self.dense(output), residual, self.hidden_dropout, self.training), None


def _forward_mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if past_key_values is not None or not _is_ours(self):
        made: tuple[Tensor, None] = self.tightfit_original(
            hidden_states, position_bias, past_key_values, attention_mask, **options
        )
        return made
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    shape = (*fused.shape[:2], self.n_heads, self.head_dim)
    query, key, value = (part.reshape(shape).transpose(1, 2) for part in fused.chunk(3, dim=2))
    # The bias is the slope times the key's distance from the end: its step is the slope.
    slopes = (position_bias[:, 0, -1] - position_bias[:, 0, -2]).float()
    output = _attend(
        self,
        (query, key, value),
        attention_mask,
        scaling=self.softmax_scale,
        dropout=self.attn_dropout_p if self.training else 0.0,
        slopes=slopes,
    )
    return self.out_proj(output), None


_FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "FalconAttention": _forward_falcon,
    "FalconFlashAttention2": _forward_falcon,
    "BloomAttention": _forward_bloom,
    "MptAttention": _forward_mpt,
}


@lru_cache(maxsize=8)
def _list_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Of BLOOM and Falcon. Source: transformers `build_alibi_tensor`."""
    nearest = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (number + 1) / nearest) for number in range(nearest)]
    between = [2.0 ** (-4 * (number + 1) / nearest) for number in range(0, 2 * nearest, 2)]
    return torch.tensor((slopes + between)[:num_heads], device=device)
