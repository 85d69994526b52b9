"""Profile a dataset: token counts of all rows or of an even sample, in bounded memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tightfit.core.data_profile import DataProfile
from tightfit.core.errors import InvalidInputError
from tightfit.core.strategy import MAX_SEQ_LEN
from tightfit.core.training import DataSource
from tightfit.data.formats import Turns, to_turns
from tightfit.data.packing import (
    buckets,
    count_packed_rows,
    estimate_padding_waste,
    percentiles,
    scaled,
)
from tightfit.data.sources import OpenedSource, data_files, open_source, read_source
from tightfit.data.streams import ReadMeter, ReadProgress, file_size
from tightfit.data.token_counts import (
    TOKENS_PER_MESSAGE,
    TOKENS_PER_ROW,
    TRAINED_END_TOKENS,
    TokenCounter,
    token_counter,
)
from tightfit.data.token_store import TokenStore, epoch_rows

# Counting rows in batches, all of them or an even sample, in bounded memory.

_BATCH_ROWS = 512
_BATCH_CHARS = 4_000_000
_SAMPLE_SEED = 20_240_917  # fixed: the same file gives the same profile


@dataclass(slots=True, kw_only=True)
class TokenTotals:
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


class TokenTally:
    """Counts the tokens of rows; beyond `limit` rows it thins out what it keeps by halves.

    Every row is equally likely to be kept, wherever it stands in the file, and
    the longest row by characters is counted for `longest` even if not kept.
    """

    def __init__(self, *, counter: TokenCounter, seq_len: int, limit: int | None) -> None:
        self.counter = counter
        self.totals = TokenTotals(seq_len=seq_len)
        self.num_rows = 0
        self.longest = 0
        self._limit = limit
        self._threshold = 1.0
        self._sample: list[_Sampled] = []
        self._pending: list[tuple[float, int, Turns]] = []
        self._pending_chars = 0
        self._longest_chars = 0
        self._longest_turns: Turns | None = None
        self._random = random.Random(_SAMPLE_SEED)

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


Sources = Path | str | Sequence[Path | str | DataSource]
"""Paths, or sources with weight and part; what a source holds back for evaluation is left out."""

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
EXACT_SAMPLE_ROWS = 50_000
"""A tokenizer counts about 10,000 rows a second and core; more rows change no percentile."""
_SEED = 20_241_105  # fixed: the same file gives the same profile


def profile_dataset(
    source: Sources,
    *,
    seq_len: int,
    model: str | None = None,
    sample_limit: int | None = None,
    watch: Callable[[ReadProgress], None] | None = None,
) -> DataProfile:
    """Lengths, truncation, padding and packing of a dataset at `seq_len`.

    Every row is read and checked. With a tokenizer at hand, tokens of at most
    `sample_limit` rows are counted (50,000 unless told), drawn evenly over the
    whole file, and the longest row by characters always; guesses cost so little
    that all rows are counted unless told. `watch` is called about five times a
    second and at the end with the rows and bytes read.
    """
    if not 0 < seq_len <= MAX_SEQ_LEN:
        raise InvalidInputError(
            f"A sequence length of {seq_len} makes no sense.",
            remedy=f"choose one from 1 to {MAX_SEQ_LEN:,}; 2048 is a common start",
        )
    counter = token_counter(model)
    limit = sample_limit or (EXACT_SAMPLE_ROWS if counter.is_exact else None)
    tally = TokenTally(counter=counter, seq_len=seq_len, limit=limit)
    formats: dict[str, None] = {}
    opened = _open(source)
    total = sum(file_size(path) for item in opened for path in item.files)
    meter = ReadMeter(watch, total_bytes=total)
    draw = random.Random(_SEED)
    for item in opened:
        for row, row_format in read_source(item, meter):
            formats.setdefault(row_format.name)
            # A weight of 2.5 shows a row twice, and every other row once more.
            copies = int(item.source.weight + draw.random())
            if copies or not tally.num_rows:
                tally.add(to_turns(row, row_format), copies=max(copies, 1))
            else:
                to_turns(row, row_format)  # every row is checked
            meter.add_row()
    tally.finish()
    meter.finish()
    return _summary(tally, ", ".join(item.name for item in opened), "+".join(formats))


def profile_from_store(store: TokenStore) -> DataProfile:
    """The same of rows already encoded: every number exact, weights of sources included.

    An encoder-decoder's rows count by their longer side, for each is cut to
    `seq_len` on its own.
    """
    import numpy as np

    about = store.description
    rows = epoch_rows(store, seed=0, epoch=0, shuffle=False)
    whole, num_trained = store.lengths[rows], store.num_trained[rows]
    sides = np.maximum(num_trained, whole - num_trained) if about.is_encoder_decoder else whole
    values, counts = np.unique(sides, return_counts=True)
    lengths = dict(zip(values.tolist(), counts.tolist(), strict=True))
    num_packed = count_packed_rows(lengths, about.seq_len)
    num_tokens = int(sides.sum())
    share = len(rows) / len(store)
    return DataProfile(
        source=", ".join(about.sources),
        format=about.format,
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_trained_tokens=max(int(num_trained.sum()), 1),
        mean_tokens=num_tokens / len(rows),
        max_tokens=int(values[-1]),
        percentiles=percentiles(lengths),
        histogram=buckets(lengths),
        num_truncated=round(about.num_truncated * share),
        seq_len=about.seq_len,
        tokenizer=f"encoded with {Path(about.tokenizer).name}, template {about.template}",
        is_exact=True,
        padding_waste_fraction={
            str(size): estimate_padding_waste(lengths.items(), size) for size in MICRO_BATCHES
        },
        packing_waste_fraction=1.0 - num_tokens / (num_packed * about.seq_len),
        num_packed_rows=num_packed,
        num_counted_rows=len(rows),
        longest_row_tokens=about.longest_row_tokens,
        num_lost_tokens=round(about.num_lost_tokens * share),
    )


def _open(source: Sources) -> list[OpenedSource]:
    items = [source] if isinstance(source, str | Path) else list(source)
    if not items:
        data_files([])  # says what is missing
    opened: list[OpenedSource] = []
    for item in items:
        if isinstance(item, DataSource):
            opened += [open_source(item)] if item.split == "train" else []
        elif not str(item).strip():
            data_files(item)
        else:
            bare = DataSource.model_construct(path=str(item), weight=1.0, split="train", take=None)
            opened.append(open_source(bare))
    if not opened:
        raise InvalidInputError(
            "All data is held back for evaluation.", remedy="name data with `split: train`"
        )
    return opened


def _summary(tally: TokenTally, source: str, row_format: str) -> DataProfile:
    totals = tally.totals
    factor = tally.num_rows / totals.num_rows
    if not totals.num_trained_tokens:
        raise _nothing_to_train(source, totals)
    lengths = scaled(totals.rows_by_length, tally.num_rows)
    total = round(totals.num_tokens * factor)
    num_packed = count_packed_rows(lengths, totals.seq_len)
    packed_tokens = sum(length * rows for length, rows in lengths.items())
    return DataProfile(
        source=source,
        format=row_format,
        num_rows=tally.num_rows,
        num_tokens=total,
        num_trained_tokens=max(round(totals.num_trained_tokens * factor), 1),
        mean_tokens=total / tally.num_rows,
        max_tokens=min(tally.longest, totals.seq_len),
        percentiles=percentiles(lengths),
        histogram=buckets(lengths),
        num_truncated=round(totals.num_truncated * factor),
        seq_len=totals.seq_len,
        tokenizer=_described(tally, totals.num_rows),
        is_exact=tally.counter.is_exact,
        padding_waste_fraction={
            str(size): estimate_padding_waste(lengths.items(), size) for size in MICRO_BATCHES
        },
        packing_waste_fraction=1.0 - packed_tokens / (num_packed * totals.seq_len),
        num_packed_rows=num_packed,
        num_counted_rows=totals.num_rows,
        longest_row_tokens=tally.longest,
        num_lost_tokens=round(totals.num_lost_tokens * factor),
    )


def _described(tally: TokenTally, num_counted: int) -> str:
    parts = [tally.counter.description, f"{TOKENS_PER_MESSAGE} tokens per message for the template"]
    if num_counted < tally.num_rows:
        parts.append(f"{num_counted:,} of {tally.num_rows:,} rows counted")
    return "; ".join(parts)


def _nothing_to_train(source: str, totals: TokenTotals) -> InvalidInputError:
    if totals.num_truncated:
        return InvalidInputError(
            f"{source}: every answer is cut off at {totals.seq_len} tokens, so nothing is trained.",
            remedy="raise --seq-len, or shorten the prompts",
        )
    return InvalidInputError(
        f"{source}: no row has an answer, so nothing is trained.",
        remedy="give rows an answer: an assistant message, or text under `output` or `completion`",
    )
