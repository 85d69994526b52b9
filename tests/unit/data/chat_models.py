"""Small tokenizers in the shape of published ones, made on the spot for tests of encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

TEXTS = [
    "the quick brown fox jumps over the lazy dog and says hello to you and me",
    "What is the capital of France? Paris is the capital of France, a city on the Seine.",
    "SELECT name FROM singer WHERE age > 20 ORDER BY name; -- 12 34 567 user assistant system",
    "Grüße aus Köln, naïve café, 日本語のテキスト, привет, and some emoji 🙂🙃",
]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set turns = messages %}"
    "{% set system = false %}{% endif %}{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate!') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] +"
    " '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)
"""Its prompt ends without the line end that the answer then begins with."""
THINKING = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{%- set content = message.content %}"
    "{%- if not loop.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{%- elif loop.last and '</think>' not in content %}"
    "{%- set content = '<think>\n\n</think>\n\n' + content %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Drops the thinking of earlier turns, as Qwen3's does."""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

BYTE_LEVEL_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<pad>",
]


def byte_level(specials: list[str] | None = None) -> Any:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=BYTE_LEVEL_SPECIALS if specials is None else specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return tokenizer


def sentencepiece_like() -> Any:
    """BPE with bytes to fall back on and a blank put before each text, as Llama 2 has it."""
    tokenizer = tokenizers.Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in TEXTS], trainer)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    document = json.loads(tokenizer.to_str())
    kept = {"<unk>", "<s>", "</s>"}  # the bytes are ordinary tokens
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] in kept]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def unigram() -> Any:
    """Unigram pieces with a blank before the first word only, as newer SentencePiece models."""
    tokenizer = tokenizers.Tokenizer(Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = UnigramTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def save_model(folder: Path, tokenizer: Any, settings: dict[str, Any], **files: Any) -> Path:
    """A model folder with tokenizer files only; `files` are more JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


CHATML_NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
LLAMA_2_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA_3_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
GEMMA_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}


def make_model(folder: Path, kind: str) -> Path:
    """One of `KINDS`."""
    template, names = KINDS[kind]
    if kind == "llama-2":
        return save_model(folder, sentencepiece_like(), {**names, "chat_template": template})
    if kind == "zephyr":
        return save_model(folder, unigram(), {**names, "chat_template": template})
    tokenizer = byte_level()
    if kind in ("llama-3", "gemma"):
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(
                    single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 3)]
                ),
            ]
        )
    stops = [0, tokenizer.token_to_id("<end_of_turn>")] if kind == "gemma" else None
    files = {} if stops is None else {"generation_config": {"eos_token_id": stops}}
    return save_model(folder, tokenizer, {**names, "chat_template": template}, **files)


KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "chatml": (CHATML, CHATML_NAMES),
    "marked": (MARKED, CHATML_NAMES),
    "llama-2": (LLAMA_2, LLAMA_2_NAMES),
    "llama-3": (LLAMA_3, LLAMA_3_NAMES),
    "zephyr": (ZEPHYR, LLAMA_2_NAMES),
    "thinking": (THINKING, CHATML_NAMES),
    "gemma": (GEMMA, GEMMA_NAMES),
}
STOP_OF = {
    "chatml": "<|im_end|>",
    "marked": "<|im_end|>",
    "llama-2": "</s>",
    "llama-3": "<|eot_id|>",
    "zephyr": "</s>",
    "thinking": "<|im_end|>",
    "gemma": "<end_of_turn>",
}
