"""Files of tokenizers without a tokenizer.json, checked before a library converts them.

The libraries read them whole, and cut every token in two at each place.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from pathlib import Path

from tightfit.core.errors import InvalidInputError
from tightfit.core.reading import open_regular
from tightfit.data.tokenizer import (
    charsmap_texts,
    is_token_id,
    read_model_file,
    read_model_json,
)

SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files of which each is a tokenizer's vocabulary."""
_BINARY = SLOW_TOKENIZERS[:2]
_LISTS = ("vocab.txt", "merges.txt")
_NUMBERED = ("vocab.json", "added_tokens.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
_MAX_TOKEN_BYTES = 2000
"""Published ones have up to some hundred."""
_MAX_BYTES = 20_000_000
"""Of all tokens of one file. Gemma's 262,144 have 2 million."""
_PIECE_BYTES = 50
"""Score and kind of a SentencePiece piece, and more."""


def check_slow_tokenizer(folder: Path) -> None:
    """Raise for a file that is no regular one, too large, or whose tokens are too long."""
    for name in _SETTINGS:
        read_model_json(folder / name)
    for name in _NUMBERED:
        vocab = read_model_json(folder / name)
        if not all(map(is_token_id, vocab.values())):
            raise _broken(folder / name, "a token's number is none, or out of range")
        _check_lengths(folder / name, (len(token) for token in vocab))
    for name in _LISTS:
        data = read_model_file(folder / name)
        _check_lengths(folder / name, map(len, (data or b"").split(b"\n")))
    for name in _BINARY:
        check_tokenizer_model(folder / name)


def check_tokenizer_model(path: Path) -> None:
    """The same for a file of SentencePiece or tiktoken; one that is not there passes."""
    data = read_model_file(path)
    if data is None:
        return
    if is_tiktoken(path):
        _check_lengths(path, map(len, data.splitlines()))
        return
    try:
        parts = list(_fields(data))
        _check_lengths(path, (len(part) - _PIECE_BYTES for field, part in parts if field == 1))
        # Source: sentencepiece_model.proto. 3 and 5: how texts are normalized, 2 of it: a table.
        for field, part in parts:
            tables = _fields(part) if field in (3, 5) else ()
            for inner, table in tables:
                if inner == 2 and table and charsmap_texts(base64.b64encode(table)) is None:
                    raise _broken(path, "its `precompiled_charsmap` is broken")
    except (IndexError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise _broken(path, "it is neither SentencePiece's nor tiktoken's format") from error


def is_tiktoken(path: Path) -> bool:
    """tiktoken's files are lines of base64 and a rank; SentencePiece's are binary."""
    with open_regular(path) as stream:
        words = stream.readline(2 * _MAX_TOKEN_BYTES).split()
    if len(words) != 2 or not words[1].isdigit():
        return False
    try:
        return bool(base64.b64decode(words[0], validate=True))
    except binascii.Error:
        return False


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of a protobuf message's fields that have a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 2:
            size, at = _varint(message, at)
            if at + size > len(message):
                raise ValueError("a field is cut short")
            yield key >> 3, message[at : at + size]
            at += size
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("a field is of an unknown kind")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number has more than 64 bits")


def _check_lengths(path: Path, lengths: Iterable[int]) -> None:
    total = 0
    for length in lengths:
        total += max(length, 0)
        if length > _MAX_TOKEN_BYTES:
            raise _broken(path, f"a token has more than {_MAX_TOKEN_BYTES:,} bytes")
        if total > _MAX_BYTES:
            raise _broken(path, f"its tokens have more than {_MAX_BYTES:,} bytes")


def _broken(path: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is not a tokenizer that can be used: {why}.",
        remedy="copy or download the file again, or put a tokenizer.json there",
    )
