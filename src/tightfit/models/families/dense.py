"""Dense decoders of 2024 to 2026: Ministral, GLM, OLMo, Cohere, Nemotron, EXAONE, Seed, Apertus."""

from __future__ import annotations

from dataclasses import replace

from tightfit.models.families import layouts, parts
from tightfit.models.families.parts import ConfigFields, DecoderShape
from tightfit.models.family import Family
from tightfit.models.spec import Block, ModelSpec, Role

_UP_DOWN = ("up_proj", "down_proj")


def read_ministral(f: ConfigFields) -> ModelSpec:
    """Ministral 8B: Mistral's layer; `layer_types` says which layers slide."""
    stem = parts.read_decoder_shape(f)
    window = f.window("sliding_window", default=4096)
    sliding = parts.count_sliding(f, layers=stem.layers, otherwise=stem.layers)
    return parts.make_spec(
        stem,
        parts.decoder(stem, parts.split_attention(stem) + parts.gated_mlp(stem)),
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
    )


def read_ministral3(f: ConfigFields) -> ModelSpec:
    """Ministral 3: Mistral's layer, without a window unless the config has one."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    window = f.window("sliding_window", default=None)
    return parts.make_spec(
        stem,
        parts.decoder(stem, parts.split_attention(stem) + parts.gated_mlp(stem)),
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


def read_glm(f: ConfigFields) -> ModelSpec:
    """GLM 4 9B: biases on query, key and value, gate and up in one matrix."""
    return _read_glm(f, num_norms=2)


def read_glm4(f: ConfigFields) -> ModelSpec:
    """GLM 4 0414: GLM with norms behind attention and MLP too."""
    return _read_glm(f, num_norms=4)


def _read_glm(f: ConfigFields, *, num_norms: int) -> ModelSpec:
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    bias = f.flag("attention_bias", default=True)
    linears = parts.split_attention(stem, bias=bias, out_bias=False) + parts.plain_mlp(
        stem, names=("gate_up_proj", "down_proj"), bias=False, up_factor=2
    )
    return parts.make_spec(stem, parts.decoder(stem, linears, num_norms=num_norms))


def read_olmo2(f: ConfigFields) -> ModelSpec:
    """OLMo 2: norms behind attention and MLP, and over all query and key heads together."""
    stem = parts.read_decoder_shape(f)
    bias = f.flag("attention_bias", default=False)
    block = parts.decoder(
        stem,
        parts.split_attention(stem, bias=bias) + parts.gated_mlp(stem),
        head_norm_params=stem.query_width + stem.kv_width,
    )
    return parts.make_spec(stem, block)


def read_olmo3(f: ConfigFields) -> ModelSpec:
    """OLMo 3: OLMo 2, of which three layers in four slide."""
    spec = read_olmo2(f)
    window = f.window("sliding_window", default=4096)
    sliding = parts.count_sliding(
        f, layers=spec.num_layers, otherwise=spec.num_layers - spec.num_layers // 4
    )
    return spec.model_copy(
        update={"sliding_window": window, "num_sliding_layers": sliding if window else 0}
    )


def read_exaone4(f: ConfigFields) -> ModelSpec:
    """EXAONE 4: OLMo 3's layer with a norm for each head, and a hybrid of windows where one is."""
    stem = parts.read_decoder_shape(f)
    block = parts.decoder(
        stem,
        parts.split_attention(stem) + parts.gated_mlp(stem),
        head_norm_params=2 * stem.head_dim,
    )
    window = f.window("sliding_window", default=4096)
    pattern = f.values.get("sliding_window_pattern")
    if window is None:  # transformers saves a pattern of 0 then
        full = stem.layers
    elif isinstance(pattern, str):  # `LLLG`: local and global
        full = sum(pattern[index % len(pattern)] == "G" for index in range(stem.layers))
    else:
        full = stem.layers // (f.optional_size("sliding_window_pattern") or 4)
    sliding = parts.count_sliding(f, layers=stem.layers, otherwise=stem.layers - full)
    return parts.make_spec(
        stem, block, sliding_window=window, num_sliding_layers=sliding if window else 0
    )


def read_cohere(f: ConfigFields) -> ModelSpec:
    """Command R: a parallel residual with one norm, tied embeddings."""
    stem = parts.read_decoder_shape(f)
    per_head = f.flag("use_qk_norm", default=False)
    block = parts.decoder(
        stem,
        parts.split_attention(stem, bias=f.flag("attention_bias", default=False))
        + parts.gated_mlp(stem),
        num_norms=1,
        head_norm_params=stem.query_width + stem.kv_width if per_head else 0,
    )
    return _make_cohere(stem, block)


def read_cohere2(f: ConfigFields) -> ModelSpec:
    """Command R7B and A: Command R, of which three layers in four slide."""
    hidden, heads = f.size(*parts.HIDDEN), f.size(*parts.HEADS, most=parts.MAX_COUNT)
    head_dim = f.quotient(hidden, heads, "the heads must share the hidden size evenly")
    stem = parts.read_decoder_shape(f, head_dim=head_dim)
    linears = parts.split_attention(
        stem, bias=f.flag("attention_bias", default=False)
    ) + parts.gated_mlp(stem)
    window = f.window("sliding_window", default=4096)
    pattern = f.optional_size("sliding_window_pattern", most=parts.MAX_LAYERS) or 4
    sliding = parts.count_sliding(
        f, layers=stem.layers, otherwise=stem.layers - stem.layers // pattern
    )
    return _make_cohere(
        stem,
        parts.decoder(stem, linears, num_norms=1),
        sliding_window=window,
        num_sliding_layers=sliding if window else 0,
    )


def _make_cohere(stem: DecoderShape, block: Block, **others: int | None) -> ModelSpec:
    """Its LayerNorm has no bias."""
    return parts.make_spec(
        stem,
        block,
        tied=True,
        has_layer_norm=True,
        is_gated_mlp=True,
        is_parallel_residual=True,
        outer_params=stem.hidden,
        **others,
    )


def read_nemotron(f: ConfigFields) -> ModelSpec:
    """Nemotron 4 and Minitron: LayerNorm, an MLP without a gate."""
    stem = parts.read_decoder_shape(f, activation="relu2")
    linears = parts.split_attention(
        stem, bias=f.flag("attention_bias", default=False)
    ) + parts.plain_mlp(stem, names=_UP_DOWN, bias=f.flag("mlp_bias", default=False))
    return parts.make_spec(stem, parts.decoder(stem, linears, norm_bias=True), has_layer_norm=True)


def read_hunyuan(f: ConfigFields) -> ModelSpec:
    """Hunyuan 0.5B to 7B: Llama's layer with a norm for each query and key head."""
    stem = parts.read_decoder_shape(f)
    bias = f.flag("attention_bias", default=False)
    block = parts.decoder(
        stem,
        parts.split_attention(stem, bias=bias) + parts.gated_mlp(stem),
        head_norm_params=2 * stem.head_dim,
    )
    return parts.make_spec(stem, block)


def read_seed_oss(f: ConfigFields) -> ModelSpec:
    """Seed-OSS: biases on query, key and value unless the config says no."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    attention = parts.split_attention(
        stem,
        bias=f.flag("attention_bias", default=True),
        out_bias=f.flag("attention_out_bias", default=False),
    )
    mlp = parts.gated_mlp(stem, bias=f.flag("mlp_bias", default=False))
    return parts.make_spec(stem, parts.decoder(stem, attention + mlp))


def read_arcee(f: ConfigFields) -> ModelSpec:
    """AFM 4.5B: Llama's attention, an MLP without a gate."""
    stem = parts.read_decoder_shape(f, activation="relu2")
    linears = parts.split_attention(
        stem, bias=f.flag("attention_bias", default=False)
    ) + parts.plain_mlp(stem, names=_UP_DOWN, bias=f.flag("mlp_bias", default=False))
    return parts.make_spec(stem, parts.decoder(stem, linears), is_gated_mlp=False)


def read_apertus(f: ConfigFields) -> ModelSpec:
    """Apertus: an MLP without a gate whose activation learns two numbers, norms for each head."""
    stem = parts.read_decoder_shape(f, activation="xielu")
    linears = parts.split_attention(
        stem, bias=f.flag("attention_bias", default=False)
    ) + parts.plain_mlp(stem, names=_UP_DOWN, bias=False)
    block = parts.decoder(
        stem,
        linears,
        head_norm_params=2 * stem.head_dim,
        extra_params=2 if stem.activation == "xielu" else 0,
    )
    return parts.make_spec(stem, block, is_gated_mlp=False)


def read_helium(f: ConfigFields) -> ModelSpec:
    """Helium: Llama's layer; the output matrix is square whatever the heads' width."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    *inputs, _ = parts.split_attention(stem, bias=f.flag("attention_bias", default=False))
    output = parts.linear("o_proj", stem.hidden, stem.hidden, Role.ATTENTION)
    mlp = parts.gated_mlp(stem, bias=f.flag("mlp_bias", default=False))
    return parts.make_spec(stem, parts.decoder(stem, (*inputs, output, *mlp)))


def read_ernie(f: ConfigFields) -> ModelSpec:
    """ERNIE 4.5: Llama's layer with one switch for all biases, tied embeddings."""
    stem = parts.read_decoder_shape(f, head_dim=f.size_or_default("head_dim", default=128))
    bias = f.flag("use_bias", default=False)
    linears = parts.split_attention(stem, bias=bias) + parts.gated_mlp(stem, bias=bias)
    return parts.make_spec(stem, parts.decoder(stem, linears), tied=True)


def read_starcoder2(f: ConfigFields) -> ModelSpec:
    """StarCoder 2: LayerNorm, biases everywhere, an MLP without a gate."""
    stem = parts.read_decoder_shape(
        f,
        kv_heads=f.size_or_default("num_key_value_heads", default=2, most=parts.MAX_COUNT),
        activation="gelu_pytorch_tanh",
    )
    bias = f.flag("use_bias", default=True)
    window = f.window("sliding_window", default=None)
    linears = parts.split_attention(stem, bias=bias) + parts.plain_mlp(
        stem, names=("c_fc", "c_proj"), bias=bias
    )
    return parts.make_spec(
        stem,
        parts.decoder(stem, linears, norm_bias=True),
        tied=True,
        has_layer_norm=True,
        sliding_window=window,
        num_sliding_layers=stem.layers if window else 0,
    )


_COHERE = Family(
    model_types=("cohere",),
    read=read_cohere,
    scales_logits=True,
    composes_norm=True,
    gguf_name="command-r",
    gguf=layouts.COHERE_GGUF,
)
DENSE_FAMILIES = (
    Family(model_types=("ministral",), read=read_ministral, has_liger=True),
    Family(
        model_types=("ministral3",),
        read=read_ministral3,
        gguf_name="mistral3",
        gguf=layouts.MINISTRAL3_GGUF,
    ),
    Family(model_types=("glm",), read=read_glm),
    Family(model_types=("glm4",), read=read_glm4, has_liger=True, gguf=layouts.GLM4_GGUF),
    Family(model_types=("olmo2",), read=read_olmo2, has_liger=True, gguf=layouts.OLMO2_GGUF),
    Family(
        model_types=("olmo3",),
        read=read_olmo3,
        has_liger=True,
        gguf_name="olmo2",
        gguf=layouts.OLMO3_GGUF,
    ),
    Family(model_types=("exaone4",), read=read_exaone4, has_liger=True, gguf=layouts.EXAONE4_GGUF),
    _COHERE,
    replace(
        _COHERE,
        model_types=("cohere2",),
        read=read_cohere2,
        gguf_name="",
        gguf=layouts.COHERE2_GGUF,
    ),
    Family(
        model_types=("nemotron",), read=read_nemotron, has_liger=True, gguf=layouts.NEMOTRON_GGUF
    ),
    Family(
        model_types=("hunyuan_v1_dense",),
        read=read_hunyuan,
        has_liger=True,
        gguf_name="hunyuan-dense",
        gguf=layouts.HUNYUAN_GGUF,
    ),
    Family(
        model_types=("seed_oss",),
        read=read_seed_oss,
        default_attention_dropout=0.1,
        gguf=layouts.SEED_OSS_GGUF,
    ),
    Family(model_types=("arcee",), read=read_arcee, gguf=layouts.ARCEE_GGUF),
    Family(model_types=("apertus",), read=read_apertus),
    Family(model_types=("helium",), read=read_helium),
    Family(model_types=("ernie4_5",), read=read_ernie, gguf=layouts.ERNIE_GGUF),
    Family(model_types=("starcoder2",), read=read_starcoder2, gguf=layouts.STARCODER2_GGUF),
)
