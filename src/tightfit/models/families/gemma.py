"""Gemma 1, 2 and 3 (text): tied embeddings, wide heads, norms before and after from 2 on."""

from __future__ import annotations

from tightfit.models.families.parts import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_VOCAB,
    ConfigFields,
    DecoderShape,
    count_sliding,
    decoder,
    gated_mlp,
    read_decoder_shape,
    split_attention,
)
from tightfit.models.family import Family
from tightfit.models.spec import Linear, ModelSpec

_TANH = "gelu_pytorch_tanh"


def read_gemma(f: ConfigFields) -> ModelSpec:
    """The first Gemma: Llama's layer with tied embeddings."""
    stem = read_decoder_shape(
        f, head_dim=f.size_or_default("head_dim", default=256), activation=_TANH
    )
    return ModelSpec(
        **stem.numbers(),
        model_type="gemma",
        blocks=(decoder(stem, _linears(f, stem)),),
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        outer_params=stem.hidden,
    )


def read_gemma2(f: ConfigFields) -> ModelSpec:
    """Four norms a layer, every other layer slides, soft caps on scores and logits."""
    stem = read_decoder_shape(
        f, head_dim=f.size_or_default("head_dim", default=256), activation=_TANH
    )
    window = f.window("sliding_window", default=4096)
    sliding = count_sliding(f, layers=stem.layers, otherwise=(stem.layers + 1) // 2)
    return ModelSpec(
        **stem.numbers(),
        model_type="gemma2",
        blocks=(decoder(stem, _linears(f, stem), num_norms=4),),
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        outer_params=stem.hidden,
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
            "vocab_size": f.size_or_default("vocab_size", default=262_208, most=MAX_VOCAB),
            "num_attention_heads": f.size_or_default(
                "num_attention_heads", default=8, most=MAX_COUNT
            ),
            "hidden_size": f.size("hidden_size"),
            "intermediate_size": f.size("intermediate_size"),
            "num_hidden_layers": f.size("num_hidden_layers", most=MAX_LAYERS),
            "max_position_embeddings": f.window("max_position_embeddings", default=131_072),
        },
        name=f.name,
        source=f.source,
    )
    stem = read_decoder_shape(
        filled,
        kv_heads=f.size_or_default("num_key_value_heads", default=4, most=MAX_COUNT),
        head_dim=f.size_or_default("head_dim", default=256),
        activation=f.text("hidden_activation", default=_TANH),
    )
    window = f.window("sliding_window", default=4096)
    pattern = f.optional_size("sliding_window_pattern", most=MAX_LAYERS) or 6
    sliding = count_sliding(f, layers=stem.layers, otherwise=stem.layers - stem.layers // pattern)
    block = decoder(stem, _linears(f, stem), num_norms=4, head_norm_params=2 * stem.head_dim)
    return ModelSpec(
        **stem.numbers(),
        model_type="gemma3_text",
        blocks=(block,),
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        outer_params=stem.hidden,
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
        has_logit_softcap=f.has("final_logit_softcapping"),
        has_attention_softcap=f.has("attn_logit_softcapping"),
    )


def _linears(f: ConfigFields, stem: DecoderShape) -> tuple[Linear, ...]:
    bias = f.flag("attention_bias", default=False)
    return split_attention(stem, bias=bias) + gated_mlp(stem)


def _is_capped(f: ConfigFields, key: str) -> bool:
    """Gemma 2 caps unless its config says null."""
    f.number(key)
    return f.has(key) or not f.mentions(key)


GEMMA_FAMILIES = (
    Family(
        model_types=("gemma",),
        read=read_gemma,
        has_liger=True,
        fuses_projections=True,
        keeps_norm_output_fp32=True,
    ),
    Family(
        model_types=("gemma2",),
        read=read_gemma2,
        has_sdpa=False,
        default_softcap=True,
        has_liger=True,
        keeps_norm_output_fp32=True,
    ),
    Family(
        model_types=("gemma3", "gemma3_text"),
        read=read_gemma3,
        has_liger=True,
        keeps_norm_output_fp32=True,
        overflows_fp16=True,
    ),
)
