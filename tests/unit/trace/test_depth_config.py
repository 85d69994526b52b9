"""Which models' depth may be extrapolated, and their config at another depth."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from tightfit.trace.depth import find_extrapolation_obstacle, read_depth, with_depth

ALIKE = {"model_type": "llama", "num_hidden_layers": 32}
CATALOGUE = [
    json.loads(path.read_text("utf-8"))
    for path in files("tightfit.catalogue").joinpath("models").iterdir()
    if path.name.endswith(".json")
]


def test_every_name_of_the_depth_is_changed() -> None:
    for config in CATALOGUE:
        changed = with_depth(config, 3)
        assert read_depth(changed) == 3
        names = [
            name for name in config if name.endswith(("layers", "layer")) and config[name] == 3
        ]
        assert not names, "a config of three layers would prove nothing"
        nested: tuple[Any, Any] = (config.get("text_config"), changed.get("text_config"))
        different = {
            name
            for before, after in ((config, changed), *([nested] if all(nested) else []))
            for name in before
            if before[name] != after[name] and not isinstance(before[name], list | dict)
        }
        assert different <= {"num_hidden_layers", "n_layer", "num_layers"}


def test_a_nested_text_part_is_changed_and_nothing_else() -> None:
    config: dict[str, Any] = {
        "vision_config": {"num_hidden_layers": 27},
        "text_config": dict(ALIKE),
    }

    assert with_depth(config, 4)["text_config"]["num_hidden_layers"] == 4
    assert with_depth(config, 4)["vision_config"] == config["vision_config"]
    assert config["text_config"]["num_hidden_layers"] == 32
    assert not find_extrapolation_obstacle(config)


def test_lists_with_an_entry_per_layer_are_cut() -> None:
    config = ALIKE | {"layer_types": ["full_attention"] * 32, "eos_token_id": [1, 2]}

    assert not find_extrapolation_obstacle(config)
    assert with_depth(config, 3)["layer_types"] == ["full_attention"] * 3
    assert with_depth(config, 40)["layer_types"] == ["full_attention"] * 40
    assert with_depth(config, 3)["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    "setting",
    [
        {"layer_types": ["sliding_attention", "full_attention"] * 16},
        {"no_rope_layers": [1, 1, 1, 0] * 8},
        {"first_k_dense_replace": 1},
        {"mlp_only_layers": [0, 1]},
        {"decoder_sparse_step": 2},
        {"moe_layer_freq": [0] + [1] * 31},
        {"sliding_window_pattern": 6},
        {"attention_chunk_size": 8192},
        {"use_sliding_window": True, "max_window_layers": 20},
        {"attention_types": [[["global", "local"], 16]]},
        {"is_encoder_decoder": True},
        {"num_decoder_layers": 32},
        {"num_hidden_layers": 5},
        {"num_hidden_layers": None},
        {"layerdrop": 0.1},
    ],
    ids=str,
)
def test_settings_that_make_layers_differ_are_refused(setting: dict[str, Any]) -> None:
    assert find_extrapolation_obstacle(ALIKE | setting)


@pytest.mark.parametrize(
    "setting",
    [
        {"first_k_dense_replace": 0},
        {"mlp_only_layers": []},
        {"decoder_sparse_step": 1},
        {"sliding_window": 4096},
        {"use_sliding_window": False, "max_window_layers": 20},
        {"use_sliding_window": True, "max_window_layers": 32},
        {"eos_token_id": list(range(32))},
        {"layerdrop": 0.0},
        {"attention_chunk_size": None},
    ],
    ids=str,
)
def test_settings_that_leave_layers_alike_are_not(setting: dict[str, Any]) -> None:
    assert find_extrapolation_obstacle(ALIKE | setting) == ""
