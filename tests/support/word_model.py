"""A tiny Llama-like model whose tokenizer knows single words; made without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

ROWS = [
    {"instruction": f"add {i} and 1", "input": "", "output": f"that is {i + 1}"} for i in range(40)
]


def plant_model(folder: Path) -> None:
    """A Llama-like model of a few thousand values, with a tokenizer of single words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    words = sorted({w for row in ROWS for text in row.values() for w in text.split()})
    known = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "<pad>", "\n", *words])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": len(known), "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "torch_dtype": "float32", "tie_word_embeddings": True,
        "eos_token_id": 2, "pad_token_id": 3, "bos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    head = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    weights = struct.pack("<Q", len(head)) + head + bytes(8)
    (folder / "model.safetensors").write_bytes(weights)
