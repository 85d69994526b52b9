"""Our counts, module names and shapes against transformers itself, on the meta device.

Run with: pip install -e '.[train,dev]' && pytest tests/integration/test_model_counts_oracle.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D

from tightfit.models.catalogue import list_models
from tightfit.models.config import read_config
from tightfit.models.families.registry import FAMILIES
from tightfit.models.gguf import read_gguf_model
from tightfit.models.spec import ModelSpec
from tiny_configs import TINY, VISION, tiny_config

_WITHOUT_A_CLASS = {"baichuan", "chatglm", "qwen", "RefinedWeb", "RefinedWebModel"}
"""Families whose code lives on the hub only, and old names of one that moved."""

_CATALOGUED = """
    meta-llama/Llama-2-70b-hf meta-llama/Llama-3.1-405B meta-llama/Llama-3.2-3B
    HuggingFaceTB/SmolLM2-135M mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-Instruct-v0.3
    mistralai/Mistral-Nemo-Base-2407 mistralai/Mixtral-8x7B-v0.1 tiiuae/falcon-rw-1b
    tiiuae/falcon-7b tiiuae/falcon-40b bigscience/bloom-7b1 Salesforce/codegen2-1B
    openai-community/gpt2-xl google-t5/t5-3b google-t5/t5-11b Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-72B
    Qwen/Qwen3-0.6B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B Qwen/Qwen3-235B-A22B google/gemma-7b
    google/gemma-2-27b google/gemma-3-4b-it microsoft/phi-2 microsoft/phi-4
    microsoft/Phi-4-mini-instruct EleutherAI/pythia-1b EleutherAI/gpt-neox-20b openai/gpt-oss-20b
""".split()  # noqa: SIM905 - a list of names reads better than a column of quotes

_SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_GPT = {
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 6,
    "vocab_size": 300,
    "n_positions": 64,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_T5 = {
    "d_model": 48,
    "d_kv": 20,
    "d_ff": 80,
    "num_layers": 2,
    "num_heads": 3,
    "vocab_size": 300,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_WRITTEN: dict[str, dict[str, Any]] = {
    "llama biases": _SMALL
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "granite": _SMALL | {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "granitemoe": _SMALL | _EXPERTS | {"model_type": "granitemoe", "tie_word_embeddings": True},
    "smollm3": _SMALL | {"model_type": "smollm3"},
    "mixtral silent": _SMALL | _EXPERTS | {"model_type": "mixtral", "sliding_window": 32},
    "qwen3_moe mixed": _SMALL
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [0],
        "head_dim": 24,
        "attention_bias": True,
    },
    "gemma": _SMALL | {"model_type": "gemma", "head_dim": 24},
    "gemma2 biases": _SMALL | {"model_type": "gemma2", "head_dim": 24, "attention_bias": True},
    "stablelm": _SMALL | {"model_type": "stablelm", "use_qkv_bias": True},
    "stablelm parallel": _SMALL
    | {"model_type": "stablelm", "use_parallel_residual": True, "qk_layernorm": True},
    "phi head norms": _SMALL | {"model_type": "phi", "qk_layernorm": True},
    "gpt_neox": _SMALL
    | {"model_type": "gpt_neox", "num_key_value_heads": None, "attention_bias": False},
    "gpt_bigcode one": _SMALL_GPT | {"model_type": "gpt_bigcode"},
    "gpt_bigcode all": _SMALL_GPT | {"model_type": "gpt_bigcode", "multi_query": False},
    "gpt2 inner": _SMALL_GPT | {"model_type": "gpt2", "n_inner": 200, "tie_word_embeddings": False},
    "gptj": _SMALL_GPT | {"model_type": "gptj"},
    "codegen": _SMALL_GPT | {"model_type": "codegen"},
    "opt": _SMALL | {"model_type": "opt", "ffn_dim": 160, "num_key_value_heads": None},
    "opt narrow": _SMALL
    | {
        "model_type": "opt",
        "ffn_dim": 160,
        "num_key_value_heads": None,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
        "enable_bias": False,
    },
    "mpt": {
        "model_type": "mpt",
        "d_model": 96,
        "n_heads": 8,
        "n_layers": 3,
        "vocab_size": 300,
        "expansion_ratio": 3,
    },
    "falcon grouped one norm": {
        "model_type": "falcon",
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "vocab_size": 300,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    "deepseek_v2 without a latent query": tiny_config("deepseek_v2") | {"q_lora_rank": None},
    "gemma4 with experts": tiny_config("gemma4_text")
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "granitemoehybrid without experts": tiny_config("granitemoehybrid")
    | {"num_local_experts": 0, "attention_bias": True, "mamba_proj_bias": True},
    "falcon_h1 with biases": tiny_config("falcon_h1")
    | {
        "mamba_d_ssm": None,
        "mamba_rms_norm": True,
        "projectors_bias": True,
        "mamba_conv_bias": False,
        "mlp_bias": True,
    },
    "nemotron_h with a latent": tiny_config("nemotron_h")
    | {"moe_latent_size": 20, "mlp_bias": True, "use_bias": True},
    "lfm2 with a stated width": tiny_config("lfm2")
    | {"block_ff_dim": 100, "block_ffn_dim_multiplier": 1.3, "conv_bias": True},
    "mamba with biases": tiny_config("mamba") | {"use_bias": True, "use_conv_bias": False},
    "mamba2 with biases": tiny_config("mamba2") | {"use_bias": True, "use_conv_bias": False},
    "llama4 with experts everywhere": tiny_config("llama4_text") | {"interleave_moe_layer_step": 1},
    "ernie4_5_moe without shared experts": tiny_config("ernie4_5_moe")
    | {"moe_num_shared_experts": 0, "use_bias": True, "moe_layer_start_index": 0},
    "ernie4_5 with biases": tiny_config("ernie4_5") | {"use_bias": True},
    "cohere without head norms": tiny_config("cohere") | {"use_qk_norm": False},
    "qwen2_moe every other layer": tiny_config("qwen2_moe") | {"decoder_sparse_step": 2},
    "t5 gated": _SMALL_T5
    | {"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
    "mt5": _SMALL_T5 | {"model_type": "mt5", "feed_forward_proj": "gated-gelu"},
}


def catalogue_config(name: str) -> dict[str, Any]:
    row = next(row for row in list_models() if row.model == name)
    folder = files("tightfit.catalogue").joinpath("models")
    config: dict[str, Any] = json.loads(folder.joinpath(row.file).read_bytes())
    return config


CASES = (
    {name: catalogue_config(name) for name in _CATALOGUED}
    | _WRITTEN
    | {f"{name} tiny": tiny_config(name) for name in TINY}
)


_NULL_HAS_A_MEANING = {"q_lora_rank", "mamba_d_ssm"}


def build(config: dict[str, Any]) -> nn.Module:
    """The real model without memory behind it."""
    values = {
        key: value
        for key, value in config.items()
        if key not in {"model_type", "quantization_config", "auto_map"}
        and (value is not None or key in _NULL_HAS_A_MEANING)
    }
    real = AutoConfig.for_model(config["model_type"], **values)
    kind: Any = AutoModelForSeq2SeqLM if real.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = kind.from_config(real)
    return model


def real_linears(model: nn.Module) -> Counter[tuple[str, int, int, bool]]:
    """Name, in, out and bias of every linear inside the layers, with how often it occurs."""
    found: Counter[tuple[str, int, int, bool]] = Counter()
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or not re.search(r"\.\d+\.", path):
            continue
        shape = tuple(module.weight.shape)
        ins, outs = shape if isinstance(module, Conv1D) else shape[::-1]
        found[path.rsplit(".", 1)[-1], ins, outs, module.bias is not None] += 1
    return found


def our_linears(spec: ModelSpec) -> Counter[tuple[str, int, int, bool]]:
    found: Counter[tuple[str, int, int, bool]] = Counter()
    for block in spec.blocks:
        for part in block.linears:
            if part.is_module:
                key = (part.name, part.in_features, part.out_features, part.bias)
                found[key] += block.num_layers
    return found


def bare_parameters(model: nn.Module) -> int:
    """Elements of experts and routers in the layers that are not linear modules, but for the
    vectors that weigh experts beside them."""
    linear = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Linear, Conv1D))
        for parameter in module.parameters(recurse=False)
    }
    return sum(
        parameter.numel()
        for path, parameter in model.named_parameters()
        if re.search(r"\.\d+\.", path)
        and ("experts." in path or re.search(r"\.(gate|router)\.(weight|bias)", path))
        and id(parameter) not in linear
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_counts_names_and_shapes_equal_those_of_transformers(case: str) -> None:
    spec = read_config(CASES[case], name=case, source=case)
    model = build(CASES[case])

    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert our_linears(spec) == real_linears(model)
    kinds = getattr(model.config, "layer_types", None)
    if kinds and spec.sliding_window:
        narrow = ("sliding_attention", "chunked_attention")
        assert spec.num_sliding_layers == sum(kind in narrow for kind in kinds)
    if kinds:
        attends = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
        ours = sum(block.num_layers for block in spec.blocks if block.attends)
        assert ours == sum(kind in attends for kind in kinds)
    ours_bare = sum(
        block.num_layers * sum(part.num_params for part in block.linears if not part.is_module)
        for block in spec.blocks
    )
    assert ours_bare == bare_parameters(model)


@pytest.mark.parametrize("case", [*_WRITTEN, *(f"{name} tiny" for name in TINY)])
def test_a_config_that_transformers_saved_is_read_alike(case: str) -> None:
    """It has other names for some fields, and values that were left out."""
    auto: Any = AutoConfig
    spec = read_config(CASES[case], name=case, source=case)
    saved = json.loads(auto.for_model(**CASES[case]).to_json_string())

    again = read_config(saved, name=case, source=case)

    assert again.blocks == spec.blocks
    assert again.num_params == spec.num_params
    assert again.head_dim == spec.head_dim
    assert again.num_sliding_layers == spec.num_sliding_layers


OUTER = {name: f"{name}_text" for name in FAMILIES if f"{name}_text" in FAMILIES}
"""Types of configs that hold a vision part beside the text part."""


@pytest.mark.parametrize("name", OUTER)
def test_the_text_part_is_read(name: str) -> None:
    text = tiny_config(OUTER[name]) | {"tie_word_embeddings": False}
    expected = read_config(text, name="", source="")

    spec = read_config({"model_type": name, "text_config": text}, name="", source="")

    assert spec.blocks == expected.blocks
    assert spec.num_params == expected.num_params
    assert FAMILIES[name].read is FAMILIES[OUTER[name]].read


def test_every_family_that_transformers_has_is_covered() -> None:
    readable = {name for name, family in FAMILIES.items() if family.read}

    assert readable - _WITHOUT_A_CLASS - OUTER.keys() == TINY.keys()
    assert OUTER.keys() == VISION.keys()
    assert len(CASES) >= 50


_GGUF_CASES = {
    "llama biases": "llama",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
    "gpt2 inner": "gpt2",
    "gpt_neox": "gptneox",
    "gpt_bigcode one": "starcoder",
    "bloom": "bloom",
    "falcon grouped": "falcon",
    "falcon one": "falcon",
    "stablelm": "stablelm",
    "mpt": "mpt",
}
"""A case and what llama.cpp calls its architecture."""

_FALCON = _WRITTEN["falcon grouped one norm"]
_GGUF_CONFIGS = _WRITTEN | {
    "llama biases": _SMALL | {"model_type": "llama", "head_dim": 24},
    "granite": _SMALL | {"model_type": "granite"},
    "qwen2": _SMALL | {"model_type": "qwen2"},
    "qwen3": _SMALL | {"model_type": "qwen3", "head_dim": 24},
    "gemma2": _SMALL | {"model_type": "gemma2", "head_dim": 24},
    "gemma3": _SMALL | {"model_type": "gemma3_text", "head_dim": 24},
    "phi": _SMALL | {"model_type": "phi", "num_key_value_heads": 6},
    "phi3": _SMALL | {"model_type": "phi3"},
    "gpt_neox": _SMALL | {"model_type": "gpt_neox", "num_key_value_heads": None},
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 96,
        "n_layer": 3,
        "n_head": 6,
        "vocab_size": 300,
    },
    "falcon grouped": _FALCON | {"num_ln_in_parallel_attn": 2},
    "falcon one": _FALCON | {"new_decoder_architecture": False, "bias": False},
}


def write_as_gguf(path: Path, model: nn.Module, spec: ModelSpec, architecture: str) -> None:
    """The model's tensors under llama.cpp's names, as its own name map gives them."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, spec.num_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(spec.num_layers)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_context_length(64)
    for path_of, parameter in model.named_parameters():
        spellings = (path_of, path_of.removeprefix("transformer."))
        found = [names.get_name(key, try_suffixes=(".weight", ".bias")) for key in spellings]
        name = found[0] or found[1]
        assert name is not None, path_of
        writer.add_tensor(name, np.zeros(tuple(parameter.shape), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", _GGUF_CASES)
def test_a_gguf_of_a_real_model_gives_the_same_spec(case: str, tmp_path: Path) -> None:
    config = _GGUF_CONFIGS[case]
    wanted = read_config(config, name=case, source=case)
    path = tmp_path / "model.gguf"
    write_as_gguf(path, build(config), wanted, _GGUF_CASES[case])

    spec = read_gguf_model(path)

    assert spec.num_params == wanted.num_params
    assert spec.blocks == wanted.blocks
    assert spec.tie_embeddings == wanted.tie_embeddings
    assert [warning for warning in spec.warnings if "tensors hold" in warning] == []
