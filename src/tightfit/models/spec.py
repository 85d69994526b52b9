"""ModelSpec: the architecture of one model as a list of its parts, and its parameter count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, PositiveInt

from tightfit.core.attention import AttentionFeature
from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import Frozen

if TYPE_CHECKING:
    from typing_extensions import Self


class _Part(Frozen):
    """Frozen, so sums over parts are computed once and kept; a changed copy starts without them."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        for name in set(copied.__dict__) - set(type(self).model_fields):
            del copied.__dict__[name]
        return copied

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in type(self).model_fields))

    def __hash__(self) -> int:
        return self._hash


class Role(str, Enum):
    """What a linear layer works for; activations and LoRA targets depend on it."""

    ATTENTION = "attention"
    CROSS_ATTENTION = "cross_attention"
    MLP = "mlp"
    EXPERT = "expert"
    ROUTER = "router"
    MIXER = "mixer"
    """Linear attention, Mamba or a short convolution: mixes tokens without softmax attention."""


class Linear(_Part):
    """One matrix of a layer, under the name that the real module has."""

    name: str
    """The last part of the module's name: `q_proj`, `query_key_value`, `down_proj`."""
    in_features: PositiveInt
    out_features: PositiveInt
    bias: bool = False
    role: Role
    copies: PositiveInt = 1
    """Experts: how many of this matrix one layer holds."""
    copies_per_token: PositiveInt = 1
    """Experts: how many of them one token passes through."""
    is_module: bool = True
    """False where the library keeps it as a bare 3-D parameter, which quantized loading skips."""
    is_grouped: bool = False
    """Bare experts that the runtime multiplies itself (runtime/kernels/experts.py), and so can keep
    in nf4."""
    lora_rank_factor: NonNegativeInt = 1
    """How many times the rank peft's `all-linear` gives it: 2 for a fused pair of experts'
    matrices, 0 where it finds nothing to adapt."""
    takes_adapter: bool = True
    """False where the modelling code reads its weight by itself, so that an adapter is ignored."""

    @cached_property
    def num_params(self) -> int:
        return self.copies * self.out_features * (self.in_features + self.bias)


class Block(_Part):
    """Identical layers, side by side or not."""

    kind: str
    """`decoder` or `encoder`."""
    num_layers: PositiveInt
    linears: tuple[Linear, ...]
    norm_widths: tuple[PositiveInt, ...]
    """Width of each norm over the hidden stream in one layer, in order."""
    norm_bias: bool = False
    head_norm_params: NonNegativeInt = 0
    """Elements of norms over single heads (query/key norm)."""
    extra_params: NonNegativeInt = 0
    """Anything else in one layer: attention sinks, expert biases, convolutions, ..."""
    head_dim: PositiveInt | None = None
    """Width of its heads, where layers with a window have narrower ones than the others."""

    @cached_property
    def attends(self) -> bool:
        """Whether its layers have softmax attention, and so keep keys and values."""
        return any(part.role is Role.ATTENTION for part in self.linears)

    @cached_property
    def num_experts(self) -> int:
        """Of each layer; 0 where it has none."""
        return max((part.copies for part in self.linears if part.role is Role.EXPERT), default=0)

    @cached_property
    def norm_params(self) -> int:
        return sum(self.norm_widths) * (2 if self.norm_bias else 1) + self.head_norm_params

    @cached_property
    def layer_params(self) -> int:
        return sum(part.num_params for part in self.linears) + self.norm_params + self.extra_params

    @cached_property
    def num_params(self) -> int:
        return self.num_layers * self.layer_params


class ModelSpec(_Part):
    """Architecture of one model. Holds no weights and needs no network."""

    name: str
    model_type: str
    source: str
    """Where the numbers came from: a config.json path, or `catalogue:<row>`."""
    warnings: tuple[str, ...] = ()
    """What was assumed because the config does not say, or the family is not known."""

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    """Equal to `num_heads` for MHA, 1 for MQA, in between for GQA."""
    head_dim: PositiveInt
    """Read, never derived: some models set it apart from `hidden_size / num_heads`. The widest,
    where layers differ (`Block.head_dim`)."""
    intermediate_size: PositiveInt
    """Width inside the MLP, of one expert where there are experts."""
    blocks: tuple[Block, ...]

    is_rms_norm: bool = True
    is_gated_mlp: bool = True
    activation: str = "silu"
    """As the config names it; some are composed of several ops, each of which keeps a tensor."""
    is_parallel_residual: bool = False
    """Attention and MLP read the same input (GPT-NeoX, Falcon, Phi, CodeGen)."""
    tie_embeddings: bool
    """The lm_head is the embedding matrix: one copy of memory, one gradient."""
    lm_head_bias: bool = False
    embedding_width: PositiveInt | None = None
    """Where the token embedding is narrower than the hidden stream and projected (OPT-350m)."""
    position_params: NonNegativeInt = 0
    """Learned position embeddings, or relative-position tables."""
    outer_params: NonNegativeInt = 0
    """Outside blocks, embeddings and head: final norms, embedding norms."""
    outer_linears: tuple[Linear, ...] = ()
    """Linear modules among the outer parameters, the head left out: quantized loading packs them,
    and peft's `all-linear` adapts them."""
    max_positions: PositiveInt | None = None
    sliding_window: PositiveInt | None = None
    num_sliding_layers: NonNegativeInt = 0
    has_logit_softcap: bool = False
    has_attention_softcap: bool = False
    attention_extras: tuple[AttentionFeature, ...] = ()
    """Further things that its attention does, and not every kernel."""
    stored_dtype: Dtype | None = None
    """What the checkpoint's config says its weights are in."""
    file_bytes: NonNegativeInt | None = None
    """Size of the weights on disk, where the weights are there to be measured."""

    @cached_property
    def num_layers(self) -> int:
        return sum(block.num_layers for block in self.blocks)

    @cached_property
    def is_encoder_decoder(self) -> bool:
        return any(block.kind == "encoder" for block in self.blocks)

    @cached_property
    def embedding_params(self) -> int:
        return self.vocab_size * (self.embedding_width or self.hidden_size)

    @property
    def lm_head_params(self) -> int:
        """Parameters of the head that are not already counted in the embedding."""
        bias = self.vocab_size if self.lm_head_bias else 0
        return bias + (0 if self.tie_embeddings else self.embedding_params)

    @cached_property
    def num_params(self) -> int:
        """Every parameter once; a tied head is not counted again."""
        return (
            self.embedding_params
            + self.lm_head_params
            + self.position_params
            + self.outer_params
            + sum(block.num_params for block in self.blocks)
        )

    @cached_property
    def num_active_params(self) -> int:
        """Parameters one token passes through: the chosen experts only."""
        idle = sum(
            block.num_layers
            * sum(
                (part.copies - part.copies_per_token) * part.num_params // part.copies
                for part in block.linears
            )
            for block in self.blocks
        )
        return self.num_params - idle

    @cached_property
    def linear_params(self) -> int:
        """Weights of the linear layers but the head: what 4- and 8-bit loading packs."""
        outer = sum(part.in_features * part.out_features for part in self.outer_linears)
        return outer + self._count_weights(lambda part: part.is_module)

    @cached_property
    def grouped_params(self) -> int:
        """Weights of bare experts that nf4 loading can pack beside the linear layers."""
        return self._count_weights(lambda part: part.is_grouped)

    def _count_weights(self, is_wanted: Callable[[Linear], bool]) -> int:
        return sum(
            block.num_layers
            * sum(p.copies * p.in_features * p.out_features for p in block.linears if is_wanted(p))
            for block in self.blocks
        )

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names LoRA can target, in order of appearance."""
        parts = [part for block in self.blocks for part in block.linears] + [*self.outer_linears]
        return tuple(
            dict.fromkeys(part.name for part in parts if part.is_module and part.takes_adapter)
        )


# Where a model's parameters are: the count, part by part, with what is easily miscounted.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """One part of a model. The rows of a model sum to its `num_params`."""

    part: str
    num_params: int
    note: str = ""


def explain_parameter_count(spec: ModelSpec) -> list[ParameterCount]:
    """Parts in the order a token meets them, empty ones left out except a tied head."""
    blocks = spec.blocks
    rows = [
        (
            "embedding",
            spec.embedding_params,
            f"{spec.vocab_size:,} x {spec.embedding_width or spec.hidden_size:,}",
        ),
        ("positions", spec.position_params, "learned position or relative-position tables"),
    ]
    for role in Role:
        linears = [(b.num_layers, p) for b in blocks for p in b.linears if p.role is role]
        total = sum(num_layers * part.num_params for num_layers, part in linears)
        rows.append((role.value, total, _linear_note(spec, role)))
    other = spec.outer_params + sum(b.num_layers * b.extra_params for b in blocks)
    rows += [
        ("norms", sum(b.num_layers * b.norm_params for b in blocks), _norm_note(spec)),
        ("other", other, "last and embedding norms, projections, attention sinks, convolutions"),
        ("lm_head", spec.lm_head_params, _head_note(spec)),
    ]
    return [
        ParameterCount(part=part, num_params=count, note=note)
        for part, count, note in rows
        if count or part == "lm_head"
    ]


def _linear_note(spec: ModelSpec, role: Role) -> str:
    parts = [part for block in spec.blocks for part in block.linears if part.role is role]
    names = ", ".join(dict.fromkeys(part.name for part in parts))
    layers = sum(
        block.num_layers
        for block in spec.blocks
        if any(part.role is role for part in block.linears)
    )
    note = f"{names} in {layers} layers"
    if role is Role.ATTENTION and spec.num_kv_heads != spec.num_heads:
        note += f"; {spec.num_heads} heads share {spec.num_kv_heads} of keys and values"
    if role is Role.EXPERT and parts:
        note += f"; {parts[0].copies} experts, {parts[0].copies_per_token} used by each token"
    return note


def _norm_note(spec: ModelSpec) -> str:
    per_layer = ", ".join(
        dict.fromkeys(f"{len(block.norm_widths)} a layer" for block in spec.blocks)
    )
    heads = ", and over query and key heads" if any(b.head_norm_params for b in spec.blocks) else ""
    return f"{'RMSNorm' if spec.is_rms_norm else 'LayerNorm'}, {per_layer}{heads}"


def _head_note(spec: ModelSpec) -> str:
    bias = " and a bias" if spec.lm_head_bias else ""
    if not spec.tie_embeddings:
        return f"separate from the embedding: its own {spec.embedding_params:,}{bias}"
    again = spec.num_params + spec.embedding_params
    return (
        f"tied to the embedding, counted once{bias}; "
        f"a file or figure that counts it again has {again:,}"
    )
