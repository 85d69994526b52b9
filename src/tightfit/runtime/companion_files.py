"""The files a model speaks with: tokenizer, chat template, where it stops."""

from __future__ import annotations

import shutil
from pathlib import Path

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files of a model that what is made from it needs."""
MORE_TEMPLATES = "additional_chat_templates"
"""A folder of named templates. Source: transformers `tokenization_utils_base.py`."""
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")


def copy_companions(source: Path, target: Path) -> list[Path]:
    """Copy what is there of them; returns the copies."""
    copies = []
    for name in COPIED:
        if (source / name).is_file():
            copies.append(_copy(source / name, target / name))
    for path in sorted((source / MORE_TEMPLATES).glob("*.jinja")):
        (target / MORE_TEMPLATES).mkdir(exist_ok=True)
        copies.append(_copy(path, target / MORE_TEMPLATES / path.name))
    return copies


def copy_tuned_companions(tuned: Path, base: Path, target: Path) -> list[Path]:
    """The tuned model's own files, and of the base's only what cannot contradict them."""
    copies = copy_companions(tuned, target)
    if tuned == base:
        return copies
    lacking = ["generation_config.json"]
    if _same(tuned / "tokenizer.json", base / "tokenizer.json"):
        lacking += _SENTENCEPIECE
    for name in lacking:
        if not (target / name).exists() and (base / name).is_file():
            copies.append(_copy(base / name, target / name))
    return copies


def _copy(source: Path, target: Path) -> Path:
    shutil.copyfile(source, target)
    return target


def _same(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False
