"""Data of a job encoded before any process starts, and every row that cannot be encoded."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.api.options.choices import read_word
from tightfit.api.options.training import TRAIN_ON
from tightfit.cli.flags.training import PrepareFlags, TrainFlags
from tightfit.cli.terminal.output import write_err
from tightfit.cli.training.request import (
    RECIPE_ENDINGS,
    check_recipe,
    make_absolute,
    read_base_recipe,
    read_overlay,
)
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.strategy import Method
from tightfit.core.text import count_of, shorten
from tightfit.core.training import DataSource, Training, TrainOn
from tightfit.data.encode import EncodedDataset, EncodeRequest, encode_dataset
from tightfit.data.formats import to_messages
from tightfit.data.report import NUM_SHOWN
from tightfit.data.sources import open_source, parse_row_slice, read_source, split_slice_suffix
from tightfit.data.streams import ReadMeter, ReadProgress


def encode_for(
    training: Training,
    *,
    model_folder: Path,
    seq_len: int,
    cache: Path | None = None,
    skip_faulty: bool = False,
) -> EncodedDataset:
    """Encode, or find encoded, counting aloud where somebody watches."""
    is_watched = sys.stderr is not None and sys.stderr.isatty()

    def tell(state: ReadProgress) -> None:
        write_err(f"\rencoding data: {count_of(state.num_rows, 'row')} ({state.fraction:.0%})")

    request = EncodeRequest(
        sources=training.data,
        model_folder=model_folder,
        template=training.template,
        train_on=training.train_on,
        seq_len=seq_len,
        eval_fraction=training.eval_fraction,
        seed=training.seed,
        cache=cache,
        skip_faulty=skip_faulty,
    )
    try:
        return encode_dataset(request, watch=tell if is_watched else None)
    finally:
        if is_watched:
            write_err("\r\x1b[K")


# Every row that cannot be trained on, told as one fault.


def lists_rows(fault: InvalidInputError) -> bool:
    """Whether encoding was refused because of rows, which the message lists."""
    return "\n" in fault.problem


def list_row_errors(refusal: InvalidInputError, sources: Iterable[DataSource]) -> list[str]:
    """All faulty rows: the refusal names the first ones, so the files are read once more.

    Rows that only the chat template refuses are known from the refusal alone.
    """
    found: list[str] = []
    for opened in map(open_source, sources):
        for row, row_format in read_source(
            opened, ReadMeter(), on_fault=lambda fault: found.append(fault.problem)
        ):
            try:
                to_messages(row, row_format)
            except InvalidInputError as fault:
                found.append(fault.problem)
    told = [line.strip() for line in refusal.problem.split("\n")[1:]]
    known = {line.strip() for line in found}
    return [*found, *(line for line in told if line not in known and not _is_rest(line))]


def _is_rest(line: str) -> bool:
    return line.startswith("and ") and line.endswith(" more")


def make_rows_error(
    faults: Sequence[str], *, num_faults: int, sources: Sequence[DataSource], remedy: str
) -> InvalidInputError:
    """One message with a line for each of the first rows."""
    name = sources[0].path if len(sources) == 1 else "The data"
    count = "1 fault" if num_faults == 1 else f"{num_faults} faults"
    lines = [f"{name} has {count}:", *(f"  {fault}" for fault in faults[:NUM_SHOWN])]
    if num_faults > NUM_SHOWN:
        lines.append(f"  and {num_faults - NUM_SHOWN:,} more")
    return InvalidInputError("\n".join(lines), remedy=remedy)


# What `prepare` is asked: a recipe with the flags laid over it, read as `train` reads it.


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareJob:
    """Data, and everything that decides how it is encoded."""

    recipe: Recipe
    training: Training
    folder: Path
    """With the tokenizer and config.json."""
    seq_len: int


def read_prepare_job(flags: PrepareFlags) -> PrepareJob:
    """The recipe where one is named, else a bare model; flags win over the recipe."""
    recipe = _read_recipe(flags)
    folder = _find_tokenizer(recipe.model)
    return PrepareJob(
        recipe=recipe,
        # The data side is the same for every method.
        training=make_training(recipe, method=Method.LORA, model_path=folder),
        folder=folder,
        seq_len=_choose_seq_len(recipe, folder),
    )


def _read_recipe(flags: PrepareFlags) -> Recipe:
    recipe = read_base_recipe(flags.job)
    held_out = tuple(source for source in recipe.data if source.split == "eval")
    if flags.data is not None:
        trained = tuple(_named(name, flags.take) for name in flags.data)
        recipe = recipe.model_copy(update={"data": (*trained, *held_out)})
    elif flags.take is not None:
        parse_row_slice(flags.take)
        trained = tuple(
            source.model_copy(update={"take": flags.take})
            for source in recipe.data
            if source.split == "train"
        )
        recipe = recipe.model_copy(update={"data": (*trained, *held_out)})
    if flags.seq_len is not None:
        recipe = recipe.model_copy(update={"seq_len": flags.seq_len})
    if flags.train_on is not None:
        word = read_word(flags.train_on, TRAIN_ON, option="--train-on")
        recipe = recipe.model_copy(update={"train_on": TrainOn(word)})
    same = TrainFlags(job=flags.job, eval=flags.eval, template=flags.template)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """How to go on."""

    command: str
    recipe_file: str | None = None
    recipe_lines: tuple[str, ...] = ()
    """To be written there first: what `train` has no options for."""


def find_next(flags: PrepareFlags, job: PrepareJob) -> NextStep:
    """The command that trains on this very encoding."""
    words: list[str] = []
    for option, value in (
        ("--eval", flags.eval),
        ("--seq-len", flags.seq_len),
        ("--template", flags.template),
    ):
        words += [option, str(value)] if value is not None else []
    sources = [source for source in job.recipe.data if source.split == "train"]
    changes_data = flags.data is not None or flags.take is not None
    is_told_by_options = flags.train_on is None and (
        not changes_data
        or (flags.data is not None and len(sources) == 1 and sources[0].take is None)
    )
    if is_told_by_options:
        if changes_data:
            words = ["--data", sources[0].path.removeprefix(f"{Path.cwd()}/"), *words]
        return NextStep(command=shlex.join(["tightfit", "train", flags.job, *words]))
    is_recipe = flags.job.lower().endswith(RECIPE_ENDINGS)
    file = flags.job if is_recipe else "recipe.yaml"
    lines = [] if is_recipe else [f"model: {_as_yaml(flags.job)}"]
    return NextStep(
        command=shlex.join(["tightfit", "train", file, *words]),
        recipe_file=file,
        recipe_lines=(*lines, *_write_data(job.recipe, flags)),
    )


def _write_data(recipe: Recipe, flags: PrepareFlags) -> Iterator[str]:
    yield "data:"
    for source in recipe.data:
        if source.split == "eval" and flags.eval is not None:
            continue  # the command line names it
        stated = source.model_dump(exclude_defaults=True)
        listed = ", ".join(f"{key}: {_as_yaml(value)}" for key, value in stated.items())
        yield f"  - {{{listed}}}"
    if flags.train_on is not None and recipe.train_on is not None:
        yield f"train_on: {recipe.train_on.value}"


def _as_yaml(value: object) -> str:
    """JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
