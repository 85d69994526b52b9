"""LayerNorm decoders of 2022: Bloom, OPT, MPT, Falcon, ChatGLM (whose later ones have RMSNorm)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from tightfit.models.families import parts
from tightfit.models.families.parts import ConfigFields
from tightfit.models.family import (
    Family,
    GgufLayout,
    GgufMetadata,
    Rearrangement,
    Settings,
    has_attention_bias,
    round_fp32,
)
from tightfit.models.spec import Linear, ModelSpec, Role

_OPT_POSITION_OFFSET = 2  # OPT's position table starts after two unused rows


def read_bloom(f: ConfigFields) -> ModelSpec:
    """ALiBi, biases everywhere, a norm behind the embedding."""
    stem = parts.read_decoder_shape(f, inner_factor=4, activation="gelu")
    linears = parts.fused_attention(
        stem, names=("query_key_value", "dense"), bias=True
    ) + parts.plain_mlp(stem, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
    block = parts.decoder(stem, linears, norm_bias=True)
    return parts.make_spec(
        stem, block, tied=True, has_layer_norm=True, outer_params=4 * stem.hidden
    )


def read_opt(f: ConfigFields) -> ModelSpec:
    """Learned positions; OPT-350m projects a narrower embedding and has no last norm."""
    stem = parts.read_decoder_shape(f, inner_factor=4, activation="relu")
    bias = f.flag("enable_bias", default=True)
    positions = f.size_or_default("max_position_embeddings", default=2048, most=parts.MAX_POSITIONS)
    width = f.optional_size("word_embed_proj_dim") or stem.hidden
    has_norms = f.flag("layer_norm_elementwise_affine", default=True)
    has_last_norm = (
        has_norms
        and f.flag("do_layer_norm_before", default=True)
        and not f.flag("_remove_final_layer_norm", default=False)
    )
    linears = parts.split_attention(stem, bias=bias, out_name="out_proj") + parts.plain_mlp(
        stem, names=("fc1", "fc2"), bias=bias
    )
    projections: tuple[Linear, ...] = ()
    if width != stem.hidden:
        projections = (
            parts.linear("project_out", stem.hidden, width, Role.MLP),
            parts.linear("project_in", width, stem.hidden, Role.MLP),
        )
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears, num_norms=2 if has_norms else 0, norm_bias=True),
        tied=True,
        has_layer_norm=True,
        embedding_width=width if width != stem.hidden else None,
        position_params=(positions + _OPT_POSITION_OFFSET) * stem.hidden,
        outer_params=sum(part.num_params for part in projections)
        + (2 * stem.hidden if has_last_norm else 0),
        outer_linears=projections,
    )


def read_mpt(f: ConfigFields) -> ModelSpec:
    """ALiBi, no biases, LayerNorm without one either.

    transformers builds the MLP four times as wide whatever `expansion_ratio` says.
    """
    stem = parts.read_decoder_shape(
        f, inner=4 * f.size("d_model", "hidden_size"), activation="gelu"
    )
    linears = parts.fused_attention(stem, names=("Wqkv", "out_proj")) + parts.plain_mlp(
        stem, names=("up_proj", "down_proj"), bias=False
    )
    block = parts.decoder(stem, linears)
    return parts.make_spec(stem, block, tied=True, has_layer_norm=True, outer_params=stem.hidden)


def read_falcon(f: ConfigFields) -> ModelSpec:
    """Falcon's three shapes: grouped (40B), one key/value head (7B), all heads (RW)."""
    is_new = f.flag("new_decoder_architecture", default=False)
    has_one_kv = f.flag("multi_query", default=True)
    heads = f.size("num_attention_heads", "n_head", most=parts.MAX_COUNT)
    if is_new:
        kv_heads = f.optional_size("num_kv_heads", "n_head_kv", most=parts.MAX_COUNT) or heads
    else:
        kv_heads = 1 if has_one_kv else heads
    stem = parts.read_decoder_shape(f, kv_heads=kv_heads, inner_factor=4, activation="gelu")
    bias = f.flag("bias", default=False)
    parallel = f.flag("parallel_attn", default=True)
    norms = f.optional_size("num_ln_in_parallel_attn", most=2) or (2 if is_new else 1)
    linears = parts.fused_attention(
        stem, names=("query_key_value", "dense"), bias=bias
    ) + parts.plain_mlp(stem, names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears, num_norms=norms if parallel else 2, norm_bias=True),
        tied=True,
        has_layer_norm=True,
        is_parallel_residual=parallel,
    )


def _find_bloom_obstacle(config: Any) -> str | None:
    is_odd = config.apply_residual_connection_post_layernorm
    return "residuals taken after the norm" if is_odd else None


def _read_bloom_gguf(file: GgufMetadata, _rope: Settings) -> Settings:
    return {
        "n_layer": int(file.get("block_count")),
        "n_head": int(file.get("attention.head_count")),
        "layer_norm_epsilon": round_fp32(file.get("attention.layer_norm_epsilon")),
        "hidden_size": int(file.get("embedding_length")),
        "seq_length": int(file.get("context_length")),
    }


def _find_falcon_obstacle(config: Any) -> str | None:
    if config.alibi:
        return "alibi positions"
    if not config.parallel_attn and not config.new_decoder_architecture:
        return "attention and feed-forward in sequence (parallel_attn: false)"
    return "bias in its linear layers" if config.bias else None


def _count_falcon_kv_heads(config: Any) -> int:
    """As transformers' FalconAttention computes it."""
    is_grouped = config.new_decoder_architecture or not config.multi_query
    return int(config.num_kv_heads) if is_grouped else 1


def _write_falcon(writer: Any, _config: Any) -> None:
    writer.add_tensor_data_layout("jploski")  # queries, keys and values each in one piece


def _read_falcon_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    heads, kv_heads = (
        int(file.get("attention.head_count")),
        int(file.get("attention.head_count_kv", 1)),
    )
    has_two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    is_grouped = has_two_norms or 1 < kv_heads < heads
    return {
        "hidden_size": int(file.get("embedding_length")),
        "ffn_hidden_size": int(file.get("feed_forward_length")),
        "num_hidden_layers": int(file.get("block_count")),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": is_grouped,
        "num_ln_in_parallel_attn": (2 if has_two_norms else 1) if is_grouped else None,
        "multi_query": kv_heads == 1,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "layer_norm_epsilon": round_fp32(file.get("attention.layer_norm_epsilon")),
        "max_position_embeddings": int(file.get("context_length")),
        "rope_parameters": rope,
    }


def _read_falcon_flags(config: Mapping[str, Any], tensors: Collection[str]) -> Settings:
    kv_heads, is_grouped = config.get("num_key_value_heads"), "blk.0.attn_norm_2.weight" in tensors
    return {
        "new_decoder_architecture": is_grouped,
        "multi_query": is_grouped or kv_heads == 1,
        "num_kv_heads": kv_heads,
        "parallel_attn": "blk.0.ffn_norm.weight" not in tensors,
        "bias": has_attention_bias(tensors),
    }


def _find_mpt_obstacle(config: Any) -> str | None:
    attention = config.attn_config
    usual = (config.d_model / config.n_heads) ** -0.5
    is_usual = attention.softmax_scale in (None, usual)
    return None if is_usual else "attention scaled by softmax_scale"


def _write_mpt(writer: Any, config: Any) -> None:
    if config.attn_config.clip_qkv:
        writer.add_clamp_kqv(float(config.attn_config.clip_qkv))
    writer.add_max_alibi_bias(_MPT_ALIBI_BIAS)


_MPT_ALIBI_BIAS = 8.0
"""transformers computes with this one whatever the config says."""
_MPT_GGUF = GgufLayout(
    # llama.cpp has the tanh form of GELU where MPT has the exact one: 1e-3 apart at most.
    activations=("gelu",),
    inner_key=None,
    find_obstacle=_find_mpt_obstacle,
    has_rotary=False,
    write_attention=_write_mpt,
    read_settings=None,
)
_FALCON = Family(
    model_types=("falcon",),
    read=read_falcon,
    alibi="ungrouped",
    own_attention=True,
    sdpa_always_masks=True,
    mask_reads_positions=False,
    splits_rotary=True,
    quantizes_linears=False,  # FalconLinear
    has_fp8_linears=False,
    gguf_flags=_read_falcon_flags,
    gguf=GgufLayout(
        # llama.cpp has the tanh form of GELU where Falcon has the exact one: 1e-3 apart at most.
        activations=("gelu",),
        rearrangement=Rearrangement.GROUPED_QKV,
        old_prefix="added",
        inner_key="ffn_hidden_size",
        count_kv_heads=_count_falcon_kv_heads,
        find_obstacle=_find_falcon_obstacle,
        states_head_dim=False,
        write_attention=_write_falcon,
        read_settings=_read_falcon_gguf,
    ),
)
_BLOOM = Family(
    model_types=("bloom",),
    mlp_module="",
    read=read_bloom,
    alibi="always",
    has_sdpa=False,
    has_flash=False,
    own_attention=True,
    composes_gelu=True,
    takes_positions=False,
    mask_reads_positions=False,
    gguf=GgufLayout(
        activations=("gelu",),
        rearrangement=Rearrangement.GROUPED_QKV,
        old_prefix="removed",
        inner_key=None,
        find_obstacle=_find_bloom_obstacle,
        has_rotary=False,
        read_settings=_read_bloom_gguf,
    ),
)
LAYERNORM_FAMILIES = (
    _BLOOM,
    replace(_BLOOM, model_types=("mpt",), composes_gelu=False, read=read_mpt, gguf=_MPT_GGUF),
    Family(model_types=("opt",), read=read_opt, mlp_module="", mask_reads_positions=False),
    _FALCON,
    # Falcon's names before transformers took it in.
    replace(_FALCON, model_types=("RefinedWeb", "RefinedWebModel"), gguf_name="falcon", gguf=None),
)


# ChatGLM 1 (LayerNorm, biases) and 2 to 4 (RMSNorm, grouped heads). Code on the hub only.

_ATTENTION = ("query_key_value", "dense")
_MLP = ("dense_h_to_4h", "dense_4h_to_h")


def read_chatglm(f: ConfigFields) -> ModelSpec:
    """The generations share a `model_type`; only the first names `inner_hidden_size`."""
    return _read_first(f) if f.has("inner_hidden_size") else _read_later(f)


def _read_first(f: ConfigFields) -> ModelSpec:
    stem = parts.read_decoder_shape(f, activation="gelu")
    linears = parts.fused_attention(stem, names=_ATTENTION, bias=True) + parts.plain_mlp(
        stem, names=_MLP, bias=True
    )
    block = parts.decoder(stem, linears, norm_bias=True)
    return parts.make_spec(stem, block, tied=True, has_layer_norm=True)


def _read_later(f: ConfigFields) -> ModelSpec:
    grouped = f.flag("multi_query_attention", default=False)
    groups = f.size_or_default("multi_query_group_num", default=1, most=parts.MAX_COUNT)
    stem = parts.read_decoder_shape(f, kv_heads=groups if grouped else None)
    bias = f.flag("add_bias_linear", default=False)
    qkv_bias = bias or f.flag("add_qkv_bias", default=False)
    linears = parts.fused_attention(
        stem, names=_ATTENTION, bias=qkv_bias, out_bias=bias
    ) + parts.plain_mlp(stem, names=_MLP, bias=bias, up_factor=2)
    is_rms = f.flag("rmsnorm", default=True)
    block = parts.decoder(stem, linears, norm_bias=not is_rms)
    return parts.make_spec(stem, block, has_layer_norm=not is_rms, is_gated_mlp=True)


def _read_chatglm_flags(config: Mapping[str, Any], tensors: Collection[str]) -> Settings:
    return {
        "multi_query_attention": True,
        "multi_query_group_num": config.get("num_key_value_heads"),
        "add_qkv_bias": has_attention_bias(tensors),
    }


CHATGLM = Family(
    model_types=("chatglm",),
    read=read_chatglm,
    splits_rotary=True,
    gguf_flags=_read_chatglm_flags,
)
