"""What `prepare` is asked: a recipe with the flags laid over it, read as `train` reads it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tightfit.cli.choices import read_word
from tightfit.cli.flags.prepare import TRAIN_ON, PrepareFlags
from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.job import RECIPE_ENDINGS, read_base
from tightfit.cli.terminal.harmless import shorten
from tightfit.cli.training.recipe import check_recipe, make_absolute, read_overlay
from tightfit.core.errors import UsageError
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.strategy import Method
from tightfit.core.training import DataSource, Training, TrainOn
from tightfit.data.take import parse_take, split_suffix


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
    recipe = read_base(flags.job)
    held_out = tuple(source for source in recipe.data if source.split == "eval")
    if flags.data is not None:
        trained = tuple(_named(name, flags.take) for name in flags.data)
        recipe = recipe.model_copy(update={"data": (*trained, *held_out)})
    elif flags.take is not None:
        parse_take(flags.take)
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
    part = parse_take(take)
    if split_suffix(path)[1] is not None and not Path(path).exists():
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
