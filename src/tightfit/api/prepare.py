"""`prepare`: encode data as `train` does, and measure the result."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import PrepareOptions
from tightfit.api.training.job import encode_for
from tightfit.api.training.recipe import (
    check_recipe,
    lay_over,
    make_absolute,
    read_base_recipe,
    read_new_tokens,
    training_sources,
)
from tightfit.core.errors import InvalidInputError, UsageError, UserError
from tightfit.core.objectives import ExampleKind, Objective
from tightfit.core.options import list_given, repeat_options
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.settings import Method
from tightfit.core.strategy import DataSource
from tightfit.core.text import shorten
from tightfit.data.encode import EncodedDataset
from tightfit.data.new_tokens import with_new_tokens
from tightfit.data.packing import count_packed_rows, estimate_padding_waste
from tightfit.data.report import NUM_SHOWN
from tightfit.data.sources import open_source, parse_row_slice, read_source, split_slice_suffix
from tightfit.data.token_store import epoch_rows
from tightfit.data.view import count_lengths
from tightfit.planning.request import JobRequest
from tightfit.runtime.resolve import resolve_model

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
class PrepareResult:
    """Encoded data, ready for `train`."""

    recipe: Recipe
    """As asked for: the recipe with the options on top."""
    encoded: EncodedDataset
    batching: Batching
    notes: tuple[str, ...] = ()
    """What the data's length means for the model."""


class InvalidRowsError(InvalidInputError):
    """Rows that cannot be trained on; `rows` describes each of them."""

    def __init__(self, problem: str, *, remedy: str, rows: list[str], num_rows: int) -> None:
        super().__init__(problem, remedy=remedy)
        self.rows = rows
        self.num_rows = num_rows


@accepts_keywords(PrepareOptions)
def prepare(options: PrepareOptions) -> PrepareResult:
    """Encode, or find encoded, the data of a job. Raises InvalidRowsError."""
    from tightfit.runtime.model_files import locate_model, with_tokenizer

    recipe = _read_recipe(options)
    # The folder that `train` would read the tokenizer from; no weights are needed here.
    folder = with_tokenizer(locate_model(recipe.model, needs_weights=False))
    # The data side is the same for every method.
    training = make_training(recipe, method=Method.LORA, model_path=folder)
    try:
        encoded = encode_for(
            training,
            objective=recipe.objective or Objective.SFT,
            model_folder=with_new_tokens(folder, read_new_tokens(recipe.fixed_strategy())),
            # As the planner would: stated, else the default within what the model can take.
            seq_len=recipe.seq_len or JobRequest(spec=resolve_model(str(folder))).planned_seq_len,
            skip_invalid=options.skip_invalid,
            progress=options.progress,
        )
    except InvalidInputError as error:
        if "\n" not in error.problem:  # a message of several lines lists rows
            raise
        example = (recipe.objective or Objective.SFT).record.example
        raise _make_rows_error(options, training.data, error, example) from error
    batching = measure_batches(encoded, seed=training.seed)
    notes = tuple(_note_positions(folder, encoded))
    return PrepareResult(recipe=recipe, encoded=encoded, batching=batching, notes=notes)


def _note_positions(folder: Path, encoded: EncodedDataset) -> Iterator[str]:
    """Where rows are longer than the model was made for, as `plan` says it too."""
    with contextlib.suppress(UserError):  # a family without formulas may still be trained
        spec = resolve_model(str(folder))
        longest, made_for = encoded.report.train.max_tokens, spec.max_positions
        if made_for is not None and longest > made_for and not spec.is_encoder_decoder:
            yield (
                f"rows of up to {longest:,} tokens exceed the {made_for:,} positions that "
                f"{spec.name} was made for: --seq-len {made_for}, or a model of longer rows"
            )


def _read_recipe(options: PrepareOptions) -> Recipe:
    """The recipe where one is named, else a bare model; options win over the recipe."""
    recipe = read_base_recipe(options.job)
    held_out = tuple(source for source in recipe.data if source.split == "eval")
    trained = training_sources(recipe)
    if options.data is not None:
        trained = tuple(_named(name, options.take) for name in options.data)
    elif options.take is not None:
        parse_row_slice(options.take)
        trained = tuple(source.model_copy(update={"take": options.take}) for source in trained)
    recipe = recipe.model_copy(update={"data": (*trained, *held_out)})
    recipe = lay_over(recipe, options)
    recipe = recipe.model_copy(update={"data": make_absolute(recipe).data})
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


def _make_rows_error(
    options: PrepareOptions,
    sources: tuple[DataSource, ...],
    refusal: InvalidInputError,
    example: ExampleKind,
) -> InvalidRowsError:
    """One message with a line for each of the first rows."""
    rows, num_read = list_row_errors(refusal, sources, example)
    counted = re.match(r"([\d,]+) rows?\b", refusal.problem)
    num_rows = max(len(rows), int(counted[1].replace(",", "")) if counted else 0)
    name = sources[0].path if len(sources) == 1 else "The data"
    count = "1 error" if num_rows == 1 else f"{num_rows} errors"
    lines = [f"{name} has {count}:", *(f"  {row}" for row in rows[:NUM_SHOWN])]
    if num_rows > NUM_SHOWN:
        lines.append(f"  and {num_rows - NUM_SHOWN:,} more")
    names = ("data", "tools", "objective", "seq_len", "template", "eval", "take", "train_on")
    words = ["tightfit", "prepare", options.job, *repeat_options(list_given(options, names))]
    remedy = refusal.remedy
    if num_read > num_rows:
        remedy = f"correct these rows; the others: {shlex.join(words)} --skip-invalid"
    return InvalidRowsError("\n".join(lines), remedy=remedy, rows=rows, num_rows=num_rows)


def list_row_errors(
    refusal: InvalidInputError,
    sources: Iterable[DataSource],
    example: ExampleKind = ExampleKind.ANSWER,
) -> tuple[list[str], int]:
    """All invalid rows, and the number of all: the refusal names the first ones, so the files are
    read once more.

    Rows that only the chat template refuses are known from the refusal alone.
    """
    found: list[str] = []
    num_readable = 0
    for opened in map(open_source, sources):
        for row, row_format in read_source(
            opened, on_error=lambda error: found.append(error.problem), example=example
        ):
            try:
                row_format.to_messages(row)
                num_readable += 1
            except InvalidInputError as error:
                found.append(error.problem)
    listed = [line.strip() for line in refusal.problem.split("\n")[1:]]
    known = {line.strip() for line in found}
    rest = [line for line in listed if not (line.startswith("and ") and line.endswith(" more"))]
    num_read = num_readable + len(found)
    return [*found, *(line for line in rest if line not in known)], num_read


def measure_batches(encoded: EncodedDataset, *, seed: int) -> Batching:
    """What an epoch's rows come to, each source as often as its weight says."""
    import numpy as np

    store = encoded.train
    rows = epoch_rows(store, seed=seed, epoch=0, shuffle=False)
    lengths, size = store.example_lengths[rows], store.description.rows_per_example
    by_length = count_lengths(lengths)
    num_tokens = int(sum(np.sum(store.lengths[rows + at]) for at in range(size)))
    seq_len = encoded.report.seq_len
    is_pair = store.description.is_encoder_decoder
    num_packed = None if is_pair else count_packed_rows(by_length, seq_len)
    return Batching(
        num_rows=len(lengths),
        num_tokens=num_tokens,
        num_packed_rows=num_packed,
        packed_fraction=None if num_packed is None else num_tokens / (size * num_packed * seq_len),
        padding_waste_fraction={
            size: estimate_padding_waste(by_length.items(), size) for size in MICRO_BATCHES
        },
    )
