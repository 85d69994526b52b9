"""Tiny models of several families, as folders, made where they are needed."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

_SMALL: dict[str, Any] = {
    "hidden_size": 64,  # bitsandbytes packs blocks of 64, and needs whole ones on a CPU
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # weights large enough for attention to matter
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"model_type": "llama"},
    "llama-tied": _SMALL | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral-window": _SMALL | {"model_type": "mistral", "sliding_window": 4},
    "qwen2": _SMALL | {"model_type": "qwen2"},
    "qwen2-window": _SMALL
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": _SMALL | {"model_type": "qwen3"},
    "gemma": _SMALL | {"model_type": "gemma"},
    "gemma2": _SMALL | _ALTERNATING | {"model_type": "gemma2", "query_pre_attn_scalar": 16},
    "gemma3": _SMALL | _ALTERNATING | {"model_type": "gemma3_text", "query_pre_attn_scalar": 16},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 64,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
}


def make_config(family: str, **changes: Any) -> Any:
    fields = dict(FAMILIES[family]) | changes
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def make_model(family: str, *, attention: str = "sdpa", **changes: Any) -> Any:
    config = make_config(family, **changes)
    # With a cache, transformers takes restarted positions for one document.
    config.use_cache = False
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    return auto.from_config(config, dtype=torch.float32, attn_implementation=attention)


def write_tokenizer(folder: Path) -> None:
    """One token per printable ASCII character."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    words |= {chr(97 + index): 3 + index for index in range(26)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path, family: str = "llama", *, shard_size: str = "1GB") -> Path:
    """A whole model folder: config, weights, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    attention = "eager" if family == "gemma2" else "sdpa"  # sdpa cannot cap logits
    make_model(family, attention=attention).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return folder


@cache
def _home() -> Path:
    home = Path(tempfile.mkdtemp(prefix="tightfit-models-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@cache
def model_folder(family: str) -> Path:
    """The folder of a tiny model of this family, written once. Read it; copy it to change it."""
    return write_model(_home() / family, family)
