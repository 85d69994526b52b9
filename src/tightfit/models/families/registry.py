"""Every family's record, by `model_type`; a config of no known family is read generically."""

from __future__ import annotations

from tightfit.core.errors import UsageError
from tightfit.models.families import parts
from tightfit.models.families.bloom import CHATGLM, LAYERNORM_FAMILIES
from tightfit.models.families.dense import DENSE_FAMILIES
from tightfit.models.families.experts import EXPERT_FAMILIES
from tightfit.models.families.gemma import GEMMA_FAMILIES
from tightfit.models.families.gpt import GPT_FAMILIES
from tightfit.models.families.llama import LLAMA_FAMILIES, MOE_FAMILIES, PHI_FAMILIES
from tightfit.models.families.parts import ConfigFields, DecoderShape
from tightfit.models.families.qwen import QWEN_FAMILIES
from tightfit.models.families.recurrent import RECURRENT_FAMILIES
from tightfit.models.families.t5 import T5_FAMILIES
from tightfit.models.family import Family, Reader
from tightfit.models.spec import Linear, ModelSpec

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_SHAPED_ATTENTION = ("kv_lora_rank", "q_lora_rank", "ssm_state_size", "linear_key_head_dim")


def read_generic(f: ConfigFields) -> ModelSpec:
    """A decoder of Llama's shape where an RMSNorm is named, else of GPT's."""
    is_llama = f.has("rms_norm_eps", "norm_eps") or not f.has(
        "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"
    )
    stem = parts.read_decoder_shape(f, inner_factor=4, activation="silu" if is_llama else "gelu")
    _warn(f, is_llama=is_llama)
    if is_llama:
        bias = f.flag("attention_bias", default=False)
        linears = parts.split_attention(stem, bias=bias) + _mlp(f, stem)
    else:
        linears = parts.split_attention(stem, bias=True, out_name="dense") + parts.plain_mlp(
            stem, names=("fc1", "fc2"), bias=True
        )
    block = parts.decoder(stem, linears, norm_bias=not is_llama)
    return parts.make_spec(stem, block, has_layer_norm=not is_llama)


def _mlp(f: ConfigFields, stem: DecoderShape) -> tuple[Linear, ...]:
    if not f.has(*EXPERT_KEYS):
        return parts.gated_mlp(stem, bias=f.flag("mlp_bias", default=False))
    inner = f.optional_size("moe_intermediate_size", most=parts.MAX_INNER_WIDTH) or stem.inner
    experts = parts.read_experts(f, inner=inner, count_default=8, per_token_default=2)
    f.warnings.append("Experts on every layer are assumed, without shared ones.")
    return parts.ungrouped(parts.expert_linears(stem, experts, router="gate"))


def _warn(f: ConfigFields, *, is_llama: bool) -> None:
    tied = f.flag("tie_word_embeddings", default=False)
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


_GENERIC_FAMILIES = (
    Family(model_types=("zamba2",), takes_positions=False, lora_excludes=("out_proj",)),
    Family(
        model_types=("deepseek_v4",),
        has_sdpa=False,
        has_flash=False,
        has_sinks=True,
        takes_positions=False,
        has_liger=True,
        has_router_loss=True,
        lora_excludes=("o_a_proj",),
    ),
)
"""Families whose configs the generic reader reads."""
_NOT_CAUSAL = Family(
    model_types=(
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        *("git", "prophetnet", "reformer", "xlnet"),
        *("blt", "cohere_compass_text", "dbrx", "zamba", "zaya"),
    ),
    is_known=False,
    is_causal=False,
)
"""Families that transformers lists for causal models though their tokens see those behind them
unless the config says otherwise; then those that predict in ways of their own; then some of which
it is not known. All others there that can be made small had the same loss and gradients with a
mask for padding on the right and without it (transformers 5.22)."""

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        *LLAMA_FAMILIES,
        *GEMMA_FAMILIES,
        *QWEN_FAMILIES,
        *PHI_FAMILIES,
        *MOE_FAMILIES,
        *DENSE_FAMILIES,
        *EXPERT_FAMILIES,
        *RECURRENT_FAMILIES,
        *GPT_FAMILIES,
        *LAYERNORM_FAMILIES,
        *T5_FAMILIES,
        CHATGLM,
        *_GENERIC_FAMILIES,
        _NOT_CAUSAL,
    )
    for model_type in family.model_types
}
_UNKNOWN = Family(model_types=("",), is_known=False)
_BY_ARCHITECTURE = {
    # The first record wins: Mistral's files say llama.
    family.architecture: family
    for family in reversed(FAMILIES.values())
}


def find_family(model_type: str) -> Family:
    """The family's record; one of defaults, with `is_known` false, where there is none."""
    return FAMILIES.get(model_type, _UNKNOWN)


def check_takes_adapter(model_type: str, target: str) -> None:
    """Raise for a LoRA target whose adapter the modelling code would ignore."""
    if target.rpartition(".")[2] in find_family(model_type).lora_excludes:
        raise UsageError(
            f"{model_type} takes no adapter on {target}: its modelling code reads that weight by "
            "itself.",
            remedy="--set lora_targets=all-linear, which leaves it out",
        )


def find_gguf_family(architecture: str) -> Family | None:
    """The family that llama.cpp calls `architecture`."""
    return _BY_ARCHITECTURE.get(architecture)


def reader_for(model_type: str, *, otherwise: Reader = read_generic) -> Reader:
    """The family's reader, or `otherwise`: the generic one, which warns, where none is given."""
    return find_family(model_type).read or otherwise
