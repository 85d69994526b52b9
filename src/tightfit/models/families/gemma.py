"""Gemma 1 to 4 (text): tied embeddings, wide heads, norms before and after from 2 on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from tightfit.models.families import parts
from tightfit.models.families.parts import ConfigFields, DecoderShape
from tightfit.models.family import (
    Family,
    GgufLayout,
    GgufMetadata,
    Rearrangement,
    Settings,
    read_usual_settings,
    require_full_attention_period,
)
from tightfit.models.spec import Block, Linear, ModelSpec, Role

_TANH = "gelu_pytorch_tanh"


def read_gemma(f: ConfigFields) -> ModelSpec:
    """The first Gemma: Llama's layer with tied embeddings."""
    stem = parts.read_decoder_shape(
        f, head_dim=f.size_or_default("head_dim", default=256), activation=_TANH
    )
    return parts.make_spec(stem, parts.decoder(stem, _linears(f, stem)), tied=True)


def read_gemma2(f: ConfigFields) -> ModelSpec:
    """Four norms a layer, every other layer slides, soft caps on scores and logits."""
    stem = parts.read_decoder_shape(
        f, head_dim=f.size_or_default("head_dim", default=256), activation=_TANH
    )
    window = f.window("sliding_window", default=4096)
    sliding = parts.count_sliding(f, layers=stem.layers, otherwise=(stem.layers + 1) // 2)
    return parts.make_spec(
        stem,
        parts.decoder(stem, _linears(f, stem), num_norms=4),
        tied=True,
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
        has_logit_softcap=_is_capped(f, "final_logit_softcapping"),
        has_attention_softcap=_is_capped(f, "attn_logit_softcapping"),
    )


def read_gemma3(f: ConfigFields) -> ModelSpec:
    """Gemma 2's layer with head norms instead of caps; five layers in six slide.

    A multimodal config's `text_config` leaves out what equals the library's
    defaults, so those are filled in, each with a warning.
    """
    filled = ConfigFields(
        {
            **{key: f.values.get(key) for key in ("model_type", "tie_word_embeddings")},
            "vocab_size": f.size_or_default("vocab_size", default=262_208, most=parts.MAX_VOCAB),
            "num_attention_heads": f.size_or_default(
                "num_attention_heads", default=8, most=parts.MAX_COUNT
            ),
            "hidden_size": f.size("hidden_size"),
            "intermediate_size": f.size("intermediate_size"),
            "num_hidden_layers": f.size("num_hidden_layers", most=parts.MAX_LAYERS),
            "max_position_embeddings": f.window("max_position_embeddings", default=131_072),
        },
        name=f.name,
        source=f.source,
    )
    stem = parts.read_decoder_shape(
        filled,
        kv_heads=f.size_or_default("num_key_value_heads", default=4, most=parts.MAX_COUNT),
        head_dim=f.size_or_default("head_dim", default=256),
        activation=f.text("hidden_activation", default=_TANH),
    )
    window = f.window("sliding_window", default=4096)
    pattern = f.optional_size("sliding_window_pattern", most=parts.MAX_LAYERS) or 6
    sliding = parts.count_sliding(
        f, layers=stem.layers, otherwise=stem.layers - stem.layers // pattern
    )
    block = parts.decoder(stem, _linears(f, stem), num_norms=4, head_norm_params=2 * stem.head_dim)
    return parts.make_spec(
        stem,
        block,
        tied=True,
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
        has_logit_softcap=f.has("final_logit_softcapping"),
        has_attention_softcap=f.has("attn_logit_softcapping"),
    )


class _Gemma4Layer(NamedTuple):
    """What tells one layer of Gemma 4 from another."""

    slides: bool
    shares_keys: bool
    """With an earlier layer, so that it has no key and value matrices."""


def read_gemma4(f: ConfigFields) -> ModelSpec:
    """Wider heads where a layer sees everything, an embedding for each layer, maybe experts too."""
    f = f.with_values(
        num_key_value_heads=f.size_or_default(
            "num_key_value_heads", default=4, most=parts.MAX_COUNT
        )
    )
    narrow = parts.read_decoder_shape(
        f, head_dim=f.size_or_default("head_dim", default=256), activation=_TANH
    )
    shares_values = f.flag("attention_k_eq_v", default=False)
    wide = _read_wide_shape(f, narrow, shares_values=shares_values)
    given = parts.read_layer_types(f, layers=narrow.layers)
    slides = [
        (at + 1) % 6 != 0 if given is None else given[at] == "sliding_attention"
        for at in range(narrow.layers - 1)
    ]  # the last layer always sees everything
    shared = 0
    if f.values.get("num_kv_shared_layers"):
        shared = f.size("num_kv_shared_layers", most=parts.MAX_LAYERS)
        f.warnings.append("Layers that share keys and values are counted as if each kept its own.")
    kinds = [
        _Gemma4Layer(slides=slide, shares_keys=at >= narrow.layers - shared)
        for at, slide in enumerate([*slides, False])
    ]
    is_doubled = f.flag("use_double_wide_mlp", default=False)
    embedded = 0
    if f.values.get("hidden_size_per_layer_input") != 0:
        embedded = f.size_or_default("hidden_size_per_layer_input", default=256)
    experts = _read_gemma4_experts(f, narrow)

    def block(kind: _Gemma4Layer) -> Block:
        stem = narrow if kind.slides else wide
        query, key, value, output = parts.split_attention(
            stem, bias=f.flag("attention_bias", default=False)
        )
        keys = (key,) if shares_values and not kind.slides else (key, value)
        factor = 2 if is_doubled and kind.shares_keys else 1
        block = parts.decoder(
            stem,
            (
                query,
                *(() if kind.shares_keys else keys),
                output,
                *experts,
                *_read_layer_embedding(stem, embedded),
                *parts.gated_mlp(stem, inner=factor * stem.inner),
            ),
            num_norms=4 + bool(embedded) + 3 * bool(experts),
            head_norm_params=(1 if kind.shares_keys else 2) * stem.head_dim,
            # The router scales its input, and each expert's share.
            extra_params=stem.hidden + experts[0].out_features if experts else 0,
        )
        return block.model_copy(update={"head_dim": stem.head_dim if kind.slides else None})

    window = f.window("sliding_window", default=512)
    blocks = parts.blocks(kinds, block)
    outer, tables = _read_embedding_tables(f, narrow, embedded)
    return parts.make_spec(
        wide,
        blocks,
        tied=True,
        num_kv_heads=narrow.kv_heads,
        outer_params=narrow.hidden + tables,
        outer_linears=outer,
        sliding_window=window,
        num_sliding_layers=sum(kind.slides for kind in kinds) if window else 0,
        has_logit_softcap=f.has("final_logit_softcapping"),
    )


def _read_wide_shape(f: ConfigFields, narrow: DecoderShape, *, shares_values: bool) -> DecoderShape:
    """Of layers that see everything: named once, or by layer in a config that was saved again."""
    by_layer = f.part("per_layer_config")
    if by_layer is not None:
        last = by_layer.part(str(narrow.layers - 1))
        head_dim = last.optional_size("head_dim") if last else None
        kv_heads = last.optional_size("num_key_value_heads", most=parts.MAX_COUNT) if last else None
        head_dim = head_dim or narrow.head_dim
    else:
        head_dim = f.size_or_default("global_head_dim", default=512)
        kv_heads = f.optional_size("num_global_key_value_heads", most=parts.MAX_COUNT)
        kv_heads = kv_heads if shares_values else None
    return replace(narrow, head_dim=head_dim, kv_heads=kv_heads or narrow.kv_heads)


def _read_gemma4_experts(f: ConfigFields, stem: DecoderShape) -> tuple[Linear, ...]:
    """They stand beside the MLP, behind norms of their own."""
    if not f.flag("enable_moe_block", default=False):
        return ()
    f.need(("num_experts",), ("top_k_experts",), ("moe_intermediate_size",))
    experts = parts.Experts(
        count=f.size("num_experts", most=parts.MAX_COUNT),
        per_token=f.size("top_k_experts", most=parts.MAX_COUNT),
        inner=f.size("moe_intermediate_size", most=parts.MAX_INNER_WIDTH),
    )
    router, *others = parts.expert_linears(stem, experts, router="proj", has_linear_router=True)
    return (router.model_copy(update={"lora_rank_factor": 1}), *others)


def _read_layer_embedding(stem: DecoderShape, width: int) -> tuple[Linear, ...]:
    if not width:
        return ()
    return (
        parts.linear("per_layer_input_gate", stem.hidden, width, Role.MLP),
        parts.linear("per_layer_projection", width, stem.hidden, Role.MLP),
    )


def _read_embedding_tables(
    f: ConfigFields, stem: DecoderShape, width: int
) -> tuple[tuple[Linear, ...], int]:
    """The projection of the tokens' embeddings to all layers, and the values of all tables."""
    if not width:
        return (), 0
    rows = f.size_or_default("vocab_size_per_layer_input", default=262_144, most=parts.MAX_VOCAB)
    total = stem.layers * width
    projection = parts.linear("per_layer_model_projection", stem.hidden, total, Role.MLP)
    return (projection,), rows * total + projection.num_params + width


def _linears(f: ConfigFields, stem: DecoderShape) -> tuple[Linear, ...]:
    bias = f.flag("attention_bias", default=False)
    return parts.split_attention(stem, bias=bias) + parts.gated_mlp(stem)


def _is_capped(f: ConfigFields, key: str) -> bool:
    """Gemma 2 caps unless its config says null."""
    f.number(key)
    return f.has(key) or not f.mentions(key)


# llama.cpp scales attention by the head's size, except in models of these many layers, the 27Bs.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
_GEMMA2_PERIOD, _USUAL_GEMMA3_PERIOD = 2, 6


def _find_gguf_obstacle(config: Any) -> str | None:
    is_27b = config.num_hidden_layers == _LAYERS_OF_27B[config.model_type]
    usual = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    if config.query_pre_attn_scalar != usual:
        return f"query_pre_attn_scalar {config.query_pre_attn_scalar} (it would use {usual})"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention in both directions"
    return None


def _write_gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(float(config.attn_logit_softcapping or 0))
    writer.add_final_logit_softcapping(float(config.final_logit_softcapping or 0))
    writer.add_sliding_window(int(config.sliding_window or 0))
    require_full_attention_period(config, _GEMMA2_PERIOD)


def _write_gemma3(writer: Any, config: Any) -> None:
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(float(config.final_logit_softcapping))
    kinds = list(config.layer_types or ())
    if "sliding_attention" not in kinds:
        return
    has_full = "full_attention" in kinds
    period = kinds.index("full_attention") + 1 if has_full else _USUAL_GEMMA3_PERIOD
    require_full_attention_period(config, period)
    writer.add_sliding_window(int(config.sliding_window))
    writer.add_sliding_window_pattern(period)
    local = (config.rope_parameters or {}).get("sliding_attention", {}).get("rope_theta")
    if local is not None:
        writer.add_rope_freq_base_swa(float(local))


def _read_gemma2_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    cap = file.get("attn_logit_softcapping")
    return _read_sliding_gguf(file, rope, "gemma2", _GEMMA2_PERIOD) | {
        "attn_logit_softcapping": float(cap) if cap else None
    }


def _read_gemma3_gguf(file: GgufMetadata, rope: Settings) -> Settings:
    period = int(file.get("attention.sliding_window_pattern", _USUAL_GEMMA3_PERIOD))
    local = float(file.get("rope.freq_base_swa", 10_000.0))
    sliding = {"rope_type": "default", "rope_theta": local}
    return _read_sliding_gguf(file, rope, "gemma3_text", period) | {
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding}
    }


def _read_sliding_gguf(
    file: GgufMetadata, rope: Settings, model_type: str, period: int
) -> Settings:
    settings = read_usual_settings(file, rope)
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    is_27b = layers == _LAYERS_OF_27B[model_type]
    cap, window = file.get("final_logit_softcapping"), file.get("attention.sliding_window")
    if window:
        settings["sliding_window"] = int(window)
    return settings | {
        "query_pre_attn_scalar": settings["hidden_size"] // heads
        if is_27b
        else settings["head_dim"],
        "final_logit_softcapping": float(cap) if cap else None,
        "layer_types": [
            "full_attention" if not window or at % period == period - 1 else "sliding_attention"
            for at in range(layers)
        ],
    }


_GELU_TANH = (_TANH, "gelu_new")
_GEMMA3 = Family(
    model_types=("gemma3_text",),
    read=read_gemma3,
    has_liger=True,
    keeps_norm_output_fp32=True,
    overflows_fp16=True,
    gguf_name="gemma3",
    gguf=GgufLayout(
        activations=_GELU_TANH,
        rearrangement=Rearrangement.NORM_PLUS_ONE,
        find_obstacle=_find_gguf_obstacle,
        rope_theta=1_000_000.0,
        computes_windows=True,
        write_attention=_write_gemma3,
        read_settings=_read_gemma3_gguf,
    ),
)
GEMMA_FAMILIES = (
    Family(
        model_types=("gemma",),
        read=read_gemma,
        has_liger=True,
        fuses_projections=True,
        keeps_norm_output_fp32=True,
        gguf=GgufLayout(
            activations=(*_GELU_TANH, "gelu"),
            can_untie=False,
            rearrangement=Rearrangement.NORM_PLUS_ONE,
        ),
    ),
    Family(
        model_types=("gemma2",),
        read=read_gemma2,
        has_sdpa=False,
        default_softcap=True,
        has_liger=True,
        keeps_norm_output_fp32=True,
        gguf=GgufLayout(
            activations=_GELU_TANH,
            can_untie=False,
            rearrangement=Rearrangement.NORM_PLUS_ONE,
            find_obstacle=_find_gguf_obstacle,
            computes_windows=True,
            write_attention=_write_gemma2,
            read_settings=_read_gemma2_gguf,
        ),
    ),
    _GEMMA3,
    replace(_GEMMA3, model_types=("gemma3",), gguf_name="", gguf=None),  # with a vision part
    Family(
        model_types=("gemma4_text", "gemma4"),
        read=read_gemma4,
        has_liger=True,
        keeps_norm_output_fp32=True,
        gguf_name="gemma4",
    ),
)
