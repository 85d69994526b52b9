"""T5 and mT5: an encoder and a decoder with cross-attention."""

from __future__ import annotations

from dataclasses import replace

from tightfit.models.families import parts
from tightfit.models.families.parts import ConfigFields, DecoderShape
from tightfit.models.family import Family
from tightfit.models.spec import Block, Linear, ModelSpec, Role


def read_t5(f: ConfigFields) -> ModelSpec:
    """T5, T5 1.1, Flan-T5, mT5: one relative-position table in each stack."""
    f.need(("d_model",), ("d_kv",), ("d_ff",), ("num_layers",), ("num_heads",), ("vocab_size",))
    gate, _, activation = f.text("feed_forward_proj", default="relu").rpartition("-")
    gated = gate == "gated"
    if gated and activation == "gelu":
        activation = "gelu_new"  # as T5 1.1 was trained, whatever its config calls it
    stem = replace(parts.read_decoder_shape(f, head_dim=f.size("d_kv")), activation=activation)
    mlp = _mlp(stem, gated=gated)
    own, crossed = _attention(stem, Role.ATTENTION), _attention(stem, Role.CROSS_ATTENTION)
    encoder = Block(
        kind="encoder",
        num_layers=stem.layers,
        linears=own + mlp,
        norm_widths=(stem.hidden,) * 2,
    )
    decoder = Block(
        kind="decoder",
        num_layers=f.optional_size("num_decoder_layers", most=parts.MAX_LAYERS) or stem.layers,
        linears=own + crossed + mlp,
        norm_widths=(stem.hidden,) * 3,
    )
    buckets = f.optional_size("relative_attention_num_buckets", most=parts.MAX_COUNT) or 32
    return ModelSpec(
        **stem.numbers(),
        model_type="t5",
        blocks=(encoder, decoder),
        is_gated_mlp=gated,
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        position_params=2 * buckets * stem.heads,
        outer_params=2 * stem.hidden,
    )


def _attention(stem: DecoderShape, role: Role) -> tuple[Linear, ...]:
    wide, narrow = stem.query_width, stem.hidden
    return (
        parts.linear("q", narrow, wide, role),
        parts.linear("k", narrow, wide, role),
        parts.linear("v", narrow, wide, role),
        parts.linear("o", wide, narrow, role),
    )


def _mlp(stem: DecoderShape, *, gated: bool) -> tuple[Linear, ...]:
    names = ("wi_0", "wi_1") if gated else ("wi",)
    ups = tuple(parts.linear(name, stem.hidden, stem.inner, Role.MLP) for name in names)
    return (*ups, parts.linear("wo", stem.inner, stem.hidden, Role.MLP))


T5_FAMILIES = (
    Family(
        model_types=("t5", "mt5"),
        mlp_module="",
        read=read_t5,
        has_flash=False,
        has_position_bias=True,
        takes_positions=False,
        casts_to_weight_dtype=True,
        may_overflow_fp16=True,
    ),
    Family(
        model_types=("umt5",),
        has_flash=False,
        takes_positions=False,
        casts_to_weight_dtype=True,
        may_overflow_fp16=True,
    ),
    Family(
        model_types=("longt5",),
        has_sdpa=False,
        has_flash=False,
        takes_positions=False,
        casts_to_weight_dtype=True,
        may_overflow_fp16=True,
    ),
)
