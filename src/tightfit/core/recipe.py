"""Recipe: what a user wants done, in one YAML file; all its faults reported at once."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.core.frozen import FiniteFrozen
from tightfit.core.settings import RENAMED_SETTINGS, list_settings
from tightfit.core.strategy import MAX_SEQ_LEN, Method, Strategy
from tightfit.core.training import (
    DEFAULT_LEARNING_RATES,
    DataSource,
    Name,
    Schedule,
    Training,
    TrainOn,
)
from tightfit.core.validation import KeyPath, describe_validation_errors, describe_value, dotted

if TYPE_CHECKING:
    from tightfit.core.yaml_text import YamlDocument

MAX_COUNT = 10**9
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]


class RecipeMethod(str, Enum):
    """What to train; `auto` leaves it to the planner."""

    AUTO = "auto"
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"
    """LoRA on 4-bit base weights."""


class LoraChoice(FiniteFrozen):
    """The adapter. What is left out, the planner or the trainer chooses."""

    rank: int | None = Field(default=None, gt=0, le=65_536)
    alpha: float | None = Field(default=None, gt=0, le=10**6)
    dropout: float | None = Field(default=None, ge=0, lt=1)
    targets: tuple[Name, ...] | None = Field(default=None, min_length=1)
    """Module name suffixes, or the single word `all-linear`."""
    rslora: bool | None = None
    dora: bool | None = None


TOP_LEVEL_HOMES = {
    name: declared.setting.recipe_key
    for name, declared in list_settings().items()
    if declared.setting.recipe_key
}
"""Strategy fields that a recipe writes elsewhere, and where."""


def _overrides_model() -> type[FiniteFrozen]:
    """All other Strategy fields, each optional: a new Strategy field can be overridden at once."""
    fields: dict[str, Any] = {}
    for name, info in Strategy.model_fields.items():
        if name not in TOP_LEVEL_HOMES:
            kind: Any = info.annotation
            for limit in info.metadata:
                kind = Annotated[kind, limit]
            fields[name] = (kind | None, None)
    return create_model("StrategyOverrides", __base__=FiniteFrozen, **fields)


if TYPE_CHECKING:

    class StrategyOverrides(FiniteFrozen):
        """For type checkers; the fields are made from Strategy's."""
else:
    StrategyOverrides = _overrides_model()


class Recipe(FiniteFrozen):
    """A job as the user states it. `None` means: not stated, the planner decides."""

    model: Name
    """A catalogue name, a hub id, a folder with config.json, or a GGUF file."""
    data: tuple[DataSource, ...] = ()
    """In YAML also a single path, or a list of paths."""
    method: RecipeMethod = RecipeMethod.AUTO
    on: Name | None = None
    """Hardware in words: `4xV100-32GB`, `here`, `slurm:gpu`, or a cluster file."""
    seq_len: int | None = Field(default=None, gt=0, le=MAX_SEQ_LEN)
    epochs: float | None = Field(default=None, gt=0, le=10_000)
    max_steps: Count | None = None
    effective_batch: int | None = Field(default=None, gt=0, le=10**7)
    """Sequences per optimizer step over all GPUs."""
    learning_rate: float | None = Field(default=None, gt=0, le=10)
    schedule: Schedule | None = None
    warmup_fraction: float | None = Field(default=None, ge=0, le=1)
    weight_decay: float | None = Field(default=None, ge=0, le=1)
    max_grad_norm: float | None = Field(default=None, gt=0, le=10**6)
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    shuffle: bool | None = None
    template: Name | None = None
    """A named template or a Jinja file, in place of the tokenizer's own."""
    train_on: TrainOn | None = None
    eval_fraction: float | None = Field(default=None, ge=0, le=0.5)
    """Share of the training rows held back for evaluation."""
    eval_every: Count | None = None
    save_every: Count | None = None
    keep_checkpoints: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = None
    packing: bool | None = None
    """`auto` in YAML is the same as leaving it out."""
    lora: LoraChoice = LoraChoice()
    strategy: StrategyOverrides = StrategyOverrides()
    """Fixes any other choice of the planner; see `core/strategy.py`."""
    random_weights: bool | None = None
    """Draw the base weights instead of reading them: for measuring a shape on a card."""
    output: Name | None = None
    """Folder for the run."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Recipe:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("`epochs` and `max_steps` are both given; keep one")
        weights: Dtype = self.fixed_strategy().get("weights", Dtype.BF16)
        if self.method is RecipeMethod.QLORA and not weights.is_quantized:
            raise ValueError(
                f"`method: qlora` trains on quantized weights, but `strategy.weights` is "
                f"{weights.value}; write `method: lora`, or nf4"
            )
        return self

    @property
    def num_epochs(self) -> float:
        """One, where neither epochs nor steps are stated."""
        return 1.0 if self.epochs is None else self.epochs

    @property
    def training_paths(self) -> tuple[Path, ...]:
        return tuple(Path(item.path) for item in self.data if item.split == "train")

    def fixed_strategy(self) -> dict[str, Any]:
        """Strategy fields that the user has fixed, by name, in Strategy's own types."""
        fixed: dict[str, Any] = {name: value for name, value in self.strategy if value is not None}
        if self.method is RecipeMethod.QLORA:
            fixed.setdefault("weights", Dtype.NF4)
        if self.method is not RecipeMethod.AUTO:
            is_full = self.method is RecipeMethod.FULL
            fixed["method"] = Method.FULL if is_full else Method.LORA
        stated = {
            "seq_len": self.seq_len,
            "packing": self.packing,
            "lora_rank": self.lora.rank,
            "lora_targets": self.lora.targets,
            "lora_dropout": self.lora.dropout,
            "dora": self.lora.dora,
        }
        return fixed | {name: value for name, value in stated.items() if value is not None}


_SAME_IN_TRAINING = (
    "data",
    "eval_fraction",
    "template",
    "train_on",
    "schedule",
    "warmup_fraction",
    "weight_decay",
    "max_grad_norm",
    "max_steps",
    "shuffle",
    "seed",
    "save_every",
    "keep_checkpoints",
    "eval_every",
    "log_to",
    "random_weights",
)
"""Fields that Recipe and Training call alike; Training holds their defaults."""


def make_training(recipe: Recipe, *, method: Method, model_path: Path | str) -> Training:
    """The recipe's learning side, with defaults where it says nothing."""
    stated = {name: getattr(recipe, name) for name in _SAME_IN_TRAINING}
    stated |= {"lora_alpha": recipe.lora.alpha, "rslora": recipe.lora.rslora}
    return Training(
        model_path=str(model_path),
        learning_rate=recipe.learning_rate or DEFAULT_LEARNING_RATES[method],
        **{name: value for name, value in stated.items() if value is not None},
    )


def read_recipe(path: Path | str) -> Recipe:
    """A recipe from its YAML file; relative paths in it start at the recipe's own folder."""
    from tightfit.core.yaml_text import read_yaml  # most commands name a model and read none

    document = read_yaml(Path(path))
    if not isinstance(document.value, dict):
        raise _refused(document, [_not_a_recipe(document.value)])
    errors: list[str] = []
    plain = _plain(document.value, (), document, errors)
    try:
        # Strict JSON mode: text is never taken for a number, yet enums may be written as text.
        recipe = Recipe.model_validate_json(json.dumps(_spelt_out(plain)), strict=True)
    except ValidationError as error:
        homes = {f"strategy.{name}": home for name, home in TOP_LEVEL_HOMES.items()}
        homes |= {f"strategy.{old}": f"strategy.{new}" for old, new in RENAMED_SETTINGS.items()}
        errors += describe_validation_errors(error, Recipe, lines=document.lines, homes=homes)
        raise _refused(document, errors) from error
    if errors:
        raise _refused(document, errors)
    return _with_paths_from(recipe, document.path.parent)


_MAX_DEPTH = 16
_MAX_BITS = 200


def _plain(value: Any, place: KeyPath, document: YamlDocument, faults: list[str]) -> Any:
    """The value in JSON's types alone, with unstated (empty) values left out."""
    if len(place) <= _MAX_DEPTH and isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            inner = (*place, str(key))
            if not isinstance(key, str):
                faults.append(_at(inner, document) + "is a key that is not text.")
            elif (kept := _plain(item, inner, document, faults)) is not None:
                plain[key] = kept
        return plain
    if len(place) <= _MAX_DEPTH and isinstance(value, list):
        return [_plain(item, (*place, at), document, faults) for at, item in enumerate(value)]
    if problem := _not_plain(value):
        faults.append(f"{_at(place, document)}{problem}.")
        return None
    # JSON takes no half of a surrogate pair, which YAML can write by its number.
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _not_plain(value: Any) -> str | None:
    if isinstance(value, dict | list):
        return "is nested too deeply"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "is an absurdly large number"
    if value is None or isinstance(value, str | int | float):
        return None
    return f"is {describe_value(value)}, which a recipe does not hold"


def _at(place: KeyPath, document: YamlDocument) -> str:
    line = document.lines.get(place)
    return (f"line {line}: " if line else "") + f"`{dotted(place)}` "


def _spelt_out(recipe: Any) -> Any:
    """Short forms in full: a path for `data`, a word for `lora.targets`, `auto` for unstated."""
    full = {
        key: item for key, item in recipe.items() if item != "auto" or key in ("method", "model")
    }
    data = full.get("data")
    if isinstance(data, str | dict):
        data = [data]
    if isinstance(data, list):
        full["data"] = [_spell_source(item) for item in data]
    lora = full.get("lora")
    if isinstance(lora, dict) and isinstance(lora.get("targets"), str):
        words = [word.strip() for word in lora["targets"].split(",")]
        full["lora"] = lora | {"targets": words}
    return full


def _spell_source(item: Any) -> Any:
    if isinstance(item, str):
        return {"path": item}
    if isinstance(item, dict) and type(item.get("take")) is int:
        return item | {"take": str(item["take"])}
    return item


def _with_paths_from(recipe: Recipe, folder: Path) -> Recipe:
    def resolved(text: str) -> str:
        try:
            return str(folder / Path(text).expanduser())
        except RuntimeError:  # `~somebody` without such a user
            return str(folder / text)

    is_path = recipe.model.startswith(("./", "../", "~/"))
    return recipe.model_copy(
        update={
            "model": resolved(recipe.model) if is_path else recipe.model,
            "data": tuple(
                item.model_copy(update={"path": resolved(item.path)}) for item in recipe.data
            ),
            "output": None if recipe.output is None else resolved(recipe.output),
        }
    )


def _not_a_recipe(value: Any) -> str:
    if value is None:
        return "it is empty."
    return f"expected `key: value` lines, found {describe_value(value)}."


def _refused(document: YamlDocument, faults: list[str]) -> InvalidInputError:
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    advice = "write some lines" if document.value is None else "correct the lines above"
    return InvalidInputError(
        "\n".join([f"{document.path} has {count}:", *(f"  {error}" for error in faults)]),
        remedy=f"{advice}; a recipe's keys are {', '.join(Recipe.model_fields)}",
    )
