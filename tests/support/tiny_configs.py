"""A config of a few thousand parameters for every family that transformers can build.

Sizes differ from each other, so that one taken for another shows in the counts; scales that a
family puts on its logits differ from 1. Layers of every kind that the family has are there.
"""

from __future__ import annotations

import re
from typing import Any

VOCAB = 64
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = _SIZES | {"head_dim": 16}
_UNGROUPED = {key: size for key, size in _SIZES.items() if key != "num_key_value_heads"}
_GPT: dict[str, Any] = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5: dict[str, Any] = {
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"shared_expert_intermediate_size": 40}
_LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_ROUTED = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

TINY: dict[str, dict[str, Any]] = {
    # Llama and its line
    "llama": _WIDE,
    "mistral": _WIDE | {"sliding_window": 4},
    "ministral": _WIDE | _ALTERNATING,
    "ministral3": _WIDE,
    "granite": _SIZES | {"logits_scaling": 4.0},
    "smollm3": _SIZES,
    "stablelm": _SIZES | {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "seed_oss": _WIDE | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "hunyuan_v1_dense": _WIDE,
    "arcee": _WIDE,
    "apertus": _SIZES,
    "helium": _SIZES | {"head_dim": 12},
    "ernie4_5": _WIDE,
    "glm": _WIDE,
    "glm4": _WIDE,
    "olmo2": _SIZES,
    "olmo3": _SIZES | _ALTERNATING,
    "exaone4": _WIDE | _ALTERNATING,
    "cohere": _SIZES | {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": _SIZES | _ALTERNATING | {"logit_scale": 0.25},
    "nemotron": _WIDE,
    "starcoder2": _SIZES,
    "phi": _SIZES,
    "phi3": _SIZES | {"sliding_window": 4},
    # Gemma
    "gemma": _WIDE,
    "gemma2": _WIDE | _ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma3_text": _WIDE | _ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma4_text": _WIDE
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 30.0,
    },
    # Qwen
    "qwen2": _SIZES,
    "qwen3": _WIDE,
    "qwen2_moe": _SIZES | _QWEN_EXPERTS | _SHARED | {"mlp_only_layers": [0]},
    "qwen3_moe": _WIDE | _QWEN_EXPERTS | {"mlp_only_layers": [0]},
    "qwen3_next": _SIZES | _DELTA_NET | _QWEN_EXPERTS | _SHARED | {"mlp_only_layers": [1]},
    "qwen3_5_text": _SIZES | _DELTA_NET,
    "qwen3_5_moe_text": _SIZES | _DELTA_NET | _QWEN_EXPERTS | _SHARED,
    # Mixtures of experts
    "mixtral": _SIZES | _EXPERTS,
    "granitemoe": _SIZES | _EXPERTS | {"logits_scaling": 4.0},
    "granitemoeshared": _SIZES | _EXPERTS | {"logits_scaling": 4.0, "shared_intermediate_size": 40},
    "phimoe": _SIZES | _EXPERTS | {"attention_bias": True, "lm_head_bias": True},
    "olmoe": _SIZES | {"num_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": _WIDE | _ALTERNATING | _EXPERTS,
    "glm4_moe": _WIDE | _ROUTED | {"use_qk_norm": True, "attention_bias": True},
    "dots1": _WIDE | _ROUTED,
    "deepseek_v2": _SIZES | _LATENT | _ROUTED,
    "deepseek_v3": _SIZES | _LATENT | _ROUTED | {"n_group": 2, "topk_group": 1},
    "glm4_moe_lite": _SIZES
    | _LATENT
    | _ROUTED
    | {"v_head_dim": 24, "mlp_layer_types": ["sparse", "dense"]},
    "minimax_m2": _WIDE | _EXPERTS,
    "llama4_text": _WIDE
    | _EXPERTS
    | {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 72,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 8,
    },
    "ernie4_5_moe": _SIZES
    | {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_moe": _WIDE | {"num_experts": 6, "moe_topk": 2},
    # With layers that are not softmax attention
    "granitemoehybrid": _SIZES
    | _MAMBA2
    | _EXPERTS
    | {
        "logits_scaling": 4.0,
        "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bamba": _SIZES | _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _SIZES | _MAMBA2 | {"mamba_d_ssm": 96, "lm_head_multiplier": 0.25},
    "jamba": _SIZES
    | {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 6,
        "mamba_d_state": 8,
        "mamba_dt_rank": 5,
    },
    "nemotron_h": {key: size for key, size in _WIDE.items() if key != "num_hidden_layers"}
    | {
        "hybrid_override_pattern": "M-*E",
        "ssm_state_size": 8,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 6,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
    "lfm2": _SIZES | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": _SIZES
    | _QWEN_EXPERTS
    | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "state_size": 8,
        "time_step_rank": 5,
    },
    "mamba2": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "state_size": 8,
        "num_heads": 6,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "falcon_mamba": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "state_size": 8,
        "time_step_rank": 5,
    },
    # GPT and the LayerNorm decoders of 2022
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": _UNGROUPED,
    "gptj": _GPT | {"rotary_dim": 4},
    "codegen": _GPT | {"rotary_dim": 4},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "mpt": {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB, "max_seq_len": 64},
    "opt": _UNGROUPED | {"ffn_dim": 80, "word_embed_proj_dim": 48},
    "falcon": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5": _T5,
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu"},
}
"""By `model_type`, without it. A record that transformers knows needs a row here."""


def tiny_config(model_type: str) -> dict[str, Any]:
    """As a config.json would have it."""
    return {"model_type": model_type} | TINY[model_type]


# Rows of whole blocks of bitsandbytes, and what llama.cpp has.

_BLOCK = 64
_ROW = re.compile(
    r"^(hidden_size|n_embd|d_model|d_ff|ffn_dim|word_embed_proj_dim|(q|kv)_lora_rank|mamba_d_ssm)$"
    r"|intermediate_size"
)
_LINEAR_HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_PERIOD_OF_FOUR = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 512},  # which llama.cpp leaves out, with a note
    "phi3": {"sliding_window": 512},
    "helium": {"head_dim": 16},
    "olmo3": _PERIOD_OF_FOUR,
    "cohere": {"use_qk_norm": False},
    "cohere2": _PERIOD_OF_FOUR,
    "gemma4_text": {"global_head_dim": 32, "vocab_size_per_layer_input": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen3_next": _LINEAR_HEADS | {"mlp_only_layers": []},
    "qwen3_5_text": _LINEAR_HEADS,
    "qwen3_5_moe_text": _LINEAR_HEADS,
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "olmoe": {"num_key_value_heads": 4},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "deepseek_v2": {"v_head_dim": 16},
    "deepseek_v3": {"v_head_dim": 16},
    "glm4_moe_lite": {
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_n_groups": 1},
    "bamba": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8},
    "jamba": {"mamba_dt_rank": 4},  # bitsandbytes compiles a function for odd ones
    "nemotron_h": {"mamba_num_heads": 8},
    "mamba": {"time_step_rank": 4},
    "mamba2": {"num_heads": 8},
    "falcon_mamba": {"time_step_rank": 4},
}


_VISION = {"hidden_size": 64, "intermediate_size": 128, "patch_size": 14}
_SIGLIP = _VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_QWEN_VISION = _VISION | {
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
VISION: dict[str, dict[str, Any] | None] = {
    "gemma3": _SIGLIP,
    "gemma4": None,  # as small Gemma 4 without its towers
    "qwen3_5": _QWEN_VISION,
    "qwen3_5_moe": _QWEN_VISION,
    "llama4": _SIGLIP
    | {
        "intermediate_size": 256,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
}
"""By `model_type`, the vision part of a config that holds the text part of `{model_type}_text`."""


def text_type(model_type: str) -> str:
    """The family of the text part."""
    return f"{model_type}_text" if model_type in VISION else model_type


def whole_config(model_type: str, *, vocab_size: int) -> dict[str, Any]:
    """`wide_config`, with the vision part that the family has."""
    if model_type not in VISION:
        return wide_config(model_type, vocab_size=vocab_size)
    text = wide_config(text_type(model_type), vocab_size=vocab_size)
    vision = VISION[model_type]
    parts = {"text_config": text} | ({} if vision is None else {"vision_config": vision})
    return {"model_type": model_type} | parts


def wide_config(model_type: str, *, vocab_size: int) -> dict[str, Any]:
    """A config that every step of the whole job takes: quantization and llama.cpp too."""
    config = tiny_config(model_type) | _CHANGES.get(model_type, {})
    for name, value in config.items():
        if _ROW.search(name) and isinstance(value, int):
            config[name] = -(-value // _BLOCK) * _BLOCK
        elif name.startswith("vocab_size"):
            config[name] = vocab_size
        elif name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            config[name] = 512
    return config
