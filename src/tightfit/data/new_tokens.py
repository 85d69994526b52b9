"""Add tokens to a tokenizer's files; how the old tokenizer splits them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.core.files import atomic_folder, cache_folder, write_atomic
from tightfit.core.new_tokens import NEW_TOKENS, NewTokens, check_new_tokens, count_rows
from tightfit.core.text import printable
from tightfit.data.profile import find_tokenizer
from tightfit.data.tokenizer import (
    TOKENIZER_FILE,
    build_tokenizer,
    digest_files,
    encode_batch,
    list_tokenizer_files,
    read_model_json,
    read_tokenizer_file,
)
from tightfit.models.spec import ModelSpec

_CONFIG_FILE = "tokenizer_config.json"
_ADDED_FILE = "added_tokens.json"
"""Of tokenizers saved before `added_tokens_decoder`; converters of other tools read it."""


def count_tokens(path: Path) -> int:
    """One more than the highest number in a tokenizer.json."""
    return _count_tokens(read_tokenizer_file(path))


def _count_tokens(document: dict[str, Any]) -> int:
    vocab = document["model"]["vocab"]
    numbers = vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
    added = [token["id"] for token in document["added_tokens"]]
    return max((*numbers, *added), default=-1) + 1


def grow_spec(spec: ModelSpec, model: str | Path, new: NewTokens) -> ModelSpec:
    """The model with rows for the new tokens. `model`: a folder or name whose tokenizer is looked
    up; without one, the model has no rows to spare."""
    check_new_tokens(new)
    if not new.names:
        return spec
    path = find_tokenizer(str(model))
    num_tokens = spec.vocab_size if path is None else count_tokens(path)
    num_rows = count_rows(spec.vocab_size, num_tokens + len(new.names))
    return spec.model_copy(update={"vocab_size": num_rows}) if num_rows > spec.vocab_size else spec


def split_new_tokens(folder: Path, new: NewTokens) -> list[list[int]]:
    """What the tokenizer of a folder makes of each new token, in the order of their numbers."""
    path = folder / TOKENIZER_FILE
    tokenizer = build_tokenizer(read_tokenizer_file(path), path)
    return [list(found.ids) for found in encode_batch(tokenizer, new.names, path)]


def number_new_tokens(folder: Path, new: NewTokens, *, num_rows: int) -> range:
    """Their numbers, behind those of the tokenizer of a folder; without one, behind all rows."""
    path = folder / TOKENIZER_FILE
    first = count_tokens(path) if path.is_file() else num_rows
    return range(first, first + len(new.names))


def with_new_tokens(folder: Path, new: NewTokens) -> Path:
    """A folder of tokenizer files with the new tokens, made once; the same one without any."""
    check_new_tokens(new)
    if not new.names:
        return folder
    digest = digest_files(folder, *new.plain, "\n", *new.special)
    home = cache_folder() / "models" / f"new-tokens-{digest}"
    if not (home / TOKENIZER_FILE).is_file():
        with atomic_folder(home, is_shared=True) as work:
            for path in list_tokenizer_files(folder):
                target = work / path.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
            write_new_tokens(work, new)
    return home


def write_new_tokens(folder: Path, new: NewTokens) -> None:
    """Add tokens to the tokenizer files of a folder, in place."""
    if not new.names:
        return
    path = folder / TOKENIZER_FILE
    checked = read_tokenizer_file(path)
    # As it is on disk: what loading adds to it is not written back.
    document = read_model_json(path)
    _refuse_known(checked, new, path)
    entries = list(_list_entries(new, _count_tokens(checked)))
    document["added_tokens"] = [*(document.get("added_tokens") or []), *entries]
    made = build_tokenizer(document, path)
    wrong = next((e for e in entries if made.token_to_id(e["content"]) != e["id"]), None)
    if wrong is not None:
        raise InvalidInputError(
            f"{path} leaves numbers out, so that `{printable(wrong['content'])}` cannot be "
            f"number {wrong['id']:,}.",
            remedy="save it anew: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    write_atomic(path, json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    for name in (_CONFIG_FILE, _ADDED_FILE):
        other = folder / name
        if not other.is_file():
            continue
        settings = read_model_json(other)
        if name == _ADDED_FILE:
            settings |= {entry["content"]: entry["id"] for entry in entries}
        elif isinstance(settings.get("added_tokens_decoder"), dict):
            settings["added_tokens_decoder"] |= {
                str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
                for entry in entries
            }
        write_atomic(other, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")


def _list_entries(new: NewTokens, first: int) -> Iterator[dict[str, Any]]:
    """As tokenizer.json lists them. Not normalized: a token is found as it is written."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, name in enumerate(new.names, start=first):
        is_special = number - first >= len(new.plain)
        yield {"id": number, "content": name, **flags, "special": is_special}


def _refuse_known(document: dict[str, Any], new: NewTokens, path: Path) -> None:
    """Raise for a token that the tokenizer has already."""
    tokenizer = build_tokenizer(document, path)
    for setting, names in zip(NEW_TOKENS, new, strict=True):
        for number, name in enumerate(names, start=1):
            known = tokenizer.token_to_id(name)
            if known is not None:
                raise InvalidInputError(
                    f"`{setting}` entry {number}, `{printable(name, most=60)}`, is a token of this "
                    f"tokenizer already: number {known:,}.",
                    remedy="leave it out: it is trained like any other token",
                )
