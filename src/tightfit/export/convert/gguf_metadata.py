"""The architecture of a model as GGUF metadata, by llama.cpp's keys."""

from __future__ import annotations

from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.runtime.gguf.layout import falcon_kv_heads
from tightfit.runtime.gguf.rope import add_rope, read_rope

USUAL_GEMMA3_PERIOD = 6
BLOOM_CONTEXT = 2048
"""Bloom's config does not say what it was trained on. Source: arXiv:2211.05100, table 3."""


def head_dim_of(config: Any) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def write_architecture(writer: Any, model_type: str, config: Any) -> list[str]:
    """Write sizes, norms, positions and attention; returns what a user should know."""
    writer.add_block_count(int(config.num_hidden_layers))
    writer.add_context_length(_context_length(config))
    writer.add_embedding_length(int(config.hidden_size))
    writer.add_feed_forward_length(_feed_forward(model_type, config))
    writer.add_head_count(int(config.num_attention_heads))
    writer.add_vocab_size(int(config.vocab_size))
    writer.add_head_count_kv(_num_kv_heads(model_type, config))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    else:
        writer.add_layer_norm_eps(float(config.layer_norm_epsilon))
    if model_type in ("gpt2", "bloom"):
        return []
    if model_type == "falcon":
        writer.add_tensor_data_layout("jploski")  # queries, keys and values each in one piece
        return add_rope(writer, config)
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))
    writer.add_rope_dimension_count(rotary_dim(config))
    return [*add_rope(writer, config), *_add_attention(writer, model_type, config)]


def rotary_dim(config: Any) -> int:
    """How much of a head is turned; all of it in most models."""
    fraction = read_rope(config).get("partial_rotary_factor")
    if fraction is None:
        fraction = getattr(config, "partial_rotary_factor", None)
    return int(head_dim_of(config) * float(1.0 if fraction is None else fraction))


def _context_length(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        found = getattr(config, name, None)
        if found:
            return int(found)
    return BLOOM_CONTEXT


def _feed_forward(model_type: str, config: Any) -> int:
    if model_type == "bloom":
        return 4 * int(config.hidden_size)
    stated = {"gpt2": "n_inner", "falcon": "ffn_hidden_size"}.get(model_type, "intermediate_size")
    return int(getattr(config, stated, None) or 4 * config.hidden_size)


def _num_kv_heads(model_type: str, config: Any) -> int:
    if model_type == "falcon":
        return falcon_kv_heads(config)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _add_attention(writer: Any, model_type: str, config: Any) -> list[str]:
    """Sliding windows and soft caps."""
    window = int(getattr(config, "sliding_window", None) or 0)
    if model_type == "gemma2":
        writer.add_attn_logit_softcapping(float(config.attn_logit_softcapping or 0))
        writer.add_final_logit_softcapping(float(config.final_logit_softcapping or 0))
        writer.add_sliding_window(window)
        _require_period(config, 2)
        return []
    if model_type == "gemma3_text":
        return _add_gemma3(writer, config)
    if model_type == "phi3":
        writer.add_sliding_window(window)
    types = _layer_types(config)
    is_sliding = window and (not types or "sliding_attention" in types)
    if is_sliding and window < _context_length(config):
        return [
            f"It attends to the last {window:,} tokens; llama.cpp lets this family attend to all: "
            "answers differ in longer contexts."
        ]
    return []


def _add_gemma3(writer: Any, config: Any) -> list[str]:
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(float(config.final_logit_softcapping))
    types = _layer_types(config)
    if "sliding_attention" not in types:
        return []
    period = next(
        (at + 1 for at, kind in enumerate(types) if kind == "full_attention"), USUAL_GEMMA3_PERIOD
    )
    _require_period(config, period)
    writer.add_sliding_window(int(config.sliding_window))
    writer.add_sliding_window_pattern(period)
    local = read_rope(config, "sliding_attention").get("rope_theta")
    if local is not None:
        writer.add_rope_freq_base_swa(float(local))
    return []


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])


def _require_period(config: Any, period: int) -> None:
    """llama.cpp knows only every n-th layer to attend to all."""
    for at, kind in enumerate(_layer_types(config)):
        if (kind == "full_attention") != (at % period == period - 1):
            raise InvalidInputError(
                f"Layer {at} of this model is of the kind {kind}, where llama.cpp expects another: "
                f"it lets every {period}th layer attend to all tokens.",
                remedy="use the model with --engine transformers",
            )
