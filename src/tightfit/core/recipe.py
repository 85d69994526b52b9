"""Recipe: what a user wants done, in one YAML file; all its errors are reported at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from annotated_types import Gt, Le
from pydantic import ValidationError, create_model, model_validator

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.core.frozen import FiniteFrozen
from tightfit.core.new_tokens import NEW_TOKENS, read_token_files
from tightfit.core.objectives import OBJECTIVE_SETTINGS, Objective
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import (
    MAX_SEQ_LEN,
    RENAMED_SETTINGS,
    JobSettings,
    Method,
    Name,
    RecipeMethod,
    StrategySettings,
    TokenName,
    TrainingSettings,
    list_settings,
)
from tightfit.core.strategy import DataSource, Strategy, Training, default_learning_rate
from tightfit.core.text import count_of
from tightfit.core.validation import (
    KeyPath,
    describe_validation_errors,
    describe_value,
    dotted,
    keys_at,
)

if TYPE_CHECKING:
    from tightfit.core.yaml_text import YamlDocument

_RECIPE_KEYS = {
    name: declared.setting.recipe_key
    for declaring in (StrategySettings, TrainingSettings)
    for name, declared in list_settings(declaring).items()
    if declared.setting.recipe_key
}
"""Settings that a recipe states elsewhere than under `strategy` or at the top, and where."""
TOP_LEVEL_HOMES = {name: key for name, key in _RECIPE_KEYS.items() if name in list_settings()}
"""Those of a strategy."""
_AT_TOP = tuple(name for name, key in TOP_LEVEL_HOMES.items() if key == name != "method")
_LORA_KEYS = {
    name: key.removeprefix("lora.") for name, key in _RECIPE_KEYS.items() if key.startswith("lora.")
}


def _make_optional(name: str, *declaring: type, keys: dict[str, str]) -> type[FiniteFrozen]:
    """A model of these settings, none of which needs to be stated, under the names in `keys`."""
    hints: dict[str, Any] = {}
    for settings in declaring:
        hints |= get_type_hints(settings, include_extras=True)
    fields: dict[str, Any] = {keys[one]: (hints[one] | None, None) for one in hints if one in keys}
    return create_model(name, __base__=FiniteFrozen, **fields)


def _names(*declaring: type) -> dict[str, str]:
    names = [name for settings in declaring for name in settings.__annotations__]
    return {name: name for name in names if name not in _RECIPE_KEYS}


if TYPE_CHECKING:

    class LoraChoice(FiniteFrozen):
        """The adapter. What is left out, the planner or the trainer chooses."""

        rank: int | None = None
        alpha: float | None = None
        targets: tuple[str, ...] | None = None
        rslora: bool | None = None

    class StrategyOverrides(FiniteFrozen):
        """Any other setting of the strategy."""

    class _Stated(JobSettings, TrainingSettings):
        """The learning side."""
else:
    LoraChoice = _make_optional("LoraChoice", StrategySettings, TrainingSettings, keys=_LORA_KEYS)
    StrategyOverrides = _make_optional(
        "StrategyOverrides", Strategy, keys=_names(StrategySettings) | {"quirks": "quirks"}
    )
    _Stated = _make_optional(
        "Stated", JobSettings, TrainingSettings, keys=_names(JobSettings, TrainingSettings)
    )


class Recipe(_Stated):
    """A job as the user states it. `None` means: not stated, the planner decides."""

    model: Name
    """A catalogue name, a hub id, a folder with config.json, or a GGUF file."""
    data: tuple[DataSource, ...] = ()
    """In YAML also a single path, or a list of paths."""
    method: RecipeMethod = RecipeMethod.AUTO
    objective: Objective | None = None
    """None: sft, which is learnt from answers alone."""
    on: Name | None = None
    """Hardware in words: `4xV100-32GB`, `here`, `slurm:gpu`, or a cluster file."""
    seq_len: Annotated[int, Gt(0), Le(MAX_SEQ_LEN)] | None = None
    packing: bool | None = None
    """`auto` in YAML is the same as leaving it out."""
    add_tokens: tuple[TokenName, ...] | None = None
    """In YAML also one name, or `@FILE`."""
    add_special_tokens: tuple[TokenName, ...] | None = None
    lora: LoraChoice = LoraChoice()
    """The adapter."""
    strategy: StrategyOverrides = StrategyOverrides()
    """Fixes any other choice of the planner."""
    output: Name | None = None
    """Folder for the run."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Recipe:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("`epochs` and `max_steps` are both given; keep one")
        objective = self.objective or Objective.SFT
        stated = [name for name in OBJECTIVE_SETTINGS if getattr(self, name) is not None]
        unread = [name for name in stated if name not in objective.record.settings]
        if unread:
            takers = [one.value for one in Objective if unread[0] in one.record.settings]
            raise ValueError(
                f"`{unread[0]}` is for the objectives {', '.join(takers)}, and the recipe's is "
                f"{objective.value}; leave it out, or write `objective: {takers[0]}`"
            )
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

    def fixed_strategy(self) -> dict[str, Any]:
        """Strategy fields that the user has fixed, by name, in Strategy's own types."""
        fixed: dict[str, Any] = {name: value for name, value in self.strategy if value is not None}
        if self.method is RecipeMethod.QLORA:
            fixed.setdefault("weights", Dtype.NF4)
        if self.method is not RecipeMethod.AUTO:
            is_full = self.method is RecipeMethod.FULL
            fixed["method"] = Method.FULL if is_full else Method.LORA
        stated = {name: getattr(self, name) for name in _AT_TOP}
        stated |= {
            name: getattr(self.lora, key)
            for name, key in _LORA_KEYS.items()
            if name in TOP_LEVEL_HOMES
        }
        return fixed | {name: value for name, value in stated.items() if value is not None}


def make_training(
    recipe: Recipe,
    *,
    method: Method,
    model_path: Path | str,
    optimizer: Optimizer = Optimizer.ADAMW,
) -> Training:
    """The recipe's learning side, with defaults where it says nothing."""
    stated = {name: getattr(recipe, name) for name in ("data", *_names(TrainingSettings))}
    stated |= {"lora_alpha": recipe.lora.alpha, "rslora": recipe.lora.rslora}
    return Training(
        model_path=str(model_path),
        learning_rate=recipe.learning_rate
        or default_learning_rate(method, optimizer, recipe.objective or Objective.SFT),
        **{name: value for name, value in stated.items() if value is not None},
    )


def read_recipe(path: Path | str) -> Recipe:
    """A recipe from its YAML file; relative paths in it start at the recipe's own folder."""
    from tightfit.core.yaml_text import read_yaml  # most commands name a model and read none

    document = read_yaml(Path(path))
    if document.value is None:
        raise _refused(document, ["it is empty."])
    if not isinstance(document.value, dict):
        found = describe_value(document.value)
        raise _refused(document, [f"expected `key: value` lines, found {found}."])
    errors: list[str] = []
    plain = _plain(document.value, (), document, errors)
    try:
        # Strict JSON mode: text is never taken for a number, yet enums may be written as text.
        recipe = Recipe.model_validate_json(json.dumps(_spelt_out(plain)), strict=True)
    except ValidationError as error:
        homes = {f"strategy.{name}": home for name, home in TOP_LEVEL_HOMES.items()}
        homes |= {f"strategy.{old}": f"strategy.{new}" for old, new in RENAMED_SETTINGS.items()}
        errors += describe_validation_errors(error, Recipe, lines=document.lines, homes=homes)
        unknown = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
        raise _refused(document, errors, inside=unknown[0][:-1] if unknown else ()) from error
    if errors:
        raise _refused(document, errors)
    return _with_paths_from(recipe, document.path.parent)


_MAX_DEPTH = 16
_MAX_BITS = 200


def _plain(value: Any, place: KeyPath, document: YamlDocument, errors: list[str]) -> Any:
    """The value in JSON's types alone, with unstated (empty) values left out."""
    if len(place) <= _MAX_DEPTH and isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            inner = (*place, str(key))
            if not isinstance(key, str):
                errors.append(_at(inner, document) + "is a key that is not text.")
            elif (kept := _plain(item, inner, document, errors)) is not None:
                plain[key] = kept
        return plain
    if len(place) <= _MAX_DEPTH and isinstance(value, list):
        return [_plain(item, (*place, at), document, errors) for at, item in enumerate(value)]
    if problem := _not_plain(value):
        errors.append(f"{_at(place, document)}{problem}.")
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
    for key in NEW_TOKENS:
        if isinstance(full.get(key), str):
            full[key] = [full[key]]
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
            path = folder / Path(text).expanduser()
        except RuntimeError:  # `~somebody` without such a user
            path = folder / text
        # `a/..` is left out, unless `a` is a link, from which `..` leads elsewhere.
        short = Path(os.path.normpath(path))
        try:
            return str(short if short.resolve() == path.resolve() else path)
        except ValueError:  # a NUL, which no path has: whoever opens it says so
            return str(path)

    is_path = recipe.model.startswith(("./", "../", "~/"))
    return recipe.model_copy(
        update={
            "model": resolved(recipe.model) if is_path else recipe.model,
            "data": tuple(item.with_paths(resolved) for item in recipe.data),
            "output": None if recipe.output is None else resolved(recipe.output),
            **{
                key: None if names is None else read_token_files(names, folder)
                for key in NEW_TOKENS
                for names in (getattr(recipe, key),)
            },
        }
    )


def _refused(
    document: YamlDocument, errors: list[str], *, inside: KeyPath = ()
) -> InvalidInputError:
    """`inside`: where the first unknown key stands, whose keys the remedy lists."""
    count = count_of(len(errors), "error")
    advice = "write some lines" if document.value is None else "correct the lines above"
    whose = f"the keys of `{dotted(inside)}`" if inside else "a recipe's keys"
    return InvalidInputError(
        "\n".join([f"{document.path} has {count}:", *(f"  {error}" for error in errors)]),
        remedy=f"{advice}; {whose} are {', '.join(keys_at(Recipe, inside))}",
    )
