"""The config reader for each `model_type`; unknown ones are read generically, with warnings."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.models.families.bloom import read_bloom, read_falcon, read_mpt, read_opt
from tightfit.models.families.chatglm import read_chatglm
from tightfit.models.families.gemma import read_gemma, read_gemma2, read_gemma3
from tightfit.models.families.gpt import (
    read_codegen,
    read_gpt2,
    read_gpt_bigcode,
    read_gpt_neox,
    read_gptj,
)
from tightfit.models.families.llama import (
    read_baichuan,
    read_llama,
    read_mistral,
    read_stablelm,
    read_tied_llama,
)
from tightfit.models.families.moe import read_gpt_oss, read_granitemoe, read_mixtral
from tightfit.models.families.parts import (
    MAX_INNER_WIDTH,
    ConfigFields,
    DecoderShape,
    decoder,
    expert_linears,
    gated_mlp,
    plain_mlp,
    read_decoder_shape,
    read_experts,
    split_attention,
)
from tightfit.models.families.phi import read_phi, read_phi3
from tightfit.models.families.qwen import read_qwen, read_qwen2, read_qwen3, read_qwen3_moe
from tightfit.models.families.t5 import read_t5
from tightfit.models.spec import Linear, ModelSpec

# Families nobody taught us: read from the usual field names, with every guess spoken aloud.

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_SHAPED_ATTENTION = ("kv_lora_rank", "q_lora_rank", "ssm_state_size", "linear_key_head_dim")


def read_generic(f: ConfigFields) -> ModelSpec:
    """A decoder of Llama's shape where an RMSNorm is named, else of GPT's."""
    is_llama = f.has("rms_norm_eps", "norm_eps") or not f.has(
        "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"
    )
    stem = read_decoder_shape(f, inner_factor=4, activation="silu" if is_llama else "gelu")
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


def _mlp(f: ConfigFields, stem: DecoderShape) -> tuple[Linear, ...]:
    if not f.has(*_EXPERT_KEYS):
        return gated_mlp(stem, bias=f.flag("mlp_bias", default=False))
    inner = f.optional_size("moe_intermediate_size", most=MAX_INNER_WIDTH) or stem.inner
    experts = read_experts(f, inner=inner, count_default=8, per_token_default=2)
    f.warnings.append("Experts on every layer are assumed, without shared ones.")
    return expert_linears(stem, experts, router="gate")


def _warn(f: ConfigFields, *, is_llama: bool, tied: bool) -> None:
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


Reader = Callable[[ConfigFields], ModelSpec]

READERS: dict[str, Reader] = {
    "baichuan": read_baichuan,
    "bloom": read_bloom,
    "chatglm": read_chatglm,
    "codegen": read_codegen,
    "falcon": read_falcon,
    "RefinedWeb": read_falcon,  # Falcon's name before transformers took it in
    "RefinedWebModel": read_falcon,
    "gemma": read_gemma,
    "gemma2": read_gemma2,
    "gemma3": read_gemma3,
    "gemma3_text": read_gemma3,
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt_bigcode,
    "gpt_neox": read_gpt_neox,
    "gpt_oss": read_gpt_oss,
    "gptj": read_gptj,
    "granite": read_llama,
    "granitemoe": read_granitemoe,
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "mpt": read_mpt,
    "mt5": read_t5,
    "opt": read_opt,
    "phi": read_phi,
    "phi3": read_phi3,
    "qwen": read_qwen,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
    "smollm3": read_tied_llama,
    "stablelm": read_stablelm,
    "t5": read_t5,
}


def reader_for(model_type: str) -> Reader:
    """The family's reader, or the generic one, which warns."""
    return READERS.get(model_type, read_generic)
