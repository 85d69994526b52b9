"""Profile a dataset: lengths of its rows in tokens and what they mean for batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tightfit.core.errors import InvalidInputError
from tightfit.core.strategy import MAX_SEQ_LEN
from tightfit.core.workload import DataProfile
from tightfit.data.formats import Turns, recognise_format, to_turns
from tightfit.data.lengths import buckets, estimate_padding_waste, percentiles, scaled
from tightfit.data.meter import Meter, ReadProgress
from tightfit.data.packing import count_packed_rows
from tightfit.data.read import data_files, read_file
from tightfit.data.streams import size_of
from tightfit.data.tally import Tally, Totals
from tightfit.data.tokens import TOKENS_PER_MESSAGE, token_counter

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
EXACT_SAMPLE_ROWS = 50_000
"""A tokenizer counts about 10,000 rows a second and core; more rows change no percentile."""


def profile_dataset(
    source: Path | str | Sequence[Path | str],
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
    formats: list[str] = []
    files = data_files(source)

    meter = Meter(watch, total_bytes=sum(map(size_of, files)))
    for turns in _all_turns(files, formats, meter):
        tally.add(turns)
        meter.add_row()
    tally.finish()
    meter.finish()
    return _summary(tally, _source_name(source), "+".join(formats))


def _all_turns(files: Sequence[Path], formats: list[str], meter: Meter) -> Iterator[Turns]:
    """Rows of all files as prompt and answer; each file is in one format throughout."""
    for path in files:
        row_format = None
        for row in read_file(path, meter):
            if row_format is None:
                row_format = recognise_format(row)
                if row_format.name not in formats:
                    formats.append(row_format.name)
            yield to_turns(row, row_format)
        meter.close_file(size_of(path))


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


def _source_name(source: Path | str | Sequence[Path | str]) -> str:
    if isinstance(source, str | Path):
        return str(source)
    return ", ".join(str(item) for item in source)
