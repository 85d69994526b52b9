"""llama.cpp's layouts of families of several files.

Source: ggml-org/llama.cpp, `conversion/` and `src/models/`.
"""

from __future__ import annotations

from typing import Any

from tightfit.models.family import (
    GgufLayout,
    Rearrangement,
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
