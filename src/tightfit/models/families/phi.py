"""Phi 1 to 2 (parallel residual, LayerNorm) and Phi 3 to 4 (Llama-like with fused matrices)."""

from __future__ import annotations

from tightfit.models.families.parts import (
    ConfigFields,
    decoder,
    fused_attention,
    plain_mlp,
    read_decoder_shape,
    split_attention,
)
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec


def read_phi(f: ConfigFields) -> ModelSpec:
    """Phi 1, 1.5, 2: one norm a layer, biases everywhere, the head's too."""
    stem = read_decoder_shape(f, activation="gelu_new")
    linears = split_attention(stem, bias=True, out_name="dense") + plain_mlp(
        stem, names=("fc1", "fc2"), bias=True
    )
    per_head = f.flag("qk_layernorm", default=False)
    block = decoder(
        stem,
        linears,
        num_norms=1,
        norm_bias=True,
        head_norm_params=4 * stem.head_dim if per_head else 0,
    )
    return ModelSpec(
        **stem.numbers(),
        model_type="phi",
        blocks=(block,),
        is_rms_norm=False,
        is_gated_mlp=False,
        is_parallel_residual=True,
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        lm_head_bias=True,
        outer_params=2 * stem.hidden,
    )


def read_phi3(f: ConfigFields) -> ModelSpec:
    """Phi 3, 3.5, 4: `qkv_proj` and `gate_up_proj` are fused."""
    stem = read_decoder_shape(f)
    linears = fused_attention(stem, names=("qkv_proj", "o_proj")) + plain_mlp(
        stem, names=("gate_up_proj", "down_proj"), bias=False, up_factor=2
    )
    window = f.window("sliding_window", default=None)
    return ModelSpec(
        **stem.numbers(),
        model_type="phi3",
        blocks=(decoder(stem, linears),),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        outer_params=stem.hidden,
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


PHI_FAMILIES = (
    Family(model_types=("phi",), read=read_phi, composes_gelu=True),
    Family(model_types=("phi3",), read=read_phi3, has_liger=True, splits_rotary=True),
)
