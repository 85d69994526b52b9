"""Profile a dataset: lengths of its rows in tokens and what they mean for batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tightfit.core.errors import InvalidInputError
from tightfit.core.strategy import MAX_SEQ_LEN
from tightfit.core.training import DataSource
from tightfit.core.workload import DataProfile
from tightfit.data.epochs import epoch_rows
from tightfit.data.formats import to_turns
from tightfit.data.lengths import buckets, estimate_padding_waste, percentiles, scaled
from tightfit.data.meter import Meter, ReadProgress
from tightfit.data.packing import count_packed_rows
from tightfit.data.read import data_files
from tightfit.data.sources import OpenedSource, open_source, read_source
from tightfit.data.streams import size_of
from tightfit.data.tally import Tally, Totals
from tightfit.data.token_store import TokenStore
from tightfit.data.tokens import TOKENS_PER_MESSAGE, token_counter

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
    tally = Tally(counter=counter, seq_len=seq_len, limit=limit)
    formats: dict[str, None] = {}
    opened = _open(source)
    total = sum(size_of(path) for item in opened for path in item.files)
    meter = Meter(watch, total_bytes=total)
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


def _summary(tally: Tally, source: str, row_format: str) -> DataProfile:
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


def _described(tally: Tally, num_counted: int) -> str:
    parts = [tally.counter.description, f"{TOKENS_PER_MESSAGE} tokens per message for the template"]
    if num_counted < tally.num_rows:
        parts.append(f"{num_counted:,} of {tally.num_rows:,} rows counted")
    return "; ".join(parts)


def _nothing_to_train(source: str, totals: Totals) -> InvalidInputError:
    if totals.num_truncated:
        return InvalidInputError(
            f"{source}: every answer is cut off at {totals.seq_len} tokens, so nothing is trained.",
            remedy="raise --seq-len, or shorten the prompts",
        )
    return InvalidInputError(
        f"{source}: no row has an answer, so nothing is trained.",
        remedy="give rows an answer: an assistant message, or text under `output` or `completion`",
    )
