"""Linear attention, Mamba and short convolutions, most of them beside softmax attention.

Qwen3-Next and Qwen 3.5, Granite 4, Nemotron-H, LFM2, Bamba, Falcon-H1, Jamba, Mamba. The state that
runs from token to token is counted by the projections that feed it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError
from tightfit.models.families import layouts, parts
from tightfit.models.families.experts import (
    read_qwen_experts,
    shared_granite_mlp,
    shared_qwen_expert,
)
from tightfit.models.families.llama import write_granite
from tightfit.models.families.parts import ConfigFields, DecoderShape, Experts
from tightfit.models.families.qwen import find_sparse_layers
from tightfit.models.family import Family, GgufLayout, Rearrangement
from tightfit.models.spec import Block, Linear, ModelSpec, Role

_MAMBA_LAYERS = "Mamba layers"
_ATTENTION_WORDS = ("attention", "full_attention")


class Mixer(NamedTuple):
    """What takes the place of attention in one layer."""

    linears: tuple[Linear, ...]
    extra_params: int
    """Convolution, decay, skip and norm: vectors and thin matrices that are no linear module."""


def _warn(f: ConfigFields, what: str) -> None:
    f.warnings.append(
        f"Of {what}, memory and time count the projections, not the scan between them, which "
        "needs much more where its own kernels are not installed; `--trace` runs it."
    )


class _Mamba(NamedTuple):
    """Sizes of a Mamba layer; those of the first alone or of the second alone are 0."""

    hidden: int
    inner: int
    state: int
    kernel: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    has_norm: bool
    rank: int = 0
    heads: int = 0
    groups: int = 0

    def make_first(self) -> Mixer:
        """Mamba 1: steps and states come from the input through a narrow matrix."""
        inner, role = self.inner, Role.MIXER
        return Mixer(
            linears=(
                parts.linear("in_proj", self.hidden, 2 * inner, role, bias=self.bias),
                parts.linear("x_proj", inner, self.rank + 2 * self.state, role),
                parts.linear("dt_proj", self.rank, inner, role, bias=True),
                parts.linear("out_proj", inner, self.hidden, role, bias=self.out_bias),
            ),
            extra_params=inner * (self.state + 1 + self.kernel + self.conv_bias)
            + (self.rank + 2 * self.state if self.has_norm else 0),
        )

    def make_second(self) -> Mixer:
        """Mamba 2: one matrix gives gate, input, states and steps."""
        convolved = self.inner + 2 * self.groups * self.state
        outputs, role = self.inner + convolved + self.heads, Role.MIXER
        return Mixer(
            linears=(
                parts.linear("in_proj", self.hidden, outputs, role, bias=self.bias),
                parts.linear("out_proj", self.inner, self.hidden, role, bias=self.out_bias),
            ),
            extra_params=convolved * (self.kernel + self.conv_bias)
            + 3 * self.heads
            + (self.inner if self.has_norm else 0),
        )


def _read_usual_mamba2(
    f: ConfigFields, hidden: int, *, inner: int, out_bias: bool, has_norm: bool = True
) -> Mixer:
    """Under the names that Bamba, Granite and Falcon-H1 share."""
    _warn(f, _MAMBA_LAYERS)
    return _Mamba(
        hidden=hidden,
        inner=inner,
        heads=f.size_or_default("mamba_n_heads", default=128),
        groups=f.size_or_default("mamba_n_groups", default=1),
        state=f.size_or_default("mamba_d_state", default=256),
        kernel=f.size_or_default("mamba_d_conv", default=4),
        bias=f.flag("mamba_proj_bias", default=False),
        out_bias=out_bias,
        conv_bias=f.flag("mamba_conv_bias", default=True),
        has_norm=has_norm,
    ).make_second()


def _read_expand(f: ConfigFields, *keys: str) -> int:
    return f.optional_size(*keys, most=64) or 2


def _mixed_spec(
    stem: DecoderShape,
    kinds: list[tuple[bool, bool]],
    *,
    attention: tuple[Linear, ...],
    mixer: Mixer,
    mlps: dict[bool, tuple[Linear, ...]],
    head_norm_params: int = 0,
    **others: Any,
) -> ModelSpec:
    """`kinds`: whether each layer attends, and by which key of `mlps` it goes on."""

    def block(kind: tuple[bool, bool]) -> Block:
        attends, which = kind
        return parts.decoder(
            stem,
            (attention if attends else mixer.linears) + mlps[which],
            head_norm_params=head_norm_params if attends else 0,
            extra_params=0 if attends else mixer.extra_params,
        )

    return parts.make_spec(stem, parts.blocks(kinds, block), **others)


# Qwen3-Next, Qwen 3.5 and 3.6


def read_qwen3_next(f: ConfigFields) -> ModelSpec:
    """Gated delta nets, every fourth layer gated attention; 512 experts and a shared one.

    Under `all-linear` peft takes the experts for the gate, up and down projections, and gives the
    plain ones no adapter.
    """
    stem = _read_qwen_shape(f)
    experts = read_qwen_experts(f, count=512, per_token=10, inner=512)
    gate, *shared = shared_qwen_expert(
        stem, inner=f.size_or_default("shared_expert_intermediate_size", default=512)
    )
    sparse = parts.expert_linears(stem, experts, router="gate", adapted=True)
    sparse += (gate, *parts.without_adapter(tuple(shared)))
    return _read_gated_delta(
        f,
        stem,
        mlps={True: sparse, False: parts.without_adapter(parts.gated_mlp(stem))},
        sparse_layers=find_sparse_layers(f, stem.layers),
        is_fused=True,
        inner=experts.inner,
    )


def read_qwen3_5(f: ConfigFields) -> ModelSpec:
    """Qwen 3.5 and 3.6: gated delta nets, every fourth layer gated attention."""
    stem = _read_qwen_shape(f)
    return _read_gated_delta(
        f,
        stem,
        mlps={False: parts.gated_mlp(stem)},
        sparse_layers=[False] * stem.layers,
        is_fused=False,
        inner=stem.inner,
    )


def read_qwen3_5_moe(f: ConfigFields) -> ModelSpec:
    """Qwen 3.5 and 3.6 with experts and a shared one on every layer."""
    experts = read_qwen_experts(f, count=256, per_token=8, inner=512)
    stem = _read_qwen_shape(f, inner=experts.inner)
    sparse = parts.expert_linears(stem, experts, router="gate") + shared_qwen_expert(
        stem, inner=f.size_or_default("shared_expert_intermediate_size", default=512)
    )
    return _read_gated_delta(
        f,
        stem,
        mlps={True: sparse},
        sparse_layers=[True] * stem.layers,
        is_fused=False,
        inner=experts.inner,
    )


def _read_qwen_shape(f: ConfigFields, *, inner: int | None = None) -> DecoderShape:
    return parts.read_decoder_shape(
        f, head_dim=f.size_or_default("head_dim", default=256), inner=inner
    )


def _read_gated_delta(
    f: ConfigFields,
    stem: DecoderShape,
    *,
    mlps: dict[bool, tuple[Linear, ...]],
    sparse_layers: list[bool],
    is_fused: bool,
    inner: int,
) -> ModelSpec:
    """`is_fused`: query, key, value and gate come from one matrix, decay and step from another."""
    kinds = parts.read_layer_types(f, layers=stem.layers)
    every = f.optional_size("full_attention_interval", most=parts.MAX_LAYERS) or 4
    attends = [
        (at + 1) % every == 0 if kinds is None else kinds[at] in _ATTENTION_WORDS
        for at in range(stem.layers)
    ]
    query, *others = parts.split_attention(stem, bias=f.flag("attention_bias", default=False))
    # The query's matrix gives a gate for each value of the output as well.
    query = query.model_copy(update={"out_features": 2 * query.out_features})
    return _mixed_spec(
        stem,
        list(zip(attends, sparse_layers, strict=True)),
        attention=(query, *others),
        mixer=_read_delta_net(f, stem, is_fused=is_fused),
        mlps=mlps,
        head_norm_params=2 * stem.head_dim,
        intermediate_size=inner,
    )


def _read_delta_net(f: ConfigFields, stem: DecoderShape, *, is_fused: bool) -> Mixer:
    _warn(f, "linear attention")
    value_heads = f.size_or_default("linear_num_value_heads", default=32)
    value_dim = f.size_or_default("linear_value_head_dim", default=128)
    key_width = f.size_or_default("linear_num_key_heads", default=16) * f.size_or_default(
        "linear_key_head_dim", default=128
    )
    value_width = value_heads * value_dim
    convolved = 2 * key_width + value_width
    shapes = {
        "in_proj_qkv": convolved,
        "in_proj_z": value_width,
        "in_proj_b": value_heads,
        "in_proj_a": value_heads,
    }
    if is_fused:
        shapes = {"in_proj_qkvz": convolved + value_width, "in_proj_ba": 2 * value_heads}
    inputs = [parts.linear(name, stem.hidden, out, Role.MIXER) for name, out in shapes.items()]
    output = parts.linear("out_proj", value_width, stem.hidden, Role.MIXER)
    kernel = f.size_or_default("linear_conv_kernel_dim", default=4)
    return Mixer(
        linears=(*inputs, output),
        extra_params=convolved * kernel + 2 * value_heads + value_dim,
    )


# Granite 4, Bamba, Falcon-H1, Jamba


def read_granite_hybrid(f: ConfigFields) -> ModelSpec:
    """Granite 4: Mamba 2 on most layers; a shared MLP, and experts where there are any."""
    stem = parts.read_decoder_shape(f)
    mlp = shared_granite_mlp(f, stem, default=1024)
    if f.values.get("num_local_experts") != 0:
        experts = parts.read_experts(f, inner=stem.inner, count_default=8, per_token_default=2)
        mlp = parts.expert_linears(stem, experts, router="router") + mlp
    key = "layer_types" if f.has("layer_types") else "layers_block_type"
    kinds = parts.read_layer_types(f, layers=stem.layers, key=key) or ("mamba",) * stem.layers
    return _mixed_spec(
        stem,
        [(kind in _ATTENTION_WORDS, False) for kind in kinds],
        attention=parts.split_attention(stem, bias=f.flag("attention_bias", default=False)),
        mixer=_read_usual_mamba2(
            f,
            stem.hidden,
            inner=_read_expand(f, "mamba_expand") * stem.hidden,
            out_bias=f.flag("mamba_proj_bias", default=False),
        ),
        mlps={False: mlp},
    )


def read_bamba(f: ConfigFields) -> ModelSpec:
    """Bamba: Mamba 2, and attention on the layers that the config lists."""
    kv_heads = f.optional_size(*parts.KV_HEADS, most=parts.MAX_COUNT)
    if kv_heads is None and not f.mentions("num_key_value_heads"):
        kv_heads = f.size_or_default("num_key_value_heads", default=8)
    stem = parts.read_decoder_shape(f, kv_heads=kv_heads)
    listed = set(f.numbers("attn_layer_indices"))
    return _mixed_spec(
        stem,
        [(index in listed, False) for index in range(stem.layers)],
        attention=parts.split_attention(stem, bias=f.flag("attention_bias", default=False)),
        mixer=_read_usual_mamba2(
            f,
            stem.hidden,
            inner=_read_expand(f, "mamba_expand") * stem.hidden,
            out_bias=f.flag("mamba_proj_bias", default=False),
        ),
        mlps={False: parts.gated_mlp(stem, bias=f.flag("mlp_bias", default=False))},
    )


def read_falcon_h1(f: ConfigFields) -> ModelSpec:
    """Falcon-H1: Mamba 2 and attention side by side in every layer."""
    stem = parts.read_decoder_shape(f)
    inner = f.optional_size("mamba_d_ssm")
    if inner is None:
        is_null = f.mentions("mamba_d_ssm")
        expanded = _read_expand(f, "mamba_expand") * stem.hidden
        inner = expanded if is_null else f.size_or_default("mamba_d_ssm", default=1024)
    mixer = _read_usual_mamba2(
        f,
        stem.hidden,
        inner=inner,
        out_bias=f.flag("projectors_bias", default=False),
        has_norm=f.flag("mamba_rms_norm", default=False),
    )
    linears = (
        *mixer.linears,
        *parts.split_attention(stem, bias=f.flag("attention_bias", default=False)),
        *parts.gated_mlp(stem, bias=f.flag("mlp_bias", default=False)),
    )
    return parts.make_spec(stem, parts.decoder(stem, linears, extra_params=mixer.extra_params))


def read_jamba(f: ConfigFields) -> ModelSpec:
    """Jamba: Mamba with norms, attention on one layer in eight, experts on every other."""
    stem = parts.read_decoder_shape(
        f, kv_heads=f.size_or_default("num_key_value_heads", default=8, most=parts.MAX_COUNT)
    )
    experts = parts.read_experts(f, inner=stem.inner, count_default=16, per_token_default=2)
    rank = f.values.get("mamba_dt_rank")
    _warn(f, _MAMBA_LAYERS)
    bias = f.flag("mamba_proj_bias", default=False)
    mixer = _Mamba(
        hidden=stem.hidden,
        inner=_read_expand(f, "mamba_expand") * stem.hidden,
        rank=-(-stem.hidden // 16) if rank in (None, "auto") else f.size("mamba_dt_rank"),
        state=f.size_or_default("mamba_d_state", default=16),
        kernel=f.size_or_default("mamba_d_conv", default=4),
        bias=bias,
        out_bias=bias,
        conv_bias=f.flag("mamba_conv_bias", default=True),
        has_norm=True,
    ).make_first()
    attends = _read_period(f, "attn_layer", period=8, offset=4, layers=stem.layers)
    sparse = _read_period(f, "expert_layer", period=2, offset=1, layers=stem.layers)
    has_experts = experts.count > 1
    return _mixed_spec(
        stem,
        [(full, has_experts and chosen) for full, chosen in zip(attends, sparse, strict=True)],
        attention=parts.split_attention(stem),
        mixer=mixer,
        mlps={
            False: parts.gated_mlp(stem),
            True: parts.expert_linears(stem, experts, router="router"),
        },
    )


def _read_period(
    f: ConfigFields, name: str, *, period: int, offset: int, layers: int
) -> list[bool]:
    every = f.optional_size(f"{name}_period", most=parts.MAX_LAYERS) or period
    stated = f.number(f"{name}_offset")
    first = offset if stated is None else int(stated)
    return [index % every == first for index in range(layers)]


# Nemotron-H


_NEMOTRON_WORDS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "E": "moe",
}


def read_nemotron_h(f: ConfigFields) -> ModelSpec:
    """Nemotron-H and Nemotron 3: each layer is Mamba 2, attention, an MLP or experts alone."""
    kinds = _read_nemotron_kinds(f)
    stem = parts.read_decoder_shape(
        f.with_values(num_hidden_layers=len(kinds)),
        kv_heads=f.size_or_default("num_key_value_heads", default=8, most=parts.MAX_COUNT),
        head_dim=f.size_or_default("head_dim", "attention_head_dim", default=128),
        activation=f.text("mlp_hidden_act", default="relu2"),
    )
    bias = f.flag("mlp_bias", default=False)
    names = ("up_proj", "down_proj")
    linears: dict[str, tuple[Linear, ...]] = {
        "attention": parts.split_attention(stem),
        "mlp": parts.plain_mlp(stem, names=names, bias=bias),
    }
    extra = {}
    if "mamba" in kinds:
        heads = f.size_or_default("mamba_num_heads", default=128)
        projected = f.flag("use_bias", default=False)
        _warn(f, _MAMBA_LAYERS)
        mixer = _Mamba(
            hidden=stem.hidden,
            inner=heads * f.size_or_default("mamba_head_dim", default=64),
            heads=heads,
            groups=f.size_or_default("n_groups", "mamba_n_groups", default=8),
            state=f.size_or_default("ssm_state_size", default=128),
            kernel=f.size_or_default("conv_kernel", "mamba_d_conv", default=4),
            bias=projected,
            out_bias=projected,
            conv_bias=f.flag("use_conv_bias", default=True),
            has_norm=True,
        ).make_second()
        linears["mamba"], extra["mamba"] = mixer
    inner = stem.inner
    if "moe" in kinds:
        linears["moe"] = _read_nemotron_experts(f, stem, bias=bias)
        inner = next(part.in_features for part in linears["moe"] if part.name == "down_proj")
    blocks = parts.blocks(
        kinds,
        lambda kind: parts.decoder(
            stem, linears[kind], num_norms=1, extra_params=extra.get(kind, 0)
        ),
    )
    return parts.make_spec(stem, blocks, is_gated_mlp=False, intermediate_size=inner)


def _read_nemotron_kinds(f: ConfigFields) -> tuple[str, ...]:
    """As transformers reads them: a pattern of letters, or a list of words."""
    if f.has("hybrid_override_pattern") and not f.has("layers_block_type"):
        pattern = f.values["hybrid_override_pattern"]
        kinds = tuple(pattern) if isinstance(pattern, str) else ()
    else:
        f.need(("layers_block_type", "hybrid_override_pattern"))
        kinds = f.texts("layers_block_type") or ()
    words = tuple(_NEMOTRON_WORDS.get(kind, kind) for kind in kinds)
    if not 0 < len(words) <= parts.MAX_LAYERS or not set(words) <= {*_NEMOTRON_WORDS.values()}:
        raise InvalidInputError(
            f"{f.source}: the kinds of its layers are {parts.shown(kinds[:8])}.",
            remedy="correct `hybrid_override_pattern`, which has M, *, - and E",
        )
    return words


def _read_nemotron_experts(
    f: ConfigFields, stem: DecoderShape, *, bias: bool
) -> tuple[Linear, ...]:
    """Experts without a gate, in a narrower stream where the config names one."""
    inner = f.size_or_default("moe_intermediate_size", default=7688, most=parts.MAX_INNER_WIDTH)
    experts = parts.read_experts(f, inner=inner, count_default=8, per_token_default=2)
    latent = f.optional_size("moe_latent_size")
    width = latent or stem.hidden

    def stacked(name: str, ins: int, outs: int) -> Linear:
        expert = parts.linear(name, ins, outs, Role.EXPERT, is_module=False)
        copies = {"copies": experts.count, "copies_per_token": experts.per_token}
        return expert.model_copy(update={**copies, "lora_rank_factor": 0})

    router = parts.linear("gate", stem.hidden, experts.count, Role.ROUTER, is_module=False)
    narrowing: tuple[Linear, ...] = ()
    if latent is not None:
        narrowing = (
            parts.linear("fc1_latent_proj", stem.hidden, latent, Role.MLP, bias=bias),
            parts.linear("fc2_latent_proj", latent, stem.hidden, Role.MLP, bias=bias),
        )
    shared = f.size_or_default(
        "moe_shared_expert_intermediate_size", default=7688, most=parts.MAX_INNER_WIDTH
    )
    return (
        *parts.without_adapter((router,)),
        stacked("up_proj", width, inner),
        stacked("down_proj", inner, width),
        *narrowing,
        *parts.plain_mlp(stem, names=("up_proj", "down_proj"), bias=bias, inner=shared),
    )


# LFM2


def read_lfm2(f: ConfigFields) -> ModelSpec:
    """LFM2: short convolutions, and attention on the layers that the config names."""
    stem = parts.read_decoder_shape(f, inner=_read_lfm2_width(f))
    kinds = parts.read_layer_types(f, layers=stem.layers)
    listed = set(f.numbers("full_attn_idxs")) if f.has("full_attn_idxs") else None
    if kinds is None:
        attends = [listed is None or at in listed for at in range(stem.layers)]
    else:
        attends = [kind in _ATTENTION_WORDS for kind in kinds]
    return _read_convolutions(f, stem, attends, sparse_from=stem.layers, sparse=())


def read_lfm2_moe(f: ConfigFields) -> ModelSpec:
    """LFM2 with experts behind the first layers."""
    stem = parts.read_decoder_shape(f)
    f.need(("layer_types",))
    kinds = parts.read_layer_types(f, layers=stem.layers) or ()
    experts = Experts(
        count=f.size_or_default("num_experts", default=32, most=parts.MAX_COUNT),
        per_token=f.size_or_default("num_experts_per_tok", default=4, most=parts.MAX_COUNT),
        inner=f.size_or_default("moe_intermediate_size", default=1792, most=parts.MAX_INNER_WIDTH),
    )
    first = f.number("num_dense_layers")
    spec = _read_convolutions(
        f,
        stem,
        [kind in _ATTENTION_WORDS for kind in kinds],
        sparse_from=2 if first is None else int(first),
        sparse=parts.expert_linears(stem, experts, router="gate"),
    )
    return spec.model_copy(update={"intermediate_size": experts.inner})


def _read_lfm2_width(f: ConfigFields) -> int:
    """As transformers' Lfm2MLP computes it: two thirds, rounded up to a multiple."""
    keys = ("block_ff_dim", "intermediate_size")
    inner = f.size_or_default(*keys, default=12_288, most=parts.MAX_INNER_WIDTH)
    if not f.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = max(1, 2 * inner // 3)
    if f.mentions("block_ffn_dim_multiplier") and not f.has("block_ffn_dim_multiplier"):
        return inner
    factor = f.number("block_ffn_dim_multiplier")
    multiple = f.size_or_default("block_multiple_of", default=256)
    scaled = int((1.0 if factor is None else factor) * inner)
    return max(1, -(-scaled // multiple)) * multiple


def _read_convolutions(
    f: ConfigFields,
    stem: DecoderShape,
    attends: list[bool],
    *,
    sparse_from: int,
    sparse: tuple[Linear, ...],
) -> ModelSpec:
    bias = f.flag("conv_bias", default=False)
    kernel = f.size_or_default("conv_L_cache", default=3)
    mixer = Mixer(
        linears=(
            parts.linear("in_proj", stem.hidden, 3 * stem.hidden, Role.MIXER, bias=bias),
            parts.linear("out_proj", stem.hidden, stem.hidden, Role.MIXER, bias=bias),
        ),
        extra_params=stem.hidden * (kernel + bias),
    )
    dense = (
        parts.linear("w1", stem.hidden, stem.inner, Role.MLP),
        parts.linear("w3", stem.hidden, stem.inner, Role.MLP),
        parts.linear("w2", stem.inner, stem.hidden, Role.MLP),
    )
    spec = _mixed_spec(
        stem,
        [(full, at >= sparse_from) for at, full in enumerate(attends)],
        attention=parts.split_attention(stem, out_name="out_proj"),
        mixer=mixer,
        mlps={False: dense, True: sparse},
        head_norm_params=2 * stem.head_dim,
    )
    tied = f.flag("tie_embedding", default=f.flag("tie_word_embeddings", default=True))
    return spec.model_copy(update={"tie_embeddings": tied})


# Mamba alone


def read_mamba(f: ConfigFields) -> ModelSpec:
    """Mamba and Falcon-Mamba: no attention and no MLP, one norm a layer."""
    stem = _read_headless_shape(f)
    rank = f.values.get("time_step_rank")
    _warn(f, _MAMBA_LAYERS)
    bias = f.flag("use_bias", default=False)
    mixer = _Mamba(
        hidden=stem.hidden,
        inner=_read_expand(f, "expand") * stem.hidden,
        rank=-(-stem.hidden // 16) if rank in (None, "auto") else f.size("time_step_rank"),
        state=f.size_or_default("state_size", default=16),
        kernel=f.size_or_default("conv_kernel", default=4),
        bias=bias,
        out_bias=bias,
        conv_bias=f.flag("use_conv_bias", default=True),
        has_norm=False,
    ).make_first()
    return _make_headless(stem, mixer, tied=True)


def read_mamba2(f: ConfigFields) -> ModelSpec:
    """Mamba 2 and Codestral Mamba."""
    stem = _read_headless_shape(f)
    bias = f.flag("use_bias", default=False)
    _warn(f, _MAMBA_LAYERS)
    mixer = _Mamba(
        hidden=stem.hidden,
        inner=_read_expand(f, "expand") * stem.hidden,
        heads=f.size_or_default("num_heads", default=128),
        groups=f.size_or_default("n_groups", default=8),
        state=f.size_or_default("state_size", default=128),
        kernel=f.size_or_default("conv_kernel", default=4),
        bias=bias,
        out_bias=bias,
        conv_bias=f.flag("use_conv_bias", default=True),
        has_norm=True,
    ).make_second()
    return _make_headless(stem, mixer, tied=False)


def _read_headless_shape(f: ConfigFields) -> DecoderShape:
    """A spec has heads: one, which no layer uses."""
    f.need(parts.HIDDEN, parts.LAYERS, parts.VOCAB)
    hidden = f.size(*parts.HIDDEN)
    shape = parts.read_decoder_shape(
        f.with_values(num_attention_heads=1, num_key_value_heads=1),
        head_dim=f.optional_size("head_dim") or hidden,
        inner=_read_expand(f, "expand") * hidden,
    )
    return replace(shape, fields=f)


def _make_headless(stem: DecoderShape, mixer: Mixer, *, tied: bool) -> ModelSpec:
    block = parts.decoder(stem, mixer.linears, num_norms=1, extra_params=mixer.extra_params)
    return parts.make_spec(stem, block, tied=tied, is_gated_mlp=False)


_DELTA_RULE_ROUNDING = 32.0
"""Two layers with random weights in fp32, against fp64, on 512 tokens: 4.3e-4, Llama's 1.3e-5."""
_QWEN3_5 = Family(
    model_types=("qwen3_5_text",),
    read=read_qwen3_5,
    rounding_factor=_DELTA_RULE_ROUNDING,
    gguf_name="qwen35",
    gguf=layouts.QWEN3_5_GGUF,
    takes_positions=False,
    has_liger=True,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_types=("qwen3_5_moe_text",),
    read=read_qwen3_5_moe,
    has_router_loss=True,
    gguf_name="qwen35moe",
    gguf=layouts.QWEN3_5_MOE_GGUF,
)


def _find_granite_hybrid_obstacle(config: Any) -> str | None:
    if config.mamba_proj_bias or not config.mamba_conv_bias:
        return "biases in its projections, or none in its convolution"
    if config.mamba_n_groups != 1:
        return "a norm over all groups of heads (mamba_n_groups)"
    if config.position_embedding_type == "rope":
        return "rotary positions beside Mamba"
    if not config.num_local_experts or not config.shared_intermediate_size:
        return "no experts, or none that is shared"
    return "biases in its attention" if config.attention_bias else None


def _list_granite_kv_heads(config: Any) -> list[int]:
    heads, kinds = int(config.num_key_value_heads), ("attention", "full_attention")
    return [heads if kind in kinds else 0 for kind in config.layer_types]


def _write_granite_hybrid(writer: Any, config: Any) -> None:
    write_granite(writer, config)
    writer.add_rope_scaling_finetuned(False)  # by which llama.cpp sees that there is no rotation
    writer.add_ssm_conv_kernel(int(config.mamba_d_conv))
    writer.add_ssm_inner_size(int(config.mamba_n_heads * config.mamba_d_head))
    writer.add_ssm_state_size(int(config.mamba_d_state))
    writer.add_ssm_time_step_rank(int(config.mamba_n_heads))
    writer.add_ssm_group_count(int(config.mamba_n_groups))


_GRANITE_HYBRID_GGUF = GgufLayout(
    rearrangement=Rearrangement.STATE_SPACE,
    has_rotary=False,
    expert_inner_key="intermediate_size",
    list_kv_heads=_list_granite_kv_heads,
    find_obstacle=_find_granite_hybrid_obstacle,
    write_attention=_write_granite_hybrid,
    read_settings=None,
)
_HYBRID = Family(
    mlp_module="",
    model_types=("granitemoehybrid",),
    read=read_granite_hybrid,
    takes_positions=False,
    scales_logits=True,
    lora_excludes=("out_proj",),
)
_MAMBA = Family(
    mlp_module="",
    model_types=("mamba", "falcon_mamba"),
    read=read_mamba,
    has_sdpa=False,
    has_flash=False,
    takes_positions=False,
    lora_excludes=("x_proj", "dt_proj", "out_proj"),
)
RECURRENT_FAMILIES = (
    Family(
        model_types=("qwen3_next",),
        read=read_qwen3_next,
        has_router_loss=True,
        rounding_factor=_DELTA_RULE_ROUNDING,
        takes_positions=False,
        has_liger=True,
        gguf_name="qwen3next",
        gguf=layouts.QWEN3_NEXT_GGUF,
    ),
    _QWEN3_5,
    replace(_QWEN3_5, model_types=("qwen3_5",), gguf_name="", gguf=None),  # with a vision part
    _QWEN3_5_MOE,
    replace(_QWEN3_5_MOE, model_types=("qwen3_5_moe",), gguf_name="", gguf=None),
    replace(
        _HYBRID,
        has_router_loss=True,
        gguf_name="granitehybrid",
        gguf=_GRANITE_HYBRID_GGUF,
    ),
    replace(_HYBRID, model_types=("bamba",), read=read_bamba, scales_logits=False),
    replace(_HYBRID, model_types=("falcon_h1",), read=read_falcon_h1, has_liger=True),
    replace(_HYBRID, model_types=("nemotron_h",), read=read_nemotron_h, scales_logits=False),
    Family(
        model_types=("jamba",),
        mlp_module="",
        read=read_jamba,
        has_router_loss=True,
        takes_positions=False,
        lora_excludes=("dt_proj",),
    ),
    Family(
        model_types=("lfm2",),
        read=read_lfm2,
        mlp_module="",
        takes_positions=False,
        gguf=layouts.LFM2_GGUF,
    ),
    Family(
        model_types=("lfm2_moe",),
        read=read_lfm2_moe,
        mlp_module="",
        takes_positions=False,
    ),
    _MAMBA,
    replace(_MAMBA, model_types=("mamba2",), read=read_mamba2, lora_excludes=("out_proj",)),
)
