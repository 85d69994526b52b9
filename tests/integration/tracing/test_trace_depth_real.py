"""Deep models whose recording is made from shallow ones, beside the trace of every layer."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from tightfit.trace.depth import (
    DepthExtrapolation,
    fill_defaults,
    find_extrapolation_obstacle,
    plan_depths,
    sort_ends,
    with_depth,
)
from tightfit.trace.recording import Recording
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job

DEPTH = 7
MIXED = {
    *("cohere2", "gemma2", "gemma3_text", "gemma4", "gpt_oss", "olmo3", "exaone4", "smollm3", "t5"),
    *("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "llama4"),
    *("granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
}
"""Families of the catalogue whose layers differ: windows, dense layers first, or no attention."""
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 120}
_LLAMA = _SIZES | {
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_hidden_layers": DEPTH,
}
_GPT = {"n_embd": 32, "n_head": 4, "n_layer": DEPTH, "vocab_size": 120, "n_positions": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA | {"tie_word_embeddings": True, "use_sliding_window": False},
    "falcon": _SIZES | {"num_hidden_layers": DEPTH, "new_decoder_architecture": True},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": DEPTH, "vocab_size": 120},
    "gpt2": _GPT,
}
CASES = [
    ("llama", {"method": "full", "checkpointing": False}),
    ("llama", {"weights": "nf4"}),
    ("qwen2", {"method": "full", "optimizer": "adamw-foreach", "grad_accum": 2}),
    ("falcon", {"method": "full", "attention": "eager"}),
    ("bloom", {"attention": "eager", "checkpointing": False}),
    ("gpt2", {"method": "full", "optimizer": "adafactor", "checkpointing": False}),
    ("gpt2", {"optimizer": "adamw-8bit"}),
]


def _trace(family: str, strategy: dict[str, Any], kinds: tuple[int, ...]) -> Recording:
    config = {"model_type": family, **CONFIGS[family]}
    chosen = {"micro_batch": 2, "seq_len": 32} | strategy
    if len(kinds) > 1:
        chosen["recomputed_layers"] = kinds[0]
    job = TraceJob.model_validate(
        {"config": config, "strategy": chosen, "compute_capability": (9, 0), "stages": ()}
    )
    return record_job(job.model_copy(update={"config": with_depth(config, sum(kinds))}))


def _extend(family: str, strategy: dict[str, Any], kinds: tuple[int, ...]) -> Recording:
    plan = plan_depths(kinds)
    base = _trace(family, strategy, plan.base)
    grown = [_trace(family, strategy, deeper) for deeper in plan.grown]
    return DepthExtrapolation(plan, base, grown).extend(plan.num_more)


@pytest.mark.parametrize(("family", "strategy"), CASES, ids=str)
def test_every_event_is_that_of_the_full_trace(family: str, strategy: dict[str, Any]) -> None:
    assert not find_extrapolation_obstacle(CONFIGS[family])
    whole = _trace(family, strategy, (DEPTH,))

    assert _extend(family, strategy, (DEPTH,)) == whole


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach"])
def test_layers_of_which_some_are_recomputed(optimizer: str) -> None:
    strategy = {"method": "full", "optimizer": optimizer}

    assert _extend("llama", strategy, (7, 6)) == _trace("llama", strategy, (7, 6))


def test_casts_that_a_hash_table_frees_differ_in_order_alone() -> None:
    strategy = {"method": "full", "weights": "fp32"}
    whole = _trace("llama", strategy, (DEPTH,))

    assert sort_ends(_extend("llama", strategy, (DEPTH,))) == sort_ends(whole)


def test_the_catalogue_is_told_apart_by_family() -> None:
    folder = files("tightfit.catalogue").joinpath("models")
    configs = [
        json.loads(path.read_text("utf-8"))
        for path in folder.iterdir()
        if path.name.endswith(".json")
    ]
    obstacles = {
        (config["model_type"], bool(find_extrapolation_obstacle(fill_defaults(config))))
        for config in configs
    }

    assert len(configs) > 90
    assert {name for name, is_refused in obstacles if is_refused} == MIXED
    assert {name for name, is_refused in obstacles if not is_refused}.isdisjoint(MIXED)


def test_families_whose_class_mixes_layers_are_refused() -> None:
    """Config.json need not say so: the class fills the kinds of layers in."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    mixed = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            text = CONFIG_MAPPING[model_type]().get_text_config()
        except Exception:  # some cannot be built without their parts
            continue
        kinds = getattr(text, "layer_types", None) or getattr(text, "mlp_layer_types", None) or ()
        if len(set(kinds)) > 1:
            mixed.append((model_type, text.model_type))

    assert len(mixed) > 20
    missed = [
        name
        for name in sorted({name for pair in mixed for name in pair})
        if not find_extrapolation_obstacle(fill_defaults({"model_type": name}))
    ]
    assert missed == []
