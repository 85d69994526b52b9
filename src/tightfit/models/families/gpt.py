"""GPT-2 and its line: GPT-BigCode, GPT-NeoX, GPT-J, CodeGen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tightfit.models.families import parts
from tightfit.models.families.parts import ConfigFields, DecoderShape
from tightfit.models.family import (
    Family,
    GgufLayout,
    GgufMetadata,
    Rearrangement,
    Settings,
    read_usual_layernorm_settings,
    round_fp32,
)
from tightfit.models.spec import Linear, ModelSpec

_TANH = "gelu_pytorch_tanh"


def read_gpt2(f: ConfigFields) -> ModelSpec:
    """Learned positions, biases everywhere, tied embeddings."""
    stem = parts.read_decoder_shape(f, inner_factor=4, activation="gelu_new")
    return _read_learned_positions(f, stem)


def read_gpt_bigcode(f: ConfigFields) -> ModelSpec:
    """GPT-2 with one key/value head: StarCoder, SantaCoder."""
    shared = f.flag("multi_query", default=True)
    stem = parts.read_decoder_shape(
        f, inner_factor=4, kv_heads=1 if shared else None, activation=_TANH
    )
    return _read_learned_positions(f, stem)


def read_gpt_neox(f: ConfigFields) -> ModelSpec:
    """GPT-NeoX and Pythia: rotary, two norms a layer whether or not the residual is parallel."""
    stem = parts.read_decoder_shape(f, inner_factor=4, activation="gelu")
    names = ("query_key_value", "dense")
    attention = parts.fused_attention(
        stem, names=names, bias=f.flag("attention_bias", default=True)
    )
    mlp = parts.plain_mlp(stem, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
    return parts.make_spec(
        stem,
        parts.decoder(stem, attention + mlp, norm_bias=True),
        has_layer_norm=True,
        is_parallel_residual=f.flag("use_parallel_residual", default=True),
    )


def read_gptj(f: ConfigFields) -> ModelSpec:
    """GPT-J: one norm a layer, biases on the MLP and the head alone."""
    stem = parts.read_decoder_shape(f, inner_factor=4, activation="gelu_new")
    return _read_parallel(stem, parts.split_attention(stem, out_name="out_proj"))


def read_codegen(f: ConfigFields) -> ModelSpec:
    """CodeGen 1 and 2: GPT-J with query, key and value in one matrix."""
    stem = parts.read_decoder_shape(f, inner_factor=4, activation="gelu_new")
    attention = parts.fused_attention(stem, names=("qkv_proj", "out_proj"))
    return _read_parallel(stem, attention)


def _read_learned_positions(f: ConfigFields, stem: DecoderShape) -> ModelSpec:
    positions = f.size_or_default(
        "n_positions", "max_position_embeddings", "n_ctx", default=1024, most=parts.MAX_POSITIONS
    )
    linears = parts.fused_attention(stem, names=("c_attn", "c_proj"), bias=True) + parts.plain_mlp(
        stem, names=("c_fc", "c_proj"), bias=True
    )
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears, norm_bias=True),
        tied=True,
        has_layer_norm=True,
        position_params=positions * stem.hidden,
    )


def _read_parallel(stem: DecoderShape, attention: tuple[Linear, ...]) -> ModelSpec:
    mlp = parts.plain_mlp(stem, names=("fc_in", "fc_out"), bias=True)
    return parts.make_spec(
        stem,
        parts.decoder(stem, attention + mlp, num_norms=1, norm_bias=True),
        has_layer_norm=True,
        is_parallel_residual=True,
        lm_head_bias=True,
    )


def _find_gpt2_obstacle(config: Any) -> str | None:
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return "attention scaled by the layer's number"
    return None if getattr(config, "scale_attn_weights", True) else "unscaled attention"


def _read_gpt2_gguf(file: GgufMetadata, _rope: Settings) -> Settings:
    width, inner = int(file.get("embedding_length")), int(file.get("feed_forward_length"))
    return {
        "n_layer": int(file.get("block_count")),
        "n_head": int(file.get("attention.head_count")),
        "layer_norm_epsilon": round_fp32(file.get("attention.layer_norm_epsilon")),
        "n_embd": width,
        "n_positions": int(file.get("context_length")),
        "n_inner": None if inner == 4 * width else inner,
    }


def _find_bigcode_obstacle(config: Any) -> str | None:
    if not config.multi_query:
        return "a key and value for each head (multi_query: false)"
    return None if config.scale_attn_weights else "unscaled attention"


_BIGCODE_GGUF = GgufLayout(
    activations=(_TANH, "gelu_new"),
    inner_key="n_inner",
    count_kv_heads=lambda _config: 1,
    find_obstacle=_find_bigcode_obstacle,
    has_rotary=False,
    read_settings=None,
)


def _read_bigcode_flags(config: Mapping[str, Any], _tensors: Collection[str]) -> Settings:
    return {"multi_query": config.get("num_key_value_heads", 1) == 1}


def _write_gpt_neox(writer: Any, config: Any) -> None:
    writer.add_parallel_residual(bool(config.use_parallel_residual))


def _find_gpt_neox_obstacle(config: Any) -> str | None:
    return None if config.attention_bias else "attention without biases"


def _read_gpt_neox_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    return read_usual_layernorm_settings(file, rope) | {
        "use_parallel_residual": bool(file.get("use_parallel_residual"))
    }


_GPT_NEOX_GGUF = GgufLayout(
    # llama.cpp has the tanh form of GELU where these have the exact one: 1e-3 apart at most.
    activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    needs_head=True,
    rearrangement=Rearrangement.GROUPED_QKV,
    count_kv_heads=lambda config: int(config.num_attention_heads),
    find_obstacle=_find_gpt_neox_obstacle,
    write_attention=_write_gpt_neox,
    read_settings=_read_gpt_neox_gguf,
)

GPT_FAMILIES = (
    Family(
        model_types=("gpt2",),
        read=read_gpt2,
        default_attention_dropout=0.1,
        composes_gelu=True,
        has_fp8_linears=False,  # Conv1D
        gguf=GgufLayout(
            activations=(_TANH, "gelu_new"),
            rearrangement=Rearrangement.TRANSPOSED,
            old_prefix="added",
            inner_key="n_inner",
            find_obstacle=_find_gpt2_obstacle,
            has_rotary=False,
            read_settings=_read_gpt2_gguf,
        ),
    ),
    Family(
        model_types=("gpt_bigcode",),
        read=read_gpt_bigcode,
        default_attention_dropout=0.1,
        gguf_name="starcoder",
        gguf_flags=_read_bigcode_flags,
        gguf=_BIGCODE_GGUF,
    ),
    Family(
        model_types=("gpt_neox",),
        read=read_gpt_neox,
        splits_rotary=True,
        gguf_name="gptneox",
        gguf=_GPT_NEOX_GGUF,
    ),
    Family(
        model_types=("gptj",),
        read=read_gptj,
        has_sdpa=False,
        accepts_custom_attention=False,
        composes_gelu=True,
    ),
    Family(
        model_types=("codegen",),
        read=read_codegen,
        has_sdpa=False,
        has_flash=False,
        accepts_custom_attention=False,
        splits_rotary=True,
        composes_gelu=True,
    ),
)
