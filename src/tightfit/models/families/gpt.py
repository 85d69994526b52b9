"""GPT-2 and its line: GPT-BigCode, GPT-NeoX, GPT-J, CodeGen."""

from __future__ import annotations

from tightfit.models.families.parts import (
    MAX_POSITIONS,
    ConfigFields,
    DecoderShape,
    decoder,
    fused_attention,
    plain_mlp,
    read_decoder_shape,
    split_attention,
)
from tightfit.models.family import Family
from tightfit.models.spec import Linear, ModelSpec

_TANH = "gelu_pytorch_tanh"


def read_gpt2(f: ConfigFields) -> ModelSpec:
    """Learned positions, biases everywhere, tied embeddings."""
    stem = read_decoder_shape(f, inner_factor=4, activation="gelu_new")
    return _read_learned_positions(f, stem, "gpt2")


def read_gpt_bigcode(f: ConfigFields) -> ModelSpec:
    """GPT-2 with one key/value head: StarCoder, SantaCoder."""
    shared = f.flag("multi_query", default=True)
    stem = read_decoder_shape(f, inner_factor=4, kv_heads=1 if shared else None, activation=_TANH)
    return _read_learned_positions(f, stem, "gpt_bigcode")


def read_gpt_neox(f: ConfigFields) -> ModelSpec:
    """GPT-NeoX and Pythia: rotary, two norms a layer whether or not the residual is parallel."""
    stem = read_decoder_shape(f, inner_factor=4, activation="gelu")
    names = ("query_key_value", "dense")
    attention = fused_attention(stem, names=names, bias=f.flag("attention_bias", default=True))
    mlp = plain_mlp(stem, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
    return ModelSpec(
        **stem.numbers(),
        model_type="gpt_neox",
        blocks=(decoder(stem, attention + mlp, norm_bias=True),),
        is_rms_norm=False,
        is_gated_mlp=False,
        is_parallel_residual=f.flag("use_parallel_residual", default=True),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=2 * stem.hidden,
    )


def read_gptj(f: ConfigFields) -> ModelSpec:
    """GPT-J: one norm a layer, biases on the MLP and the head alone."""
    stem = read_decoder_shape(f, inner_factor=4, activation="gelu_new")
    return _read_parallel(f, stem, split_attention(stem, out_name="out_proj"), "gptj")


def read_codegen(f: ConfigFields) -> ModelSpec:
    """CodeGen 1 and 2: GPT-J with query, key and value in one matrix."""
    stem = read_decoder_shape(f, inner_factor=4, activation="gelu_new")
    attention = fused_attention(stem, names=("qkv_proj", "out_proj"))
    return _read_parallel(f, stem, attention, "codegen")


def _read_learned_positions(f: ConfigFields, stem: DecoderShape, model_type: str) -> ModelSpec:
    positions = f.size_or_default(
        "n_positions", "max_position_embeddings", "n_ctx", default=1024, most=MAX_POSITIONS
    )
    linears = fused_attention(stem, names=("c_attn", "c_proj"), bias=True) + plain_mlp(
        stem, names=("c_fc", "c_proj"), bias=True
    )
    return ModelSpec(
        **stem.numbers(),
        model_type=model_type,
        blocks=(decoder(stem, linears, norm_bias=True),),
        is_rms_norm=False,
        is_gated_mlp=False,
        tie_embeddings=f.flag("tie_word_embeddings", default=True),
        position_params=positions * stem.hidden,
        outer_params=2 * stem.hidden,
    )


def _read_parallel(
    f: ConfigFields, stem: DecoderShape, attention: tuple[Linear, ...], model_type: str
) -> ModelSpec:
    mlp = plain_mlp(stem, names=("fc_in", "fc_out"), bias=True)
    return ModelSpec(
        **stem.numbers(),
        model_type=model_type,
        blocks=(decoder(stem, attention + mlp, num_norms=1, norm_bias=True),),
        is_rms_norm=False,
        is_gated_mlp=False,
        is_parallel_residual=True,
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        lm_head_bias=True,
        outer_params=2 * stem.hidden,
    )


GPT_FAMILIES = (
    Family(
        model_types=("gpt2",),
        read=read_gpt2,
        default_attention_dropout=0.1,
        composes_gelu=True,
        has_fp8_linears=False,  # Conv1D
    ),
    Family(model_types=("gpt_bigcode",), read=read_gpt_bigcode, default_attention_dropout=0.1),
    Family(model_types=("gpt_neox",), read=read_gpt_neox, splits_rotary=True),
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
