"""Tiny models that can read SQL, as folders, and rows to score them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIALS = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _write_tokenizer(folder: Path) -> None:
    """Byte-level, so that any text can be read."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["SELECT name FROM pets WHERE age > 3"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_tiny(folder: Path, auto: Any, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model(vocab_size=320, pad_token_id=0, eos_token_id=3, **fields)
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def write_llama(folder: Path) -> Path:
    return _write_tiny(
        folder,
        AutoModelForCausalLM,
        model_type="llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
    )


def write_t5(folder: Path) -> Path:
    return _write_tiny(
        folder,
        AutoModelForSeq2SeqLM,
        model_type="t5",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )


def write_sql_rows(folder: Path) -> Path:
    """Four questions; the third's gold query cannot be run."""
    context = "CREATE TABLE pets (name TEXT, age INTEGER)"
    answers = [
        "SELECT name FROM pets",
        "SELECT COUNT(*) FROM pets WHERE age > 3",
        "SELECT oops FROM pets",
        "SELECT MAX(age) FROM pets",
    ]
    rows = [
        {"question": f"Question {number}?", "context": context, "answer": answer}
        for number, answer in enumerate(answers)
    ]
    path = folder / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
