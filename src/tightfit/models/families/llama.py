"""Llama and the families that share its layer: Mistral, Granite, StableLM, Baichuan."""

from __future__ import annotations

from tightfit.models.families.parts import (
    ConfigFields,
    decoder,
    fused_attention,
    gated_mlp,
    read_decoder_shape,
    split_attention,
)
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec


def read_llama(f: ConfigFields) -> ModelSpec:
    """Llama, and with it Granite, Yi, SmolLM, TinyLlama, Vicuna."""
    stem = read_decoder_shape(f)
    attention = split_attention(stem, bias=f.flag("attention_bias", default=False))
    mlp = gated_mlp(stem, bias=f.flag("mlp_bias", default=False))
    return ModelSpec(
        **stem.numbers(),
        model_type="llama",
        blocks=(decoder(stem, attention + mlp),),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
    )


def read_tied_llama(f: ConfigFields) -> ModelSpec:
    """Llama's layer where a silent config means tied embeddings: SmolLM3."""
    return read_llama(f).model_copy(
        update={"tie_embeddings": f.flag("tie_word_embeddings", default=True)}
    )


def read_mistral(f: ConfigFields) -> ModelSpec:
    """Llama's layer with a sliding window on every layer, where one is set."""
    heads = f.size_or_default("num_key_value_heads", default=8)
    stem = read_decoder_shape(f, kv_heads=heads)
    window = f.window("sliding_window", default=4096)
    return ModelSpec(
        **stem.numbers(),
        model_type="mistral",
        blocks=(decoder(stem, split_attention(stem) + gated_mlp(stem)),),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def read_stablelm(f: ConfigFields) -> ModelSpec:
    """Llama's matrices under LayerNorm; a parallel residual has one norm."""
    stem = read_decoder_shape(f)
    bias = f.flag("use_qkv_bias", default=False)
    parallel = f.flag("use_parallel_residual", default=False)
    per_head = f.flag("qk_layernorm", default=False)
    block = decoder(
        stem,
        split_attention(stem, bias=bias, out_bias=False) + gated_mlp(stem),
        num_norms=1 if parallel else 2,
        norm_bias=True,
        head_norm_params=stem.query_width + stem.kv_width if per_head else 0,
    )
    return ModelSpec(
        **stem.numbers(),
        model_type="stablelm",
        blocks=(block,),
        is_rms_norm=False,
        is_parallel_residual=parallel,
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=2 * stem.hidden,
    )


def read_baichuan(f: ConfigFields) -> ModelSpec:
    """Llama's layer with query, key and value in one matrix, `W_pack`. Code on the hub only."""
    stem = read_decoder_shape(f)
    attention = fused_attention(stem, names=("W_pack", "o_proj"))
    return ModelSpec(
        **stem.numbers(),
        model_type="baichuan",
        blocks=(decoder(stem, attention + gated_mlp(stem)),),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
    )


LLAMA_FAMILIES = (
    Family(model_types=("llama",), read=read_llama, has_liger=True, fuses_projections=True),
    Family(model_types=("mistral",), read=read_mistral, has_liger=True, fuses_projections=True),
    Family(model_types=("granite",), read=read_llama, has_liger=True, scales_logits=True),
    Family(model_types=("smollm3",), read=read_tied_llama, has_liger=True),
    Family(model_types=("stablelm",), read=read_stablelm),
    Family(model_types=("baichuan",), read=read_baichuan, splits_rotary=True),
)
