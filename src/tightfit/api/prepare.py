"""`prepare`: encode data as `train` does, and measure the result."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.api.call import accepts_keywords
from tightfit.api.options.choices import read_word
from tightfit.api.options.training import TRAIN_ON, PrepareOptions, TrainOptions
from tightfit.api.training.data import encode_for
from tightfit.api.training.recipe import (
    check_recipe,
    make_absolute,
    read_base_recipe,
    read_overlay,
)
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.strategy import Method
from tightfit.core.text import shorten
from tightfit.core.training import DataSource, Training, TrainOn
from tightfit.data.encode import EncodedDataset
from tightfit.data.formats import to_messages
from tightfit.data.packing import count_packed_rows, estimate_padding_waste
from tightfit.data.report import NUM_SHOWN
from tightfit.data.sources import open_source, parse_row_slice, read_source, split_slice_suffix
from tightfit.data.streams import ReadMeter
from tightfit.data.token_store import TokenStore, epoch_rows

MICRO_BATCHES = (2, 4, 8, 16, 32)
"""Micro-batches that padding is measured for; a single row is not padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """One epoch of training rows in sequences, packed and padded."""

    num_rows: int
    num_tokens: int
    num_packed_rows: int | None
    """None: an encoder-decoder's rows are not packed."""
    packed_fraction: float | None
    """Share of slots that hold tokens."""
    padding_waste_fraction: dict[int, float]
    """By micro-batch: share of slots that padding fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareJob:
    """Data, and everything that decides how it is encoded."""

    recipe: Recipe
    training: Training
    folder: Path
    """With the tokenizer and config.json."""
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """Encoded data, ready for `train`."""

    job: PrepareJob
    encoded: EncodedDataset
    batching: Batching


class InvalidRowsError(InvalidInputError):
    """Rows that cannot be trained on; `rows` describes each of them."""

    def __init__(self, problem: str, *, remedy: str, rows: list[str], num_rows: int) -> None:
        super().__init__(problem, remedy=remedy)
        self.rows = rows
        self.num_rows = num_rows


@accepts_keywords(PrepareOptions)
def prepare(options: PrepareOptions) -> PrepareResult:
    """Encode, or find encoded, the data of a job. Raises InvalidRowsError."""
    job = _read_job(options)
    try:
        encoded = encode_for(
            job.training,
            model_folder=job.folder,
            seq_len=job.seq_len,
            skip_faulty=options.skip_faulty,
            progress=options.progress,
        )
    except InvalidInputError as error:
        if "\n" not in error.problem:  # a message of several lines lists rows
            raise
        raise _make_rows_error(options, job, error) from error
    batching = measure_batches(encoded, seed=job.training.seed)
    return PrepareResult(job=job, encoded=encoded, batching=batching)


def _read_job(options: PrepareOptions) -> PrepareJob:
    """The recipe where one is named, else a bare model; options win over the recipe."""
    recipe = _read_recipe(options)
    folder = _find_tokenizer(recipe.model)
    return PrepareJob(
        recipe=recipe,
        # The data side is the same for every method.
        training=make_training(recipe, method=Method.LORA, model_path=folder),
        folder=folder,
        seq_len=_choose_seq_len(recipe, folder),
    )


def _read_recipe(options: PrepareOptions) -> Recipe:
    recipe = read_base_recipe(options.job)
    held_out = tuple(source for source in recipe.data if source.split == "eval")
    if options.data is not None:
        trained = tuple(_named(name, options.take) for name in options.data)
        recipe = recipe.model_copy(update={"data": (*trained, *held_out)})
    elif options.take is not None:
        parse_row_slice(options.take)
        trained = tuple(
            source.model_copy(update={"take": options.take})
            for source in recipe.data
            if source.split == "train"
        )
        recipe = recipe.model_copy(update={"data": (*trained, *held_out)})
    if options.seq_len is not None:
        recipe = recipe.model_copy(update={"seq_len": options.seq_len})
    if options.train_on is not None:
        word = read_word(options.train_on, TRAIN_ON, option="--train-on")
        recipe = recipe.model_copy(update={"train_on": TrainOn(word)})
    same = TrainOptions(job=options.job, eval=options.eval, template=options.template)
    recipe = recipe.model_copy(update=read_overlay(recipe, same))
    recipe = recipe.model_copy(update={"data": tuple(map(make_absolute, recipe.data))})
    check_recipe(recipe)
    return recipe


def _named(name: str, take: str | None) -> DataSource:
    """A file and its part, written as one name where that can be: so `train --data` takes it."""
    path = str(Path(name))
    if take is None:
        return DataSource(path=path)
    part = parse_row_slice(take)
    if split_slice_suffix(path)[1] is not None and not Path(path).exists():
        raise UsageError(
            f"`--data {shorten(name)}` names a part, and `--take {shorten(take)}` another.",
            remedy=f"--data {shlex.quote(name)}    (without --take)",
        )
    if part.word is not None:
        return DataSource(path=path, take=take)
    written = take.strip()
    return DataSource(path=path + (written if written.startswith("[") else f"[:{written}]"))


def _find_tokenizer(model: str) -> Path:
    """The folder that `train` would read the tokenizer from; no weights are needed here."""
    from tightfit.runtime.model_files import locate_model, with_tokenizer

    return with_tokenizer(locate_model(model, needs_weights=False))


def _choose_seq_len(recipe: Recipe, folder: Path) -> int:
    """As the planner would: stated, else the default within what the model can take."""
    if recipe.seq_len is not None:
        return recipe.seq_len
    from tightfit.models.resolve import resolve_model
    from tightfit.planning.request import JobRequest

    return JobRequest(spec=resolve_model(str(folder))).planned_seq_len


def _make_rows_error(
    options: PrepareOptions, job: PrepareJob, refusal: InvalidInputError
) -> InvalidRowsError:
    """One message with a line for each of the first rows."""
    sources = job.training.data
    rows = list_row_errors(refusal, sources)
    counted = re.match(r"([\d,]+) rows?\b", refusal.problem)
    num_rows = max(len(rows), int(counted[1].replace(",", "")) if counted else 0)
    name = sources[0].path if len(sources) == 1 else "The data"
    count = "1 error" if num_rows == 1 else f"{num_rows} errors"
    lines = [f"{name} has {count}:", *(f"  {row}" for row in rows[:NUM_SHOWN])]
    if num_rows > NUM_SHOWN:
        lines.append(f"  and {num_rows - NUM_SHOWN:,} more")
    words = ["tightfit", "prepare", options.job]
    words += [word for source in options.data or () for word in ("--data", source)]
    remedy = f"correct these rows; the others: {shlex.join(words)} --skip-faulty"
    return InvalidRowsError("\n".join(lines), remedy=remedy, rows=rows, num_rows=num_rows)


def list_row_errors(refusal: InvalidInputError, sources: Iterable[DataSource]) -> list[str]:
    """All faulty rows: the refusal names the first ones, so the files are read once more.

    Rows that only the chat template refuses are known from the refusal alone.
    """
    found: list[str] = []
    for opened in map(open_source, sources):
        for row, row_format in read_source(
            opened, ReadMeter(), on_fault=lambda error: found.append(error.problem)
        ):
            try:
                to_messages(row, row_format)
            except InvalidInputError as error:
                found.append(error.problem)
    listed = [line.strip() for line in refusal.problem.split("\n")[1:]]
    known = {line.strip() for line in found}
    return [*found, *(line for line in listed if line not in known and not _is_rest(line))]


def _is_rest(line: str) -> bool:
    return line.startswith("and ") and line.endswith(" more")


def measure_batches(encoded: EncodedDataset, *, seed: int) -> Batching:
    """What an epoch's rows come to, each source as often as its weight says."""
    import numpy as np

    store = encoded.train
    lengths = store.lengths[epoch_rows(store, seed=seed, epoch=0, shuffle=False)]
    by_length = count_lengths(lengths)
    num_tokens, seq_len = int(np.sum(lengths)), encoded.report.seq_len
    is_pair = store.description.is_encoder_decoder
    num_packed = None if is_pair else count_packed_rows(by_length, seq_len)
    return Batching(
        num_rows=len(lengths),
        num_tokens=num_tokens,
        num_packed_rows=num_packed,
        packed_fraction=None if num_packed is None else num_tokens / (num_packed * seq_len),
        padding_waste_fraction={
            size: estimate_padding_waste(by_length.items(), size) for size in MICRO_BATCHES
        },
    )


def count_lengths(lengths: Any) -> dict[int, int]:
    """Rows by length."""
    import numpy as np

    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def find_row(encoded: EncodedDataset, wanted: int) -> Iterator[tuple[TokenStore, int]]:
    """Every encoded row that comes from this line or row of a data file."""
    import numpy as np

    stores = [store for store in (encoded.train, encoded.eval) if store is not None]
    numbers = [np.load(store.folder / "numbers.npy") for store in stores]
    found = [
        (store, int(at))
        for store, held in zip(stores, numbers, strict=True)
        for at in np.flatnonzero(held == wanted)
    ]
    if not found:
        known = np.concatenate(numbers)
        nearest = int(known[np.argmin(np.abs(known - wanted))])
        raise NotFoundError(
            f"No encoded row begins at line {wanted:,}; the nearest is {nearest:,}.",
            remedy=f"--row {nearest}",
        )
    yield from found
