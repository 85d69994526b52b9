"""LayerNorm decoders of 2022: Bloom, OPT, MPT, Falcon."""

from __future__ import annotations

from tightfit.models.families.parts import (
    MAX_COUNT,
    MAX_POSITIONS,
    ConfigFields,
    decoder,
    fused_attention,
    plain_mlp,
    read_decoder_shape,
    split_attention,
)
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec

_OPT_POSITION_OFFSET = 2  # OPT's position table starts after two unused rows


def read_bloom(f: ConfigFields) -> ModelSpec:
    """ALiBi, biases everywhere, a norm behind the embedding."""
    stem = read_decoder_shape(f, inner_factor=4, activation="gelu")
    linears = fused_attention(stem, names=("query_key_value", "dense"), bias=True) + plain_mlp(
        stem, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True
    )
    return ModelSpec(
        **stem.numbers(),
        model_type="bloom",
        blocks=(decoder(stem, linears, norm_bias=True),),
        is_rms_norm=False,
        is_gated_mlp=False,
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        outer_params=4 * stem.hidden,
    )


def read_opt(f: ConfigFields) -> ModelSpec:
    """Learned positions; OPT-350m projects a narrower embedding and has no last norm."""
    stem = read_decoder_shape(f, inner_factor=4, activation="relu")
    bias = f.flag("enable_bias", default=True)
    positions = f.size_or_default("max_position_embeddings", default=2048, most=MAX_POSITIONS)
    width = f.optional_size("word_embed_proj_dim") or stem.hidden
    has_norms = f.flag("layer_norm_elementwise_affine", default=True)
    has_last_norm = (
        has_norms
        and f.flag("do_layer_norm_before", default=True)
        and not f.flag("_remove_final_layer_norm", default=False)
    )
    linears = split_attention(stem, bias=bias, out_name="out_proj") + plain_mlp(
        stem, names=("fc1", "fc2"), bias=bias
    )
    projections = 2 * width * stem.hidden if width != stem.hidden else 0
    return ModelSpec(
        **stem.numbers(),
        model_type="opt",
        blocks=(decoder(stem, linears, num_norms=2 if has_norms else 0, norm_bias=True),),
        is_rms_norm=False,
        is_gated_mlp=False,
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        embedding_width=width if width != stem.hidden else None,
        position_params=(positions + _OPT_POSITION_OFFSET) * stem.hidden,
        outer_params=projections + (2 * stem.hidden if has_last_norm else 0),
    )


def read_mpt(f: ConfigFields) -> ModelSpec:
    """ALiBi, no biases, LayerNorm without one either.

    transformers builds the MLP four times as wide whatever `expansion_ratio` says.
    """
    stem = read_decoder_shape(f, inner=4 * f.size("d_model", "hidden_size"), activation="gelu")
    linears = fused_attention(stem, names=("Wqkv", "out_proj")) + plain_mlp(
        stem, names=("up_proj", "down_proj"), bias=False
    )
    return ModelSpec(
        **stem.numbers(),
        model_type="mpt",
        blocks=(decoder(stem, linears),),
        is_rms_norm=False,
        is_gated_mlp=False,
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        outer_params=stem.hidden,
    )


def read_falcon(f: ConfigFields) -> ModelSpec:
    """Falcon's three shapes: grouped (40B), one key/value head (7B), all heads (RW)."""
    is_new = f.flag("new_decoder_architecture", default=False)
    has_one_kv = f.flag("multi_query", default=True)
    heads = f.size("num_attention_heads", "n_head", most=MAX_COUNT)
    if is_new:
        kv_heads = f.optional_size("num_kv_heads", "n_head_kv", most=MAX_COUNT) or heads
    else:
        kv_heads = 1 if has_one_kv else heads
    stem = read_decoder_shape(f, kv_heads=kv_heads, inner_factor=4, activation="gelu")
    bias = f.flag("bias", default=False)
    parallel = f.flag("parallel_attn", default=True)
    norms = f.optional_size("num_ln_in_parallel_attn", most=2) or (2 if is_new else 1)
    linears = fused_attention(stem, names=("query_key_value", "dense"), bias=bias) + plain_mlp(
        stem, names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias
    )
    return ModelSpec(
        **stem.numbers(),
        model_type="falcon",
        blocks=(decoder(stem, linears, num_norms=norms if parallel else 2, norm_bias=True),),
        is_rms_norm=False,
        is_gated_mlp=False,
        is_parallel_residual=parallel,
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        outer_params=2 * stem.hidden,
    )


LAYERNORM_FAMILIES = (
    Family(
        model_types=("bloom",),
        read=read_bloom,
        alibi="always",
        has_sdpa=False,
        has_flash=False,
        accepts_custom_attention=False,
        takes_positions=False,
    ),
    Family(
        model_types=("mpt",),
        read=read_mpt,
        alibi="always",
        has_sdpa=False,
        has_flash=False,
        accepts_custom_attention=False,
        takes_positions=False,
    ),
    Family(model_types=("opt",), read=read_opt, mask_reads_positions=False),
    Family(
        # The other two are Falcon's names before transformers took it in.
        model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
        read=read_falcon,
        alibi="ungrouped",
        accepts_custom_attention=False,
        sdpa_always_masks=True,
        mask_reads_positions=False,
        splits_rotary=True,
        quantizes_linears=False,  # FalconLinear
        has_fp8_linears=False,
    ),
)
