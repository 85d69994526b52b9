"""Qwen: the first generation, 2 and 2.5, 3 and 3-MoE."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tightfit.models.families import parts
from tightfit.models.families.parts import ConfigFields, DecoderShape
from tightfit.models.family import (
    Family,
    GgufLayout,
    GgufMetadata,
    Settings,
    find_non_square_heads,
    read_usual_settings,
)
from tightfit.models.spec import Block, ModelSpec, Role


def read_qwen(f: ConfigFields) -> ModelSpec:
    """The first Qwen: `intermediate_size` counts gate and up together. Code on the hub only."""
    f.need(("intermediate_size",))
    doubled = f.size("intermediate_size", most=parts.MAX_INNER_WIDTH)
    stem = parts.read_decoder_shape(
        f, inner=f.quotient(doubled, 2, "`intermediate_size` holds gate and up")
    )
    bias = not f.flag("no_bias", default=True)
    linears = (
        *parts.fused_attention(stem, names=("c_attn", "c_proj"), bias=True, out_bias=bias),
        parts.linear("w1", stem.hidden, stem.inner, Role.MLP, bias=bias),
        parts.linear("w2", stem.hidden, stem.inner, Role.MLP, bias=bias),
        parts.linear("c_proj", stem.inner, stem.hidden, Role.MLP, bias=bias),
    )
    return parts.make_spec(stem, parts.decoder(stem, linears))


def read_qwen2(f: ConfigFields) -> ModelSpec:
    """Qwen 2 and 2.5: biases on query, key and value alone."""
    stem = parts.read_decoder_shape(f)
    linears = parts.split_attention(stem, bias=True, out_bias=False) + parts.gated_mlp(stem)
    window, sliding = _late_window(f, stem)
    return parts.make_spec(
        stem, parts.decoder(stem, linears), sliding_window=window, num_sliding_layers=sliding
    )


def read_qwen3(f: ConfigFields) -> ModelSpec:
    """Qwen 3: a norm over each query and key head; `head_dim` stands apart."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    linears = parts.split_attention(
        stem, bias=f.flag("attention_bias", default=False)
    ) + parts.gated_mlp(stem)
    window, sliding = _late_window(f, stem)
    block = parts.decoder(stem, linears, head_norm_params=2 * stem.head_dim)
    return parts.make_spec(stem, block, sliding_window=window, num_sliding_layers=sliding)


def read_qwen3_moe(f: ConfigFields) -> ModelSpec:
    """Qwen 3 with experts on every layer, or on those the config picks."""
    stem = parts.read_decoder_shape(f)
    inner = f.size_or_default("moe_intermediate_size", default=768, most=parts.MAX_INNER_WIDTH)
    experts = parts.read_experts(f, inner=inner, count_default=128, per_token_default=8)
    attention = parts.split_attention(stem, bias=f.flag("attention_bias", default=False))

    def block(is_sparse: bool) -> Block:
        # Under `all-linear` peft takes the experts for the gate, up and down projections.
        mlp = parts.without_adapter(parts.gated_mlp(stem))
        if is_sparse:
            mlp = parts.expert_linears(stem, experts, router="gate", adapted=True)
        return parts.decoder(stem, attention + mlp, head_norm_params=2 * stem.head_dim)

    used = f.flag("use_sliding_window", default=False)
    window = f.window("sliding_window", default=4096) if used else None
    return ModelSpec(
        **stem.numbers() | {"intermediate_size": inner},
        model_type="qwen3_moe",
        blocks=parts.blocks(find_sparse_layers(f, stem.layers), block),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def find_sparse_layers(f: ConfigFields, layers: int) -> list[bool]:
    """Whether each layer has experts: not those listed, nor those off the sparse step."""
    step = f.optional_size("decoder_sparse_step", most=parts.MAX_LAYERS) or 1
    listed = set(f.numbers("mlp_only_layers"))
    return [index not in listed and (index + 1) % step == 0 for index in range(layers)]


def _late_window(f: ConfigFields, stem: DecoderShape) -> tuple[int | None, int]:
    """The window, if used, covers the layers from `max_window_layers` on."""
    if not f.flag("use_sliding_window", default=False):
        return None, 0
    window = f.window("sliding_window", default=4096)
    first = f.optional_size("max_window_layers", most=parts.MAX_COUNT) or 0
    late = max(0, stem.layers - first) if window else 0
    return window, parts.count_sliding(f, layers=stem.layers, otherwise=late)


def _read_qwen_flags(config: Mapping[str, Any], _tensors: Collection[str]) -> Settings:
    width = config.get("intermediate_size")  # of gate or up alone in GGUF
    return {"intermediate_size": 2 * width if isinstance(width, int) else width}


def _read_qwen3_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    bias = "blk.0.attn_q.bias" in file.tensors
    return read_usual_settings(file, rope) | {"attention_bias": bias}


def _find_attention_bias(config: Any) -> str | None:
    """llama.cpp has no bias behind attention in Qwen 3."""
    return "biases in its attention" if config.attention_bias else None


def _find_qwen3_moe_obstacle(config: Any) -> str | None:
    if not config.norm_topk_prob:
        return "experts whose weights do not add up to one (norm_topk_prob: false)"
    return _find_attention_bias(config) or _find_dense_layers(config)


def _find_dense_layers(config: Any) -> str | None:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "layers without experts (mlp_only_layers, decoder_sparse_step)"
    return None


_QWEN3_MOE_GGUF = GgufLayout(
    find_obstacle=_find_qwen3_moe_obstacle,
    expert_inner_key="moe_intermediate_size",
    read_settings=None,
)

QWEN_FAMILIES = (
    Family(model_types=("qwen",), read=read_qwen, splits_rotary=True, gguf_flags=_read_qwen_flags),
    Family(
        model_types=("qwen2",),
        read=read_qwen2,
        has_liger=True,
        fuses_projections=True,
        gguf=GgufLayout(find_obstacle=find_non_square_heads),
    ),
    Family(
        model_types=("qwen3",),
        read=read_qwen3,
        has_liger=True,
        fuses_projections=True,
        gguf=GgufLayout(find_obstacle=_find_attention_bias, read_settings=_read_qwen3_gguf),
    ),
    Family(
        model_types=("qwen3_moe",),
        read=read_qwen3_moe,
        has_router_loss=True,
        has_liger=True,
        gguf_name="qwen3moe",
        gguf=_QWEN3_MOE_GGUF,
    ),
)
