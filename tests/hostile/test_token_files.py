"""Tokenizer files as a hostile model has them, where tokens are added; and the user's own list."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tightfit.core.errors import UserError
from tightfit.core.new_tokens import NewTokens, read_token_files
from tightfit.data.new_tokens import with_new_tokens, write_new_tokens
from tightfit.data.tokenizer import TOKENIZER_FILE

NEW = NewTokens(plain=("zzz9",))
HOSTILE: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_text("[" * 100_000),
    "list": lambda path: path.write_text("[1]"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "decoder": lambda path: path.write_text('{"added_tokens_decoder": [1]}'),
    "large": lambda path: path.write_bytes(b" " * (65 * 2**20)),
}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_one_error(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(folder / TOKENIZER_FILE))
    HOSTILE[kind](folder / name)
    for add in (with_new_tokens, write_new_tokens):
        try:
            add(folder, NEW)
        except UserError:
            continue
        assert isinstance(json.loads((folder / name).read_text()), dict)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder", "large", "not UTF-8", "nul"])
def test_a_list_of_tokens_that_is_no_text_is_one_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in HOSTILE:
        HOSTILE[kind](path)
    named = {"/dev/zero": kind, "nul": "a\0b"}.get(kind, str(path))
    with pytest.raises(UserError):
        read_token_files([f"@{named}"])
