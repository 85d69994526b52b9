"""Files of a tokenizer without tokenizer.json: refused before a library reads them."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
from mutate import mutate_bytes

from hostile_trials import StartTrials
from tightfit.core.errors import InvalidInputError
from tightfit.data.slow_tokenizer import check_slow_tokenizer, check_tokenizer_model
from tightfit.runtime.model_files import with_tokenizer

LONG = b"a" * 1_000_000


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that has a length."""
    size, key = len(content), bytes([number << 3 | 2])
    while size > 0x7F:
        key += bytes([size & 0x7F | 0x80])
        size >>= 7
    return key + bytes([size]) + content


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**40)


def write(content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{f"huge {name}": (name, huge) for name in ("vocab.json", "merges.txt", "tokenizer.model")},
    **{f"pipe {name}": (name, os.mkfifo) for name in ("vocab.json", "merges.txt", "spiece.model")},
    "device": ("tokenizer.model", lambda path: path.symlink_to("/dev/zero")),
    "folder": ("merges.txt", lambda path: path.mkdir()),
    "deep": ("vocab.json", write('{"a":' * 100_000)),
    "list": ("vocab.json", write("[1]")),
    "huge number": ("vocab.json", write('{"a": 9223372036854775807}')),
    "number as text": ("added_tokens.json", write('{"a": "1"}')),
    "long token": ("vocab.json", write(json.dumps({LONG.decode(): 0}))),
    "long line": ("vocab.txt", write(LONG)),
    "long merge": ("merges.txt", write(b"a b\n" + LONG)),
    "many tokens": ("vocab.txt", write((b"a" * 1000 + b"\n") * 30_000)),
    "deep settings": ("tokenizer_config.json", write("[" * 100_000)),
    "long piece": ("tokenizer.model", write(field(1, field(1, LONG)))),
    "long rank": ("tokenizer.model", write(b"YQ== 0\n" + base64.b64encode(LONG) + b" 1\n")),
    "table": ("spiece.model", write(field(3, field(2, b"\xff\xff\xff\x7f")))),
    "cut short": ("spiece.model", write(field(1, b"a" * 50)[:20])),
    "endless number": ("spiece.model", write(b"\xff" * 100)),
    "text": ("spiece.model", write("no model at all")),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    name, make = HOSTILE[kind]
    make(tmp_path / name)
    with pytest.raises(InvalidInputError, match=name):
        check_slow_tokenizer(tmp_path)


def test_mutated_models_are_accepted_or_refused(trials: StartTrials, tmp_path: Path) -> None:
    """And one of SentencePiece's own is accepted; what is accepted the library takes or refuses."""
    text = tmp_path / "text.txt"
    text.write_text("some words of a text that is read more than once\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=40, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    good = (tmp_path / "m.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(good)
    check_tokenizer_model(path)

    def make(rng: random.Random) -> Callable[[], object]:
        path.write_bytes(mutate_bytes(rng, good))
        return partial(check_tokenizer_model, path)

    trials("SentencePiece", num_short=300).try_each(make)


def test_conversion_refuses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.model").write_bytes(field(1, field(1, LONG)))
    with pytest.raises(InvalidInputError, match="more than 2,000 bytes"):
        with_tokenizer(folder)
    assert not list((tmp_path / "cache").rglob("*.partial"))
