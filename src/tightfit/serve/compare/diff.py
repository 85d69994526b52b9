"""Where two answers differ, word by word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

MOST_WORDS = 3_000
"""On one side. Longer answers are held together line by line: the search is quadratic."""
_WORDS = re.compile(r"\s*(?:\w+|[^\w\s])")
_LINES = re.compile(r"\s*\S[^\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of one answer."""

    text: str
    is_shared: bool
    """Stands in the other answer too, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Both answers in pieces, which put together are the answers again."""

    left: tuple[Piece, ...]
    right: tuple[Piece, ...]
    shared_fraction: float
    """Of the words of both; 1 where they say the same, whatever the spaces between."""


def find_difference(left: str, right: str) -> Difference:
    """Words and marks are compared; the space before them is not, so a new line alone is none."""
    pattern = _WORDS
    if max(len(_split(text, _WORDS)) for text in (left, right)) > MOST_WORDS:
        pattern = _LINES
    words = _split(left, pattern), _split(right, pattern)
    keys = tuple([word.strip() for word in side] for side in words)
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    is_shared = [False] * len(words[0]), [False] * len(words[1])
    for block in matcher.get_matching_blocks():
        is_shared[0][block.a : block.a + block.size] = [True] * block.size
        is_shared[1][block.b : block.b + block.size] = [True] * block.size
    return Difference(
        left=_join(words[0], is_shared[0]),
        right=_join(words[1], is_shared[1]),
        shared_fraction=matcher.ratio(),
    )


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Each with the space before it, the last with the space behind it too."""
    words = pattern.findall(text) or [""]
    words[-1] += text[sum(map(len, words)) :]
    return [word for word in words if word]


def _join(words: Sequence[str], is_shared: Sequence[bool]) -> tuple[Piece, ...]:
    """Neighbours of one kind as one piece."""
    pieces: list[Piece] = []
    for word, shared in zip(words, is_shared, strict=True):
        if pieces and pieces[-1].is_shared == shared:
            pieces[-1] = Piece(text=pieces[-1].text + word, is_shared=shared)
        else:
            pieces.append(Piece(text=word, is_shared=shared))
    return tuple(pieces)
