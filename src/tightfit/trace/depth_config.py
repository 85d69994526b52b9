"""A config.json at another depth, and the models whose depth must not be extrapolated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tightfit.trace.depth import BASE_LAYERS, NUM_ADDED

DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the depth field by family; a config may have several of them."""
_INNER_PARTS = ("text_config", "language_config", "llm_config")
"""Where multimodal configs keep the language model's settings."""
_ENCODER_FIELDS = ("encoder_layers", "decoder_layers", "num_decoder_layers")
_FIRST_LAYERS = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "num_kv_shared_layers",
    "num_first_full_attention_layers",
    "num_last_full_attention_layers",
)
"""The first or last layers differ from the others."""
_EVERY_NTH = (
    "decoder_sparse_step",
    "moe_layer_freq",
    "moe_layer_interval",
    "interleave_moe_layer_step",
    "expert_layer_period",
    "attn_layer_period",
    "full_attention_interval",
    "sliding_window_pattern",
    "global_attn_every_n_layers",
    "no_rope_layer_interval",
    "cross_layer_interval",
    "cross_attention_frequency",
    "layer_group_size",
)
"""Every n-th layer differs from the others; 1 and 0 mean none or all."""
_WHERE_SET = ("attention_chunk_size", "attention_types", "layerdrop", "decoder_layerdrop")
"""Layers differ, or are dropped at random, where such a field is set."""
_LISTED = ("layer", "block", "pattern", "idxs", "indices", "indexes")
"""Words in the names of lists about layers."""
_UNRELATED_LISTS = ("architectures", "token_id", "token_ids")


def read_depth(config: dict[str, Any]) -> int | None:
    """The number of decoder layers; None where the config does not say."""
    text = _text_part(config)
    depths = [text[name] for name in DEPTH_FIELDS if name in text]
    return depths[0] if depths and isinstance(depths[0], int) else None


def with_depth(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The config with `num_layers` layers; lists with an entry per layer are cut."""
    depth = read_depth(config)
    text = dict(_text_part(config))
    for name, value in _text_part(config).items():
        if name in DEPTH_FIELDS:
            text[name] = num_layers
        elif isinstance(value, list) and len(value) == depth and not _is_unrelated(name):
            text[name] = [*value, *value[-1:] * num_layers][:num_layers]
    name_of_part = _inner_name(config)
    return text if name_of_part is None else {**config, name_of_part: text}


def fill_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The config as its class completes it: `layer_types` of hybrid families are often left out.

    Families that transformers does not know are returned as they are.
    """
    from transformers import AutoConfig

    try:
        filled: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    except (TypeError, ValueError):
        return config
    return filled


def find_extrapolation_obstacle(config: dict[str, Any]) -> str:
    """Why depth cannot be extrapolated; empty where it can. `config` has its defaults filled in."""
    return next(_list_obstacles(config), "")


def _list_obstacles(config: dict[str, Any]) -> Iterator[str]:
    text = _text_part(config)
    depth = read_depth(config)
    if config.get("is_encoder_decoder") or any(text.get(name) for name in _ENCODER_FIELDS):
        yield "an encoder and a decoder have different layers"
    if depth is None:
        yield "config.json does not say how many layers there are"
        return
    if depth <= BASE_LAYERS + NUM_ADDED:
        yield f"with {depth} layers there is nothing to leave out"
    yield from _list_differing_layers(text, depth)


def _list_differing_layers(text: dict[str, Any], depth: int) -> Iterator[str]:
    """Fields that make layers differ."""
    for name, value in text.items():
        is_telling_list = isinstance(value, list) and _tells_layers_apart(name, value, depth)
        if is_telling_list or (name in _WHERE_SET and value):
            yield f"its layers differ ({name})"
        elif name in _FIRST_LAYERS and value:
            yield f"its first or last layers differ ({name})"
        elif name in _EVERY_NTH and not isinstance(value, list) and value not in (None, 0, 1):
            yield f"its layers take turns ({name})"
    first_windowed = text.get("max_window_layers")
    if text.get("use_sliding_window") and first_windowed is not None and 0 < first_windowed < depth:
        yield "its first layers attend without a window (max_window_layers)"


def _tells_layers_apart(name: str, values: list[Any], depth: int) -> bool:
    """A list with an entry per layer that differ, or one with the numbers of some layers."""
    if _is_unrelated(name) or not values:
        return False
    if len(values) == depth:
        return any(value != values[0] for value in values)
    return any(word in name for word in _LISTED)


def _is_unrelated(name: str) -> bool:
    return name.endswith(_UNRELATED_LISTS)


def _inner_name(config: dict[str, Any]) -> str | None:
    """The nested config of the language model, if there is one."""
    if any(name in config for name in DEPTH_FIELDS):
        return None
    return next((name for name in _INNER_PARTS if isinstance(config.get(name), dict)), None)


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    name = _inner_name(config)
    part: dict[str, Any] = config if name is None else config[name]
    return part
