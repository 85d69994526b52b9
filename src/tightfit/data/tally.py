"""Counting rows in batches, all of them or an even sample, in bounded memory."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tightfit.data.formats import Turns
from tightfit.data.tokens import (
    TOKENS_PER_MESSAGE,
    TOKENS_PER_ROW,
    TRAINED_END_TOKENS,
    TokenCounter,
)

_BATCH_ROWS = 512
_BATCH_CHARS = 4_000_000
_SEED = 20_240_917  # fixed: the same file gives the same profile


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over counted rows, cut to `seq_len`; memory grows with distinct lengths only."""

    seq_len: int
    rows_by_length: Counter[int] = field(default_factory=Counter)
    num_rows: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_truncated: int = 0
    num_lost_tokens: int = 0

    def add(self, length: int, num_trained: int, copies: int = 1) -> None:
        """One row. Truncation keeps its head, so the answer at its end is lost first."""
        lost = max(length - self.seq_len, 0)
        self.rows_by_length[length - lost] += copies
        self.num_rows += copies
        self.num_tokens += (length - lost) * copies
        self.num_trained_tokens += max(num_trained - lost, 0) * copies
        self.num_truncated += copies if lost > 0 else 0
        self.num_lost_tokens += lost * copies


class _Sampled(NamedTuple):
    mark: float
    """Drawn at random; a row stays while its mark is under the threshold."""
    length: int
    num_trained: int
    copies: int


class Tally:
    """Counts the tokens of rows; beyond `limit` rows it thins out what it keeps by halves.

    Every row is equally likely to be kept, wherever it stands in the file, and
    the longest row by characters is counted for `longest` even if not kept.
    """

    def __init__(self, *, counter: TokenCounter, seq_len: int, limit: int | None) -> None:
        self.counter = counter
        self.totals = Totals(seq_len=seq_len)
        self.num_rows = 0
        self.longest = 0
        self._limit = limit
        self._threshold = 1.0
        self._sample: list[_Sampled] = []
        self._pending: list[tuple[float, int, Turns]] = []
        self._pending_chars = 0
        self._longest_chars = 0
        self._longest_turns: Turns | None = None
        self._random = random.Random(_SEED)

    def add(self, turns: Turns, copies: int = 1) -> None:
        """One row, seen `copies` times in an epoch."""
        self.num_rows += copies
        num_chars = len(turns.prompt) + len(turns.answer)
        mark = 0.0 if self._limit is None else self._random.random()
        if mark >= self._threshold:
            if num_chars > self._longest_chars:
                self._longest_chars, self._longest_turns = num_chars, turns
            return
        self._pending.append((mark, copies, turns))
        self._pending_chars += num_chars
        if len(self._pending) >= _BATCH_ROWS or self._pending_chars > _BATCH_CHARS:
            self._count_pending()

    def finish(self) -> None:
        """Count what is left and close the sums."""
        self._count_pending()
        if self._longest_turns is not None:
            [(length, _)] = self._count([self._longest_turns])
            self.longest = max(self.longest, length)
        for item in self._sample:
            self.totals.add(item.length, item.num_trained, item.copies)
        self._sample.clear()

    def _count_pending(self) -> None:
        counts = self._count([turns for _, _, turns in self._pending])
        for (mark, copies, _), (length, num_trained) in zip(self._pending, counts, strict=True):
            self.longest = max(self.longest, length)
            if self._limit is None:
                self.totals.add(length, num_trained, copies)
            else:
                self._sample.append(_Sampled(mark, length, num_trained, copies))
        self._pending.clear()
        self._pending_chars = 0
        while self._limit is not None and len(self._sample) > self._limit:
            self._threshold /= 2
            self._sample = [item for item in self._sample if item.mark < self._threshold]

    def _count(self, batch: list[Turns]) -> list[tuple[int, int]]:
        prompts = self.counter.count([turns.prompt for turns in batch])
        answers = self.counter.count([turns.answer for turns in batch])
        return [
            (
                prompt + answer + TOKENS_PER_ROW + TOKENS_PER_MESSAGE * turns.num_messages,
                answer + TRAINED_END_TOKENS if answer else 0,
            )
            for turns, prompt, answer in zip(batch, prompts, answers, strict=True)
        ]
