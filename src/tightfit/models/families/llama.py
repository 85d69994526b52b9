"""Llama and the families that share its layer: Mistral, Granite, StableLM, Baichuan, Phi.

With experts: Mixtral, GraniteMoE, gpt-oss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tightfit.models.families import parts
from tightfit.models.families.parts import ConfigFields
from tightfit.models.family import (
    Family,
    GgufLayout,
    GgufMetadata,
    Rearrangement,
    Settings,
    find_non_square_heads,
    has_attention_bias,
    read_usual_layernorm_settings,
    read_usual_settings,
    require_full_attention_period,
    round_fp32,
)
from tightfit.models.spec import ModelSpec


def read_llama(f: ConfigFields) -> ModelSpec:
    """Llama, and with it Granite, Yi, SmolLM, TinyLlama, Vicuna."""
    stem = parts.read_decoder_shape(f)
    attention = parts.split_attention(stem, bias=f.flag("attention_bias", default=False))
    mlp = parts.gated_mlp(stem, bias=f.flag("mlp_bias", default=False))
    return parts.make_spec(stem, parts.decoder(stem, attention + mlp))


def read_tied_llama(f: ConfigFields) -> ModelSpec:
    """Llama's layer where a silent config means tied embeddings: SmolLM3."""
    return read_llama(f).model_copy(
        update={"tie_embeddings": f.flag("tie_word_embeddings", default=True)}
    )


def read_mistral(f: ConfigFields) -> ModelSpec:
    """Llama's layer with a sliding window on every layer, where one is set."""
    heads = f.size_or_default("num_key_value_heads", default=8)
    stem = parts.read_decoder_shape(f, kv_heads=heads)
    window = f.window("sliding_window", default=4096)
    return parts.make_spec(
        stem,
        parts.decoder(stem, parts.split_attention(stem) + parts.gated_mlp(stem)),
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def read_stablelm(f: ConfigFields) -> ModelSpec:
    """Llama's matrices under LayerNorm; a parallel residual has one norm."""
    stem = parts.read_decoder_shape(f)
    bias = f.flag("use_qkv_bias", default=False)
    parallel = f.flag("use_parallel_residual", default=False)
    per_head = f.flag("qk_layernorm", default=False)
    block = parts.decoder(
        stem,
        parts.split_attention(stem, bias=bias, out_bias=False) + parts.gated_mlp(stem),
        num_norms=1 if parallel else 2,
        norm_bias=True,
        head_norm_params=stem.query_width + stem.kv_width if per_head else 0,
    )
    return parts.make_spec(
        stem, block, has_layer_norm=True, is_gated_mlp=True, is_parallel_residual=parallel
    )


def read_baichuan(f: ConfigFields) -> ModelSpec:
    """Llama's layer with query, key and value in one matrix, `W_pack`. Code on the hub only."""
    stem = parts.read_decoder_shape(f)
    attention = parts.fused_attention(stem, names=("W_pack", "o_proj"))
    return parts.make_spec(stem, parts.decoder(stem, attention + parts.gated_mlp(stem)))


def _read_llama_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    return read_usual_settings(file, rope) | {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _read_stablelm_flags(_config: Mapping[str, Any], tensors: Collection[str]) -> Settings:
    return {
        "use_qkv_bias": has_attention_bias(tensors),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
    }


_LLAMA_GGUF = GgufLayout(
    rearrangement=Rearrangement.ROTARY, reads_rope_factors=True, read_settings=_read_llama_gguf
)


# llama.cpp's keys for Granite's multipliers; 0 means that there is none.
_GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def write_granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(float(config.attention_multiplier))
    writer.add_embedding_scale(float(config.embedding_multiplier))
    writer.add_residual_scale(float(config.residual_multiplier))
    writer.add_logit_scale(float(config.logits_scaling))
    if shared := getattr(config, "shared_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(int(shared))


def _read_granite_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    scales = {name: round_fp32(file.get(key, 1.0)) for key, name in _GRANITE_SCALES.items()}
    return _read_llama_gguf(file, rope) | scales


_GRANITE_GGUF = GgufLayout(
    rearrangement=Rearrangement.ROTARY,
    reads_rope_factors=True,
    find_obstacle=find_non_square_heads,
    write_attention=write_granite,
    read_settings=_read_granite_gguf,
)
_SMOLLM3_PERIOD = 4


def _find_smollm3_obstacle(config: Any) -> str | None:
    if config.attention_bias or config.mlp_bias:
        return "biases in its linear layers"
    for at, has_rope in enumerate(config.no_rope_layers):
        if bool(has_rope) != ((at + 1) % _SMOLLM3_PERIOD != 0):
            return f"layer {at} {'with' if has_rope else 'without'} rotary positions"
    return None


def _read_smollm3_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    layers = int(file.get("block_count"))
    return read_usual_settings(file, rope) | {
        "no_rope_layers": [int((at + 1) % _SMOLLM3_PERIOD != 0) for at in range(layers)],
        "no_rope_layer_interval": _SMOLLM3_PERIOD,
        "pad_token_id": None,
    }


_SMOLLM3_GGUF = GgufLayout(
    rearrangement=Rearrangement.ROTARY,
    find_obstacle=_find_smollm3_obstacle,
    read_settings=_read_smollm3_gguf,
)


def _write_stablelm(writer: Any, config: Any) -> None:
    writer.add_parallel_residual(bool(config.use_parallel_residual))


def _read_stablelm_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    settings = read_usual_layernorm_settings(file, rope)
    return settings | {
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


_STABLELM_GGUF = GgufLayout(
    needs_head=True,
    find_obstacle=find_non_square_heads,
    write_attention=_write_stablelm,
    read_settings=_read_stablelm_gguf,
)

LLAMA_FAMILIES = (
    Family(
        model_types=("llama",),
        read=read_llama,
        has_liger=True,
        fuses_projections=True,
        gguf=_LLAMA_GGUF,
    ),
    Family(
        model_types=("mistral",),
        read=read_mistral,
        has_liger=True,
        fuses_projections=True,
        gguf_name="llama",  # its files say llama, and compute alike
        gguf=_LLAMA_GGUF,
    ),
    Family(
        model_types=("granite",),
        read=read_llama,
        has_liger=True,
        scales_logits=True,
        gguf=_GRANITE_GGUF,
    ),
    Family(model_types=("smollm3",), read=read_tied_llama, has_liger=True, gguf=_SMOLLM3_GGUF),
    Family(
        model_types=("stablelm",),
        read=read_stablelm,
        gguf_flags=_read_stablelm_flags,
        gguf=_STABLELM_GGUF,
    ),
    Family(model_types=("baichuan",), read=read_baichuan, splits_rotary=True),
)


# Phi 1 to 2 (parallel residual, LayerNorm) and Phi 3 to 4 (Llama-like with fused matrices).


def read_phi(f: ConfigFields) -> ModelSpec:
    """Phi 1, 1.5, 2: one norm a layer, biases everywhere, the head's too."""
    stem = parts.read_decoder_shape(f, activation="gelu_new")
    linears = parts.split_attention(stem, bias=True, out_name="dense") + parts.plain_mlp(
        stem, names=("fc1", "fc2"), bias=True
    )
    per_head = f.flag("qk_layernorm", default=False)
    block = parts.decoder(
        stem,
        linears,
        num_norms=1,
        norm_bias=True,
        head_norm_params=4 * stem.head_dim if per_head else 0,
    )
    return parts.make_spec(
        stem, block, has_layer_norm=True, is_parallel_residual=True, lm_head_bias=True
    )


def read_phi3(f: ConfigFields) -> ModelSpec:
    """Phi 3, 3.5, 4: `qkv_proj` and `gate_up_proj` are fused."""
    stem = parts.read_decoder_shape(f)
    linears = parts.fused_attention(stem, names=("qkv_proj", "o_proj")) + parts.plain_mlp(
        stem, names=("gate_up_proj", "down_proj"), bias=False, up_factor=2
    )
    window = f.window("sliding_window", default=None)
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears),
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def _write_phi3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(int(config.sliding_window or 0))


def _read_phi3_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    settings = read_usual_settings(file, rope)
    del settings["head_dim"]
    trained = rope.get("original_max_position_embeddings", settings["max_position_embeddings"])
    return settings | {
        "sliding_window": int(file.get("attention.sliding_window", 0)) or None,
        "original_max_position_embeddings": trained,
    }


def _find_phi_obstacle(config: Any) -> str | None:
    return "norms over queries and keys (qk_layernorm)" if config.qk_layernorm else None


_PHI_GGUF = GgufLayout(
    activations=("gelu_new", "gelu_pytorch_tanh"),
    needs_head=True,
    find_obstacle=_find_phi_obstacle,
    read_settings=read_usual_layernorm_settings,
)

PHI_FAMILIES = (
    Family(
        model_types=("phi",), read=read_phi, composes_gelu=True, gguf_name="phi2", gguf=_PHI_GGUF
    ),
    Family(
        model_types=("phi3",),
        read=read_phi3,
        has_liger=True,
        splits_rotary=True,
        gguf=GgufLayout(
            find_obstacle=find_non_square_heads,
            reads_rope_factors=True,
            rope_spans_rotary_dim=True,
            write_attention=_write_phi3,
            read_settings=_read_phi3_gguf,
        ),
    ),
)


# Families that are mixtures of experts on every layer: Mixtral, GraniteMoE, gpt-oss.


def read_mixtral(f: ConfigFields) -> ModelSpec:
    """Mistral's attention, experts for the MLP."""
    stem = parts.read_decoder_shape(f, kv_heads=f.size_or_default("num_key_value_heads", default=8))
    experts = parts.read_experts(f, inner=stem.inner, count_default=8, per_token_default=2)
    window = f.window("sliding_window", default=None)
    linears = parts.split_attention(stem) + parts.expert_linears(
        stem, experts, router="gate", adapted=True
    )
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears),
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def read_granitemoe(f: ConfigFields) -> ModelSpec:
    """Granite's attention, experts for the MLP."""
    stem = parts.read_decoder_shape(f)
    experts = parts.read_experts(f, inner=stem.inner, count_default=8, per_token_default=2)
    attention = parts.split_attention(stem, bias=f.flag("attention_bias", default=False))
    linears = attention + parts.expert_linears(stem, experts, router="router")
    return parts.make_spec(stem, parts.decoder(stem, linears))


def read_gpt_oss(f: ConfigFields) -> ModelSpec:
    """gpt-oss: biases on experts too, a learned sink per head, every other layer slides."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=64))
    experts = parts.read_experts(f, inner=stem.inner, count_default=128, per_token_default=4)
    bias = f.flag("attention_bias", default=True)
    linears = parts.split_attention(stem, bias=bias) + parts.expert_linears(
        stem, experts, router="router", bias=True
    )
    window = f.window("sliding_window", default=128)
    sliding = parts.count_sliding(f, layers=stem.layers, otherwise=(stem.layers + 1) // 2)
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears, extra_params=stem.heads),
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
    )


_MIXTRAL_GGUF = GgufLayout(
    rearrangement=Rearrangement.ROTARY,
    reads_rope_factors=True,
    expert_inner_key="intermediate_size",
    read_settings=None,
)
GRANITEMOE_GGUF = GgufLayout(
    rearrangement=Rearrangement.ROTARY,
    reads_rope_factors=True,
    expert_inner_key="intermediate_size",
    write_attention=write_granite,
    read_settings=None,
)


def _find_gpt_oss_obstacle(config: Any) -> str | None:
    limits = (getattr(config, "swiglu_alpha", 1.702), config.swiglu_limit)
    if limits != (1.702, 7.0):
        return "another swiglu_alpha or swiglu_limit than 1.702 and 7"
    return None if config.attention_bias else "attention without biases"


def _write_gpt_oss(writer: Any, config: Any) -> None:
    require_full_attention_period(config, 2)
    writer.add_sliding_window(int(config.sliding_window))


_GPT_OSS_GGUF = GgufLayout(
    needs_head=True,
    rearrangement=Rearrangement.ALTERNATING_EXPERTS,
    expert_inner_key="intermediate_size",
    find_obstacle=_find_gpt_oss_obstacle,
    keeps_mxfp4=True,
    computes_windows=True,
    write_attention=_write_gpt_oss,
    read_settings=None,
)

MOE_FAMILIES = (
    Family(
        model_types=("mixtral",),
        read=read_mixtral,
        has_router_loss=True,
        has_liger=True,
        gguf_name="llama",  # its files say llama, with experts
        gguf=_MIXTRAL_GGUF,
    ),
    Family(
        model_types=("granitemoe",),
        mlp_module="",
        read=read_granitemoe,
        has_router_loss=True,
        scales_logits=True,
        gguf=GRANITEMOE_GGUF,
    ),
    Family(
        model_types=("gpt_oss",),
        read=read_gpt_oss,
        has_router_loss=True,
        has_sdpa=False,
        has_sinks=True,
        mask_reads_positions=False,
        has_liger=True,
        gguf_name="gpt-oss",
        gguf=_GPT_OSS_GGUF,
    ),
)
