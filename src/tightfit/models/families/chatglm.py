"""ChatGLM 1 (LayerNorm, biases) and 2 to 4 (RMSNorm, grouped heads). Code on the hub only."""

from __future__ import annotations

from tightfit.models.families.parts import (
    MAX_COUNT,
    ConfigFields,
    decoder,
    fused_attention,
    plain_mlp,
    read_decoder_shape,
)
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec

_ATTENTION = ("query_key_value", "dense")
_MLP = ("dense_h_to_4h", "dense_4h_to_h")


def read_chatglm(f: ConfigFields) -> ModelSpec:
    """The generations share a `model_type`; only the first names `inner_hidden_size`."""
    return _read_first(f) if f.has("inner_hidden_size") else _read_later(f)


def _read_first(f: ConfigFields) -> ModelSpec:
    stem = read_decoder_shape(f, activation="gelu")
    linears = fused_attention(stem, names=_ATTENTION, bias=True) + plain_mlp(
        stem, names=_MLP, bias=True
    )
    return ModelSpec(
        **stem.numbers(),
        model_type="chatglm",
        blocks=(decoder(stem, linears, norm_bias=True),),
        is_rms_norm=False,
        is_gated_mlp=False,
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        outer_params=2 * stem.hidden,
    )


def _read_later(f: ConfigFields) -> ModelSpec:
    grouped = f.flag("multi_query_attention", default=False)
    groups = f.size_or_default("multi_query_group_num", default=1, most=MAX_COUNT)
    stem = read_decoder_shape(f, kv_heads=groups if grouped else None)
    bias = f.flag("add_bias_linear", default=False)
    qkv_bias = bias or f.flag("add_qkv_bias", default=False)
    linears = fused_attention(stem, names=_ATTENTION, bias=qkv_bias, out_bias=bias) + plain_mlp(
        stem, names=_MLP, bias=bias, up_factor=2
    )
    is_rms = f.flag("rmsnorm", default=True)
    return ModelSpec(
        **stem.numbers(),
        model_type="chatglm",
        blocks=(decoder(stem, linears, norm_bias=not is_rms),),
        is_rms_norm=is_rms,
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden * (1 if is_rms else 2),
    )


CHATGLM = Family(model_types=("chatglm",), read=read_chatglm, splits_rotary=True)
