"""Families that are mixtures of experts on every layer: Mixtral, GraniteMoE, gpt-oss."""

from __future__ import annotations

from tightfit.models.families.parts import (
    ConfigFields,
    count_sliding,
    decoder,
    expert_linears,
    read_decoder_shape,
    read_experts,
    split_attention,
)
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec


def read_mixtral(f: ConfigFields) -> ModelSpec:
    """Mistral's attention, experts for the MLP."""
    stem = read_decoder_shape(f, kv_heads=f.size_or_default("num_key_value_heads", default=8))
    experts = read_experts(f, inner=stem.inner, count_default=8, per_token_default=2)
    window = f.window("sliding_window", default=None)
    linears = split_attention(stem) + expert_linears(stem, experts, router="gate", adapted=True)
    return ModelSpec(
        **stem.numbers(),
        model_type="mixtral",
        blocks=(decoder(stem, linears),),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def read_granitemoe(f: ConfigFields) -> ModelSpec:
    """Granite's attention, experts for the MLP."""
    stem = read_decoder_shape(f)
    experts = read_experts(f, inner=stem.inner, count_default=8, per_token_default=2)
    attention = split_attention(stem, bias=f.flag("attention_bias", default=False))
    return ModelSpec(
        **stem.numbers(),
        model_type="granitemoe",
        blocks=(decoder(stem, attention + expert_linears(stem, experts, router="router")),),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
    )


def read_gpt_oss(f: ConfigFields) -> ModelSpec:
    """gpt-oss: biases on experts too, a learned sink per head, every other layer slides."""
    stem = read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=64))
    experts = read_experts(f, inner=stem.inner, count_default=128, per_token_default=4)
    bias = f.flag("attention_bias", default=True)
    linears = split_attention(stem, bias=bias) + expert_linears(
        stem, experts, router="router", bias=True
    )
    window = f.window("sliding_window", default=128)
    sliding = count_sliding(f, layers=stem.layers, otherwise=(stem.layers + 1) // 2)
    return ModelSpec(
        **stem.numbers(),
        model_type="gpt_oss",
        blocks=(decoder(stem, linears, extra_params=stem.heads),),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
    )


MOE_FAMILIES = (
    Family(model_types=("mixtral",), read=read_mixtral, has_liger=True),
    Family(model_types=("granitemoe",), read=read_granitemoe),
    Family(
        model_types=("gpt_oss",), read=read_gpt_oss, has_sdpa=False, has_sinks=True, has_liger=True
    ),
)
