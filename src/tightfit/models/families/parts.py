"""Parts that several families share: the numbers every decoder has, attention, MLP, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from tightfit.core.errors import InvalidInputError
from tightfit.models.fields import (
    MAX_COUNT,
    MAX_INNER_WIDTH,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    Fields,
)
from tightfit.models.spec import Block, Linear, Role

HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_hidden_size")
VOCAB = ("vocab_size", "padded_vocab_size")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
    "n_ctx",
)
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")


class SpecNumbers(TypedDict):
    """The arguments of ModelSpec that a Stem knows."""

    name: str
    source: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int | None
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem:
    """The numbers every decoder has."""

    fields: Fields
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    positions: int | None
    activation: str

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def numbers(self) -> SpecNumbers:
        return SpecNumbers(
            name=self.fields.name,
            source=self.fields.source,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.inner,
            max_positions=self.positions,
            activation=self.activation,
        )


def read_stem(
    f: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    inner: int | None = None,
    inner_factor: int | None = None,
    activation: str = "silu",
) -> Stem:
    """Read the usual names.

    `kv_heads`, `head_dim` and `inner` are what the family fixes whatever the config
    says. `inner_factor` (the MLP's width in hidden sizes) and `activation` are for
    configs that are silent.
    """
    needed = [HIDDEN, LAYERS, HEADS, VOCAB]
    f.need(*needed, *([INNER] if inner is None and inner_factor is None else []))
    hidden = f.size(*HIDDEN)
    heads = f.size(*HEADS, most=MAX_COUNT)
    if head_dim is None:
        head_dim = f.optional_size("head_dim", "kv_channels")
    if head_dim is None:
        head_dim = f.quotient(hidden, heads, "the heads must share the hidden size evenly")
    if kv_heads is None:
        kv_heads = f.optional_size(*KV_HEADS, most=MAX_COUNT) or heads
    f.quotient(heads, kv_heads, "the heads must share the key/value heads evenly")
    if inner is None:
        inner = f.optional_size(*INNER, most=MAX_INNER_WIDTH) or hidden * (inner_factor or 4)
    return Stem(
        fields=f,
        hidden=hidden,
        layers=f.size(*LAYERS, most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=inner,
        vocab=f.size(*VOCAB, most=MAX_VOCAB),
        positions=f.optional_size(*POSITIONS, most=MAX_POSITIONS),
        activation=next((f.text(k, default="") for k in ACTIVATIONS if f.has(k)), activation),
    )


def linear(
    name: str, ins: int, outs: int, role: Role, *, bias: bool = False, is_module: bool = True
) -> Linear:
    """One matrix, on one line."""
    return Linear(
        name=name, in_features=ins, out_features=outs, bias=bias, role=role, is_module=is_module
    )


def split_attention(
    stem: Stem, *, bias: bool = False, out_bias: bool | None = None, out_name: str = "o_proj"
) -> tuple[Linear, ...]:
    """Separate query, key, value and output matrices; `out_bias` where it differs from `bias`."""
    role = Role.ATTENTION
    return (
        linear("q_proj", stem.hidden, stem.query_width, role, bias=bias),
        linear("k_proj", stem.hidden, stem.kv_width, role, bias=bias),
        linear("v_proj", stem.hidden, stem.kv_width, role, bias=bias),
        linear(
            out_name,
            stem.query_width,
            stem.hidden,
            role,
            bias=bias if out_bias is None else out_bias,
        ),
    )


def fused_attention(
    stem: Stem, *, names: tuple[str, str], bias: bool = False, out_bias: bool | None = None
) -> tuple[Linear, ...]:
    """One matrix for query, key and value, one for the output."""
    fused, out = names
    return (
        linear(fused, stem.hidden, stem.query_width + 2 * stem.kv_width, Role.ATTENTION, bias=bias),
        linear(
            out,
            stem.query_width,
            stem.hidden,
            Role.ATTENTION,
            bias=bias if out_bias is None else out_bias,
        ),
    )


def gated_mlp(stem: Stem, *, bias: bool = False, inner: int | None = None) -> tuple[Linear, ...]:
    """Gate, up and down."""
    width = inner or stem.inner
    return (
        linear("gate_proj", stem.hidden, width, Role.MLP, bias=bias),
        linear("up_proj", stem.hidden, width, Role.MLP, bias=bias),
        linear("down_proj", width, stem.hidden, Role.MLP, bias=bias),
    )


def plain_mlp(
    stem: Stem, *, names: tuple[str, str], bias: bool, up_factor: int = 1
) -> tuple[Linear, ...]:
    """Up and down; `up_factor` 2 where the first matrix holds the gate as well."""
    up, down = names
    return (
        linear(up, stem.hidden, up_factor * stem.inner, Role.MLP, bias=bias),
        linear(down, stem.inner, stem.hidden, Role.MLP, bias=bias),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: how many there are, how many a token meets, how wide each is."""

    count: int
    per_token: int
    inner: int


def read_experts(f: Fields, *, inner: int, count_default: int, per_token_default: int) -> Experts:
    """Counts of experts, under the names in use."""
    count_keys = ("num_local_experts", "num_experts", "n_routed_experts")
    count = f.size_or_default(*count_keys, default=count_default, most=MAX_COUNT)
    per_token_keys = ("num_experts_per_tok", "experts_per_token", "moe_topk")
    per_token = f.size_or_default(*per_token_keys, default=per_token_default, most=MAX_COUNT)
    if per_token > count:
        raise InvalidInputError(
            f"{f.source}: `num_experts_per_tok` is {per_token}, of {count} experts.",
            remedy="correct the config, or name a model that `tightfit models` lists",
        )
    return Experts(count=count, per_token=per_token, inner=inner)


def expert_linears(
    stem: Stem, experts: Experts, *, router: str, bias: bool = False, adapted: bool = False
) -> tuple[Linear, ...]:
    """Router and experts as transformers 5 keeps them: bare 3-D parameters, not modules.

    `adapted`: peft knows how to attach LoRA to them. Source: peft's weight conversion for
    transformers 5, which gives the fused gate and up projection twice the rank.
    """

    def stacked(name: str, ins: int, outs: int, *, rank_factor: int) -> Linear:
        return Linear(
            name=name,
            in_features=ins,
            out_features=outs,
            bias=bias,
            role=Role.EXPERT,
            copies=experts.count,
            copies_per_token=experts.per_token,
            is_module=False,
            lora_rank_factor=rank_factor if adapted else 0,
        )

    routing = linear(router, stem.hidden, experts.count, Role.ROUTER, bias=bias, is_module=False)
    return (
        routing.model_copy(update={"lora_rank_factor": int(adapted)}),
        stacked("gate_up_proj", stem.hidden, 2 * experts.inner, rank_factor=2),
        stacked("down_proj", experts.inner, stem.hidden, rank_factor=1),
    )


def decoder(
    stem: Stem,
    linears: tuple[Linear, ...],
    *,
    num_norms: int = 2,
    norm_bias: bool = False,
    head_norm_params: int = 0,
    extra_params: int = 0,
) -> Block:
    """All layers alike, each norm as wide as the hidden stream."""
    return Block(
        kind="decoder",
        num_layers=stem.layers,
        linears=linears,
        norm_widths=(stem.hidden,) * num_norms,
        norm_bias=norm_bias,
        head_norm_params=head_norm_params,
        extra_params=extra_params,
    )


def count_sliding(f: Fields, *, layers: int, otherwise: int) -> int:
    """Layers with a window: from `layer_types` where given, else the family's own pattern."""
    kinds = f.texts("layer_types")
    if kinds is None:
        return otherwise
    if len(kinds) != layers:
        raise InvalidInputError(
            f"{f.source}: `layer_types` names {len(kinds)} layers of {layers}.",
            remedy="correct `layer_types` or the number of layers in the config",
        )
    return sum(kind == "sliding_attention" for kind in kinds)
