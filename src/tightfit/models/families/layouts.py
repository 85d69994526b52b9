"""llama.cpp's layouts of families of several files.

Source: ggml-org/llama.cpp, `conversion/` and `src/models/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightfit.models.family import (
    GgufLayout,
    Rearrangement,
    count_leading_dense,
    find_non_square_heads,
    require_full_attention_period,
)

_OLMO3_PERIOD = _COHERE2_PERIOD = 4


def _find_attention_bias(config: Any) -> str | None:
    return "biases in its attention" if getattr(config, "attention_bias", False) else None


def _find_olmo_obstacle(config: Any) -> str | None:
    return _find_attention_bias(config) or find_non_square_heads(config)


def _find_olmo3_obstacle(config: Any) -> str | None:
    rope = config.rope_parameters
    local, whole = rope["sliding_attention"], rope["full_attention"]
    if local["rope_type"] != "default" or local["rope_theta"] != whole["rope_theta"]:
        return "rotary positions of their own in layers that slide"
    return _find_olmo_obstacle(config)


def _write_olmo3(writer: Any, config: Any) -> None:
    require_full_attention_period(config, _OLMO3_PERIOD)
    writer.add_sliding_window(int(config.sliding_window))


OLMO2_GGUF = GgufLayout(needs_head=True, find_obstacle=_find_olmo_obstacle, read_settings=None)
OLMO3_GGUF = GgufLayout(
    needs_head=True,
    find_obstacle=_find_olmo3_obstacle,
    computes_windows=True,
    write_attention=_write_olmo3,
    read_settings=None,
)

_NORMED_LAYERS = 64
"""llama.cpp reads norms over queries and keys in a Command R of this many layers, and requires them
there."""


def _find_cohere_obstacle(config: Any) -> str | None:
    if config.use_qk_norm != (config.num_hidden_layers >= _NORMED_LAYERS):
        return "norms over queries and keys" if config.use_qk_norm else "no such norms in 64 layers"
    return _find_attention_bias(config)


def _write_cohere(writer: Any, config: Any) -> None:
    writer.add_logit_scale(float(config.logit_scale))


def _write_cohere2(writer: Any, config: Any) -> None:
    require_full_attention_period(config, _COHERE2_PERIOD)
    writer.add_logit_scale(float(config.logit_scale))
    writer.add_sliding_window(int(config.sliding_window))


COHERE_GGUF = GgufLayout(
    can_untie=False,
    find_obstacle=_find_cohere_obstacle,
    write_attention=_write_cohere,
    read_settings=None,
)
COHERE2_GGUF = GgufLayout(
    can_untie=False,
    find_obstacle=_find_attention_bias,
    computes_windows=True,
    write_attention=_write_cohere2,
    read_settings=None,
)

GLM4_GGUF = GgufLayout(read_settings=None)


def _find_nemotron_obstacle(config: Any) -> str | None:
    return "biases in its MLP" if config.mlp_bias else _find_attention_bias(config)


NEMOTRON_GGUF = GgufLayout(
    activations=("relu2",),
    needs_head=True,
    rearrangement=Rearrangement.NORM_PLUS_ONE,
    find_obstacle=_find_nemotron_obstacle,
    read_settings=None,
)


def _find_starcoder2_obstacle(config: Any) -> str | None:
    return find_non_square_heads(config) if config.use_bias else "an MLP without biases"


STARCODER2_GGUF = GgufLayout(
    activations=("gelu_pytorch_tanh", "gelu_new"),
    find_obstacle=_find_starcoder2_obstacle,
    read_settings=None,
)


def _find_qwen2_moe_obstacle(config: Any) -> str | None:
    if config.norm_topk_prob:
        return "experts whose weights are made to add up to one (norm_topk_prob: true)"
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "layers without experts (mlp_only_layers, decoder_sparse_step)"
    return find_non_square_heads(config)


def _write_qwen2_moe(writer: Any, config: Any) -> None:
    writer.add_expert_shared_feed_forward_length(int(config.shared_expert_intermediate_size))


QWEN2_MOE_GGUF = GgufLayout(
    needs_head=True,
    expert_inner_key="moe_intermediate_size",
    find_obstacle=_find_qwen2_moe_obstacle,
    write_attention=_write_qwen2_moe,
    read_settings=None,
)


_DELTA_NET_PERIOD = 4


def _find_delta_net_obstacle(config: Any) -> str | None:
    if config.linear_key_head_dim != config.linear_value_head_dim:
        return "keys and values of different sizes in its linear attention"
    return _find_attention_bias(config)


def _find_qwen3_next_obstacle(config: Any) -> str | None:
    if not config.norm_topk_prob:
        return "experts whose weights do not add up to one (norm_topk_prob: false)"
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "layers without experts (mlp_only_layers, decoder_sparse_step)"
    return _find_delta_net_obstacle(config)


def _write_delta_net(writer: Any, config: Any) -> None:
    require_full_attention_period(config, _DELTA_NET_PERIOD)
    writer.add_full_attention_interval(_DELTA_NET_PERIOD)
    writer.add_ssm_conv_kernel(int(config.linear_conv_kernel_dim))
    writer.add_ssm_state_size(int(config.linear_key_head_dim))
    writer.add_ssm_group_count(int(config.linear_num_key_heads))
    writer.add_ssm_time_step_rank(int(config.linear_num_value_heads))
    writer.add_ssm_inner_size(int(config.linear_value_head_dim * config.linear_num_value_heads))


def _write_qwen3_next(writer: Any, config: Any) -> None:
    _write_delta_net(writer, config)
    _write_qwen2_moe(writer, config)


def _write_qwen3_5(writer: Any, config: Any) -> None:
    """Sections of pairs for time, height and width, in turn: text has one position for all."""
    _write_delta_net(writer, config)
    pairs = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
    writer.add_rope_dimension_sections([len(range(at, pairs, 3)) for at in range(3)] + [0])


def _write_qwen3_5_moe(writer: Any, config: Any) -> None:
    _write_qwen3_5(writer, config)
    _write_qwen2_moe(writer, config)


QWEN3_NEXT_GGUF = GgufLayout(
    rearrangement=Rearrangement.DELTA_NET,
    expert_inner_key="moe_intermediate_size",
    find_obstacle=_find_qwen3_next_obstacle,
    write_attention=_write_qwen3_next,
    read_settings=None,
)
QWEN3_5_GGUF = GgufLayout(
    rearrangement=Rearrangement.TILED_DELTA_NET,
    find_obstacle=_find_delta_net_obstacle,
    write_attention=_write_qwen3_5,
    read_settings=None,
)
QWEN3_5_MOE_GGUF = GgufLayout(
    rearrangement=Rearrangement.TILED_DELTA_NET,
    expert_inner_key="moe_intermediate_size",
    find_obstacle=_find_delta_net_obstacle,
    write_attention=_write_qwen3_5_moe,
    read_settings=None,
)


# Dense decoders with a setting or two of their own.


def _find_bias(*names: str) -> Callable[[Any], str | None]:
    """For families whose linear layers have no bias in llama.cpp."""

    def find(config: Any) -> str | None:
        stated = (name for name in names if getattr(config, name, False))
        return next((f"biases in its linear layers ({name})" for name in stated), None)

    return find


def _find_exaone4_obstacle(config: Any) -> str | None:
    if config.sliding_window is not None:
        return "a sliding window, by which some layers have no rotary positions"
    return find_non_square_heads(config)


def _find_ministral3_obstacle(config: Any) -> str | None:
    rope = config.rope_parameters
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return "rotary positions without YaRN"
    if rope.get("mscale", 1.0) != 1.0:
        return "another mscale than 1"
    return None


def _write_ministral3(writer: Any, config: Any) -> None:
    """Queries grow with their position, and YaRN's own scale of attention is divided out."""
    rope = config.rope_parameters
    writer.add_rope_scaling_yarn_log_mul(float(rope.get("mscale_all_dim", 0.0)))
    writer.add_attn_temperature_scale(float(rope["llama_4_scaling_beta"]))


ERNIE_GGUF = GgufLayout(find_obstacle=_find_bias("use_bias"), read_settings=None)
SEED_OSS_GGUF = GgufLayout(
    find_obstacle=_find_bias("attention_out_bias", "mlp_bias"), read_settings=None
)
ARCEE_GGUF = GgufLayout(
    activations=("relu2",),
    rearrangement=Rearrangement.ROTARY,
    reads_rope_factors=True,
    find_obstacle=_find_bias("attention_bias", "mlp_bias"),
    read_settings=None,
)
HUNYUAN_GGUF = GgufLayout(find_obstacle=_find_bias("attention_bias"), read_settings=None)
EXAONE4_GGUF = GgufLayout(
    reads_rope_factors=True, find_obstacle=_find_exaone4_obstacle, read_settings=None
)
MINISTRAL3_GGUF = GgufLayout(
    rearrangement=Rearrangement.ROTARY,
    find_obstacle=_find_ministral3_obstacle,
    write_attention=_write_ministral3,
    read_settings=None,
)


# Mixtures with experts that are chosen by a bias, shared experts, or a plain MLP on the first
# layers.


def _find_late_dense_layers(config: Any) -> str | None:
    kinds = getattr(config, "mlp_layer_types", None) or ()
    if "dense" in kinds[count_leading_dense(config) :]:
        return "layers without experts behind others with them (mlp_layer_types)"
    return None


def _write_routed(writer: Any, config: Any) -> None:
    """Experts chosen by a sigmoid and a bias, as DeepSeek V3 has them."""
    import gguf

    writer.add_leading_dense_block_count(count_leading_dense(config))
    writer.add_expert_shared_count(int(config.n_shared_experts))
    writer.add_expert_weights_scale(float(config.routed_scaling_factor))
    writer.add_expert_weights_norm(bool(config.norm_topk_prob))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.n_group > 1:
        writer.add_expert_group_count(int(config.n_group))
        writer.add_expert_group_used_count(int(config.topk_group))


def _find_grouped_heads(config: Any) -> str | None:
    is_grouped = config.num_key_value_heads != config.num_attention_heads
    return "grouped heads" if is_grouped else None


def _find_olmoe_obstacle(config: Any) -> str | None:
    if config.clip_qkv is not None:
        return "clipped queries, keys and values (clip_qkv)"
    if config.norm_topk_prob:
        return "experts whose weights are made to add up to one (norm_topk_prob: true)"
    return _find_grouped_heads(config) or _find_olmo_obstacle(config)


def _find_hunyuan_moe_obstacle(config: Any) -> str | None:
    if not isinstance(config.moe_topk, int):
        return "a number of experts for each layer (moe_topk)"
    return _find_attention_bias(config)


def _write_hunyuan_moe(writer: Any, config: Any) -> None:
    writer.add_expert_shared_count(1)
    writer.add_expert_shared_feed_forward_length(int(config.intermediate_size))


OLMOE_GGUF = GgufLayout(
    needs_head=True,
    expert_inner_key="intermediate_size",
    find_obstacle=_find_olmoe_obstacle,
    read_settings=None,
)
GLM4_MOE_GGUF = GgufLayout(
    expert_inner_key="moe_intermediate_size",
    find_obstacle=_find_late_dense_layers,
    drops_later_layers=True,
    write_attention=_write_routed,
    read_settings=None,
)
HUNYUAN_MOE_GGUF = GgufLayout(
    expert_inner_key="intermediate_size",
    find_obstacle=_find_hunyuan_moe_obstacle,
    write_attention=_write_hunyuan_moe,
    read_settings=None,
)


# DeepSeek's latent attention.


def _find_deepseek_obstacle(config: Any) -> str | None:
    rope = config.rope_parameters
    if rope.get("mscale", 1.0) != rope.get("mscale_all_dim", rope.get("mscale", 1.0)):
        return "an mscale and an mscale_all_dim that differ"
    if config.q_lora_rank is None:
        return "queries without a latent (q_lora_rank: null)"
    if not config.rope_interleave:
        return "rotary pairs half a head apart (rope_interleave: false)"
    return _find_attention_bias(config) or _find_late_dense_layers(config)


def _write_deepseek(writer: Any, config: Any) -> None:
    """As llama.cpp computes it: one key of the latent and the rotary part for all heads."""
    _write_routed(writer, config)
    latent, rotary = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    writer.add_q_lora_rank(int(config.q_lora_rank))
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(int(config.qk_nope_head_dim) + rotary)
    writer.add_value_length_mla(int(config.v_head_dim))
    writer.add_rope_dimension_count(rotary)
    if scale := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * float(scale))


DEEPSEEK_GGUF = GgufLayout(
    rearrangement=Rearrangement.LATENT,
    expert_inner_key="moe_intermediate_size",
    count_kv_heads=lambda _config: 1,
    states_head_dim=False,
    find_obstacle=_find_deepseek_obstacle,
    drops_later_layers=True,
    write_attention=_write_deepseek,
    read_settings=None,
)


# LFM 2: short convolutions instead of attention on most layers.


_UNSTATED = ("gelu",)
"""The activation that a config without one is taken to mean; LFM 2 always computes silu."""


def _find_lfm2_inner(config: Any) -> int:
    inner = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return inner
    inner = int(2 * inner / 3)
    if config.block_ffn_dim_multiplier is None:
        return inner
    step = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * inner) // step) * step


def _list_lfm2_kv_heads(config: Any) -> list[int]:
    heads = int(config.num_key_value_heads)
    return [heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _find_lfm2_obstacle(config: Any) -> str | None:
    return _find_bias("conv_bias")(config) or find_non_square_heads(config)


def _write_lfm2(writer: Any, config: Any) -> None:
    writer.add_shortconv_l_cache(int(config.conv_L_cache))
    writer.add_layer_norm_rms_eps(float(config.norm_eps))


LFM2_GGUF = GgufLayout(
    activations=_UNSTATED,
    find_inner=_find_lfm2_inner,
    list_kv_heads=_list_lfm2_kv_heads,
    find_obstacle=_find_lfm2_obstacle,
    write_attention=_write_lfm2,
    read_settings=None,
)
