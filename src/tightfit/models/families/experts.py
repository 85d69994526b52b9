"""Mixtures of experts from Qwen 2 and DeepSeek to GLM 4.5, Llama 4, ERNIE 4.5 and Hunyuan.

Shared experts see every token; the first layers, or every other, may have a plain MLP instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tightfit.models.families import layouts, parts
from tightfit.models.families.llama import GRANITEMOE_GGUF
from tightfit.models.families.parts import ConfigFields, DecoderShape, Experts
from tightfit.models.families.qwen import find_sparse_layers
from tightfit.models.family import Family
from tightfit.models.spec import Block, Linear, ModelSpec, Role


def read_qwen2_moe(f: ConfigFields) -> ModelSpec:
    """Qwen 1.5 and 2 MoE: a shared expert with a gate, biases on query, key and value."""
    stem = parts.read_decoder_shape(f)
    experts = read_qwen_experts(f, count=60, per_token=4, inner=1408)
    attention = parts.split_attention(stem, bias=f.flag("qkv_bias", default=True), out_bias=False)
    sparse = parts.expert_linears(stem, experts, router="gate") + shared_qwen_expert(
        stem, inner=f.size_or_default("shared_expert_intermediate_size", default=5632)
    )
    blocks = parts.blocks(
        find_sparse_layers(f, stem.layers),
        lambda is_sparse: parts.decoder(
            stem, attention + (sparse if is_sparse else parts.gated_mlp(stem))
        ),
    )
    is_used = f.flag("use_sliding_window", default=False) and f.values.get("sliding_window") != 0
    window = f.window("sliding_window", default=4096) if is_used else None
    first = min(stem.layers, f.optional_size("max_window_layers", most=parts.MAX_COUNT) or 28)
    sliding = parts.count_sliding(f, layers=stem.layers, otherwise=(first + 1) // 2)
    return parts.make_spec(
        stem,
        blocks,
        intermediate_size=experts.inner,
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
    )


def read_qwen_experts(f: ConfigFields, *, count: int, per_token: int, inner: int) -> Experts:
    """Of Qwen, whose experts have a width of their own."""
    return parts.read_experts(
        f,
        inner=f.size_or_default("moe_intermediate_size", default=inner, most=parts.MAX_INNER_WIDTH),
        count_default=count,
        per_token_default=per_token,
    )


def shared_qwen_expert(stem: DecoderShape, *, inner: int) -> tuple[Linear, ...]:
    """An expert for every token, and how much of it to add."""
    gate = parts.linear("shared_expert_gate", stem.hidden, 1, Role.ROUTER)
    return (gate, *parts.gated_mlp(stem, inner=inner))


def read_olmoe(f: ConfigFields) -> ModelSpec:
    """OLMoE: norms over all query and key heads together, experts on every layer."""
    stem = parts.read_decoder_shape(f)
    experts = parts.read_experts(f, inner=stem.inner, count_default=64, per_token_default=8)
    attention = parts.split_attention(stem, bias=f.flag("attention_bias", default=False))
    block = parts.decoder(
        stem,
        attention + parts.expert_linears(stem, experts, router="gate", adapted=True),
        head_norm_params=stem.query_width + stem.kv_width,
    )
    return parts.make_spec(stem, block)


def read_minimax_m2(f: ConfigFields) -> ModelSpec:
    """MiniMax M2: as OLMoE, with heads whose width stands apart."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    experts = parts.read_experts(f, inner=stem.inner, count_default=256, per_token_default=8)
    block = parts.decoder(
        stem,
        parts.split_attention(stem)
        + parts.expert_linears(stem, experts, router="gate", adapted=True),
        head_norm_params=stem.query_width + stem.kv_width,
    )
    return parts.make_spec(stem, block)


def read_granitemoeshared(f: ConfigFields) -> ModelSpec:
    """Granite 3 MoE with a shared expert, where its width is not 0."""
    stem = parts.read_decoder_shape(f)
    experts = parts.read_experts(f, inner=stem.inner, count_default=8, per_token_default=2)
    linears = (
        *parts.split_attention(stem, bias=f.flag("attention_bias", default=False)),
        *parts.expert_linears(stem, experts, router="router"),
        *shared_granite_mlp(f, stem, default=0),
    )
    return parts.make_spec(stem, parts.decoder(stem, linears))


def shared_granite_mlp(f: ConfigFields, stem: DecoderShape, *, default: int) -> tuple[Linear, ...]:
    """Gate and up in one matrix; none where its width is 0."""
    width = f.values.get("shared_intermediate_size")
    if width == 0 or (width is None and default == 0):
        return ()
    inner = f.size_or_default(
        "shared_intermediate_size", default=default, most=parts.MAX_INNER_WIDTH
    )
    return parts.plain_mlp(
        stem, names=("input_linear", "output_linear"), bias=False, up_factor=2, inner=inner
    )


def read_phimoe(f: ConfigFields) -> ModelSpec:
    """Phi 3.5 MoE: LayerNorm with biases, experts on every layer."""
    stem = parts.read_decoder_shape(
        f, kv_heads=f.size_or_default("num_key_value_heads", default=8, most=parts.MAX_COUNT)
    )
    experts = parts.read_experts(f, inner=stem.inner, count_default=16, per_token_default=2)
    bias = f.flag("attention_bias", default=False)
    linears = parts.split_attention(stem, bias=bias) + parts.expert_linears(
        stem, experts, router="router", has_linear_router=True
    )
    window = f.window("sliding_window", default=None)
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears, norm_bias=True),
        has_layer_norm=True,
        is_gated_mlp=True,
        lm_head_bias=f.flag("lm_head_bias", default=False),
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def read_glm4_moe(f: ConfigFields) -> ModelSpec:
    """GLM 4.5 to 4.7: a plain MLP on the first layers, then shared and chosen experts."""
    stem = parts.read_decoder_shape(f)
    bias = f.flag("attention_bias", default=False)
    return _read_routed(
        f,
        stem,
        attention=parts.split_attention(stem, bias=bias, out_bias=False),
        defaults=_Routed(num_experts=128, per_token=8, shared=1, first_dense=1, inner=1408),
        head_norm_params=2 * stem.head_dim if f.flag("use_qk_norm", default=False) else 0,
    )


def read_dots1(f: ConfigFields) -> ModelSpec:
    """dots.llm1: DeepSeek's experts under Qwen 3's attention."""
    stem = parts.read_decoder_shape(f)
    f.need(("n_routed_experts",), ("n_shared_experts",), ("num_experts_per_tok",))
    spec = _read_routed(
        f,
        stem,
        attention=parts.split_attention(stem, bias=f.flag("attention_bias", default=False)),
        defaults=_Routed(num_experts=128, per_token=6, shared=2, first_dense=0, inner=1408),
        head_norm_params=2 * stem.head_dim,
    )
    window = f.window("sliding_window", default=4096)
    first = f.optional_size("max_window_layers", most=parts.MAX_COUNT) or 62
    late = max(0, stem.layers - first)
    sliding = parts.count_sliding(f, layers=stem.layers, otherwise=late) if window else 0
    return spec.model_copy(
        update={"sliding_window": window if sliding else None, "num_sliding_layers": sliding}
    )


def read_deepseek_v2(f: ConfigFields) -> ModelSpec:
    """DeepSeek V2 and V2-Lite: latent attention, shared and chosen experts."""
    f.need(("num_experts_per_tok",))
    return _read_deepseek(
        f, _Routed(num_experts=64, per_token=6, shared=2, first_dense=0, inner=1407)
    )


def read_deepseek_v3(f: ConfigFields) -> ModelSpec:
    """DeepSeek V3 and R1: as V2, with a bias for each expert that no gradient trains."""
    return _read_deepseek(
        f, _Routed(num_experts=256, per_token=8, shared=1, first_dense=3, inner=2048)
    )


def read_glm4_moe_lite(f: ConfigFields) -> ModelSpec:
    """GLM 4.7 Flash: DeepSeek V3's layer, with values as wide as keys."""
    usual = {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 768}
    filled = f.with_values(**{key: size for key, size in usual.items() if not f.mentions(key)})
    return _read_deepseek(
        filled, _Routed(num_experts=64, per_token=4, shared=1, first_dense=1, inner=1536)
    )


class _Routed(NamedTuple):
    """What DeepSeek's line takes where a config is silent."""

    num_experts: int
    per_token: int
    shared: int
    first_dense: int
    inner: int


def _read_deepseek(f: ConfigFields, defaults: _Routed) -> ModelSpec:
    """Queries, keys and values come from narrow latents, each with a norm.

    Keys have the width of queries, which is that of `head_dim`; values are narrower.
    """
    nope = f.size_or_default("qk_nope_head_dim", default=128)
    rope = f.size_or_default("qk_rope_head_dim", default=64)
    value_dim = f.size_or_default("v_head_dim", default=128)
    stem = parts.read_decoder_shape(f, head_dim=nope + rope)
    latent = f.size_or_default("kv_lora_rank", default=512)
    query_latent = f.optional_size("q_lora_rank")
    if query_latent is None and not f.mentions("q_lora_rank"):
        query_latent = f.size_or_default("q_lora_rank", default=1536)
    bias, role = f.flag("attention_bias", default=False), Role.ATTENTION
    queries: tuple[Linear, ...] = (parts.linear("q_proj", stem.hidden, stem.query_width, role),)
    if query_latent is not None:
        queries = (
            parts.linear("q_a_proj", stem.hidden, query_latent, role, bias=bias),
            parts.linear("q_b_proj", query_latent, stem.query_width, role),
        )
    attention = (
        *queries,
        parts.linear("kv_a_proj_with_mqa", stem.hidden, latent + rope, role, bias=bias),
        parts.linear("kv_b_proj", latent, stem.heads * (nope + value_dim), role),
        parts.linear("o_proj", stem.heads * value_dim, stem.hidden, role, bias=bias),
    )
    if value_dim != nope + rope:
        f.warnings.append(
            "Attention's values are narrower than its keys; time and memory count them as wide."
        )
    return _read_routed(
        f,
        stem,
        attention=attention,
        defaults=defaults,
        extra_params=latent + (query_latent or 0),
    ).model_copy(update={"num_kv_heads": stem.heads})


def _read_routed(
    f: ConfigFields,
    stem: DecoderShape,
    *,
    attention: tuple[Linear, ...],
    defaults: _Routed,
    head_norm_params: int = 0,
    extra_params: int = 0,
) -> ModelSpec:
    """A plain MLP on the first layers, then chosen experts and shared ones, which are one MLP.

    Under `all-linear` peft takes the experts for the gate, up and down projections, and gives the
    plain ones no adapter.
    """
    inner = f.size_or_default(
        "moe_intermediate_size", default=defaults.inner, most=parts.MAX_INNER_WIDTH
    )
    experts = parts.read_experts(
        f, inner=inner, count_default=defaults.num_experts, per_token_default=defaults.per_token
    )
    shared = f.size_or_default("n_shared_experts", default=defaults.shared, most=parts.MAX_COUNT)
    sparse = parts.expert_linears(stem, experts, router="gate", adapted=True)
    sparse += parts.without_adapter(parts.gated_mlp(stem, inner=shared * inner))
    dense = parts.without_adapter(parts.gated_mlp(stem))
    first = _read_first_dense(f, default=defaults.first_dense)

    def block(is_sparse: bool) -> Block:
        return parts.decoder(
            stem,
            attention + (sparse if is_sparse else dense),
            head_norm_params=head_norm_params,
            extra_params=extra_params,
        )

    kinds = parts.read_layer_types(f, layers=stem.layers, key="mlp_layer_types")
    is_sparse = [
        index >= first if kinds is None else kinds[index] == "sparse"
        for index in range(stem.layers)
    ]
    blocks = parts.blocks(is_sparse, block)
    return parts.make_spec(stem, blocks, intermediate_size=inner)


def _read_first_dense(f: ConfigFields, *, default: int) -> int:
    if f.values.get("first_k_dense_replace") == 0:
        return 0
    return f.optional_size("first_k_dense_replace", most=parts.MAX_LAYERS) or default


def read_llama4(f: ConfigFields) -> ModelSpec:
    """Llama 4: a shared expert beside the chosen ones, on every layer or on every other."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    experts = parts.read_experts(f, inner=stem.inner, count_default=16, per_token_default=1)
    attention = parts.split_attention(stem, bias=f.flag("attention_bias", default=False))
    sparse = parts.ungrouped(
        parts.expert_linears(stem, experts, router="router", has_linear_router=True)
    )
    sparse += parts.gated_mlp(stem)
    dense = parts.gated_mlp(
        stem,
        inner=f.size_or_default(
            "intermediate_size_mlp", default=16_384, most=parts.MAX_INNER_WIDTH
        ),
    )
    step = f.optional_size("interleave_moe_layer_step", most=parts.MAX_LAYERS) or 1
    listed = f.numbers("moe_layers") if f.has("moe_layers") else None

    def is_sparse(index: int) -> bool:
        return (index + 1) % step == 0 if listed is None else index in listed

    blocks = parts.blocks(
        (is_sparse(index) for index in range(stem.layers)),
        lambda sparse_layer: parts.decoder(stem, attention + (sparse if sparse_layer else dense)),
    )
    f.warnings.append(
        "transformers multiplies every token with all experts of Llama 4; time and memory count "
        "the chosen ones alone."
    )
    # A chunk is a window that does not slide: no token sees more than its length.
    chunk = f.window("attention_chunk_size", default=8192)
    return parts.make_spec(
        stem,
        blocks,
        sliding_window=chunk,
        num_sliding_layers=_count_chunked(f, stem.layers) if chunk else 0,
    )


def _count_chunked(f: ConfigFields, layers: int) -> int:
    """From `layer_types`, else the layers with rotary positions: three of four."""
    kinds = parts.read_layer_types(f, layers=layers)
    if kinds is not None:
        return sum(kind == "chunked_attention" for kind in kinds)
    rotary = f.numbers("no_rope_layers")  # 1 where there are rotary positions
    if rotary:
        return min(layers, sum(map(bool, rotary)))
    every = f.optional_size("no_rope_layer_interval", most=parts.MAX_LAYERS) or 4
    return layers - layers // every


def read_ernie_moe(f: ConfigFields) -> ModelSpec:
    """ERNIE 4.5 MoE: experts on a range of layers, each with a bias that chooses it."""
    stem = parts.read_decoder_shape(
        f, kv_heads=f.size_or_default("num_key_value_heads", default=4, most=parts.MAX_COUNT)
    )
    bias = f.flag("use_bias", default=False)
    experts = Experts(
        count=f.size_or_default("moe_num_experts", default=64, most=parts.MAX_COUNT),
        per_token=f.size_or_default("moe_k", default=6, most=parts.MAX_COUNT),
        inner=f.size_or_default("moe_intermediate_size", default=1536, most=parts.MAX_INNER_WIDTH),
    )
    attention = parts.split_attention(stem, bias=bias)
    sparse = parts.expert_linears(stem, experts, router="gate", adapted=True)
    if f.values.get("moe_num_shared_experts") != 0:
        shared = f.size_or_default("moe_num_shared_experts", default=2, most=parts.MAX_COUNT)
        mlp = parts.gated_mlp(stem, bias=bias, inner=shared * experts.inner)
        sparse += parts.without_adapter(mlp)
    dense = parts.without_adapter(parts.gated_mlp(stem, bias=bias))
    first, last = f.number("moe_layer_start_index"), f.number("moe_layer_end_index")
    first = 1 if first is None else first
    last = stem.layers - 1 if last in (None, -1) else last or 0
    every = f.optional_size("moe_layer_interval", most=parts.MAX_LAYERS) or 1
    blocks = parts.blocks(
        ((at + 1) % every == 0 and first <= at <= last for at in range(stem.layers)),
        lambda is_sparse: parts.decoder(
            stem,
            attention + (sparse if is_sparse else dense),
            extra_params=experts.count if is_sparse else 0,
        ),
    )
    return parts.make_spec(
        stem, blocks, tied=True, lm_head_bias=bias, intermediate_size=experts.inner
    )


def read_hunyuan_moe(f: ConfigFields) -> ModelSpec:
    """Hunyuan-A13B: a shared MLP beside the experts of every layer, norms for each head."""
    stem = parts.read_decoder_shape(f)
    topk = f.values.get("moe_topk")  # a number, or one for each layer
    experts = Experts(
        count=f.size_or_default("num_experts", default=1, most=parts.MAX_COUNT),
        per_token=max(f.numbers("moe_topk"), default=1)
        if isinstance(topk, list)
        else f.size_or_default("moe_topk", default=1, most=parts.MAX_COUNT),
        inner=stem.inner,
    )
    linears = (
        *parts.split_attention(stem, bias=f.flag("attention_bias", default=False)),
        *parts.expert_linears(stem, experts, router="wg", adapted=True, has_linear_router=True),
        *parts.without_adapter(parts.gated_mlp(stem)),
    )
    block = parts.decoder(stem, linears, head_norm_params=2 * stem.head_dim)
    return parts.make_spec(stem, block)


_DEEPSEEK = Family(
    model_types=("deepseek_v2",),
    read=read_deepseek_v2,
    # Values are narrower than keys: flash-attention's kernels over documents want them as wide.
    has_flash=False,
    has_liger=True,
)
EXPERT_FAMILIES = (
    Family(
        model_types=("qwen2_moe",),
        read=read_qwen2_moe,
        has_router_loss=True,
        gguf_name="qwen2moe",
        gguf=layouts.QWEN2_MOE_GGUF,
    ),
    Family(model_types=("olmoe",), read=read_olmoe, has_router_loss=True, gguf=layouts.OLMOE_GGUF),
    Family(
        model_types=("granitemoeshared",),
        mlp_module="",
        read=read_granitemoeshared,
        has_router_loss=True,
        scales_logits=True,
        gguf_name="granitemoe",
        gguf=GRANITEMOE_GGUF,
    ),
    Family(
        model_types=("phimoe",),
        read=read_phimoe,
        has_router_loss=True,
        mlp_module="",  # its router draws at random in training
        lora_excludes=("router",),
        gguf_problem="llama.cpp weights its experts by one softmax, the model by one for each",
    ),
    Family(
        model_types=("glm4_moe",),
        read=read_glm4_moe,
        gguf_name="glm4moe",
        gguf=layouts.GLM4_MOE_GGUF,
    ),
    Family(model_types=("dots1",), read=read_dots1),
    _DEEPSEEK,
    replace(
        _DEEPSEEK,
        model_types=("deepseek_v3",),
        read=read_deepseek_v3,
        gguf_name="deepseek2",
        gguf=layouts.DEEPSEEK_GGUF,
    ),
    Family(
        model_types=("glm4_moe_lite",),
        read=read_glm4_moe_lite,
        gguf_name="deepseek2",
        gguf=layouts.DEEPSEEK_GGUF,
    ),
    Family(model_types=("minimax_m2",), read=read_minimax_m2, has_router_loss=True),
    Family(
        model_types=("llama4_text", "llama4"),
        mlp_module="",
        read=read_llama4,
        takes_positions=False,
        has_flash=False,
        has_liger=True,
        lora_excludes=("router",),
    ),
    Family(
        model_types=("ernie4_5_moe",),
        read=read_ernie_moe,
        has_router_loss=True,
        frozen=("e_score_correction_bias",),
    ),
    Family(
        model_types=("hunyuan_v1_moe",),
        read=read_hunyuan_moe,
        has_liger=True,
        gguf_name="hunyuan-moe",
        gguf=layouts.HUNYUAN_MOE_GGUF,
    ),
)
