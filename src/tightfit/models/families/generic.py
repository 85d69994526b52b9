"""Families nobody taught us: read from the usual field names, with every guess spoken aloud."""

from __future__ import annotations

from tightfit.models.families.parts import (
    Stem,
    decoder,
    expert_linears,
    gated_mlp,
    plain_mlp,
    read_experts,
    read_stem,
    split_attention,
)
from tightfit.models.fields import MAX_INNER_WIDTH, Fields
from tightfit.models.spec import Linear, ModelSpec

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_SHAPED_ATTENTION = ("kv_lora_rank", "q_lora_rank", "ssm_state_size", "linear_key_head_dim")


def read_generic(f: Fields) -> ModelSpec:
    """A decoder of Llama's shape where an RMSNorm is named, else of GPT's."""
    is_llama = f.has("rms_norm_eps", "norm_eps") or not f.has(
        "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"
    )
    stem = read_stem(f, inner_factor=4, activation="silu" if is_llama else "gelu")
    tied = f.flag("tie_word_embeddings", default=False)
    _warn(f, is_llama=is_llama, tied=tied)
    if is_llama:
        bias = f.flag("attention_bias", default=False)
        linears = split_attention(stem, bias=bias) + _mlp(f, stem)
    else:
        linears = split_attention(stem, bias=True, out_name="dense") + plain_mlp(
            stem, names=("fc1", "fc2"), bias=True
        )
    return ModelSpec(
        **stem.numbers(),
        model_type="generic",
        blocks=(decoder(stem, linears, norm_bias=not is_llama),),
        is_rms_norm=is_llama,
        is_gated_mlp=is_llama,
        tie_embeddings=tied,
        outer_params=stem.hidden * (1 if is_llama else 2),
    )


def _mlp(f: Fields, stem: Stem) -> tuple[Linear, ...]:
    if not f.has(*_EXPERT_KEYS):
        return gated_mlp(stem, bias=f.flag("mlp_bias", default=False))
    inner = f.optional_size("moe_intermediate_size", most=MAX_INNER_WIDTH) or stem.inner
    experts = read_experts(f, inner=inner, count_default=8, per_token_default=2)
    f.warnings.append("Experts on every layer are assumed, without shared ones.")
    return expert_linears(stem, experts, router="gate")


def _warn(f: Fields, *, is_llama: bool, tied: bool) -> None:
    family = f.text("model_type", default="") or "none"
    shape = (
        "a gated MLP, RMSNorm and no biases beyond those the config names"
        if is_llama
        else "a plain MLP, LayerNorm and biases on every matrix"
    )
    f.warnings.append(
        f"Model type `{family}` is not known; assumed: {shape}, separate q, k, v and output "
        f"matrices, {'tied' if tied else 'separate'} embeddings. Counts and module names "
        "may be off."
    )
    if not f.has("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"):
        f.warnings.append("The config does not say the MLP's width; 4 x hidden size assumed.")
    named = [key for key in _SHAPED_ATTENTION if f.has(key)]
    if named:
        f.warnings.append(
            f"`{named[0]}` says that attention has a shape of its own; plain attention was counted."
        )
