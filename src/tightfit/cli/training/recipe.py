"""What `train` is asked: a recipe with the flags laid over it, kept beside the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tightfit.cli.choices import read_word
from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.job import lay_over, read_base, refuse_plain_qlora
from tightfit.cli.settings import read_settings, refuse_twice, show_value
from tightfit.cli.terminal.harmless import shorten
from tightfit.core.errors import UsageError
from tightfit.core.recipe import Recipe
from tightfit.core.training import DataSource

TRACKERS = ("tensorboard", "wandb", "mlflow", "none")
MOST_HELD_BACK = 0.5
_ELSEWHERE = {"output", "on"}
"""Where a run happens and lies does not make it another one."""


class Wish(BaseModel):
    """Everything that decides what a run learns; `recipe.json` in its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Recipe
    settings: dict[str, str] = {}
    """Of `--set`, as typed."""
    plan_number: int = 1

    def is_same(self, other: Wish) -> bool:
        """Whether both ask for the same training, wherever."""
        return self._essence() == other._essence()

    def _essence(self) -> dict[str, Any]:
        return self.model_dump(exclude={"recipe": _ELSEWHERE})

    def list_differences(self, other: Wish) -> list[str]:
        """The recipe's keys in which both differ, and `--set` or `--plan`."""
        mine, theirs = self._essence(), other._essence()
        found = [key for key, value in mine["recipe"].items() if theirs["recipe"][key] != value]
        found += ["--set"] if mine["settings"] != theirs["settings"] else []
        return found + (["--plan"] if mine["plan_number"] != theirs["plan_number"] else [])


def read_wish(flags: TrainFlags, *, needs_data: bool = True) -> Wish:
    """The recipe where one is named, else a bare model; flags win over the recipe."""
    settings = read_settings(flags.settings)
    refuse_twice(settings, {"method": flags.method, "seq_len": flags.seq_len})
    recipe = lay_over(read_base(flags.job), _as_plan_flags(flags))
    recipe = recipe.model_copy(update=read_overlay(recipe, flags))
    recipe = recipe.model_copy(
        update={
            "model": _make_model_absolute(recipe.model),
            "data": tuple(map(make_absolute, recipe.data)),
        }
    )
    refuse_plain_qlora(recipe, recipe.fixed_strategy() | settings)
    check_recipe(recipe, needs_data=needs_data)
    shown = {name: show_value(value) for name, value in settings.items()}
    return Wish(recipe=recipe, settings=shown, plan_number=flags.plan)


def fixed_fields(wish: Wish) -> dict[str, Any]:
    """Strategy fields that recipe and `--set` have decided."""
    settings = read_settings([f"{name}={value}" for name, value in wish.settings.items()])
    return wish.recipe.fixed_strategy() | settings


def _as_plan_flags(flags: TrainFlags) -> PlanFlags:
    return PlanFlags(
        job=flags.job,
        method=flags.method,
        seq_len=flags.seq_len,
        epochs=flags.epochs,
        effective_batch=flags.effective_batch,
        data=flags.data,
    )


def read_overlay(recipe: Recipe, flags: TrainFlags) -> dict[str, Any]:
    if flags.epochs is not None and flags.max_steps is not None:
        raise UsageError(
            "--epochs and --max-steps both say how long to train.",
            remedy=f"keep one: --max-steps {flags.max_steps}",
        )
    update: dict[str, Any] = {}
    if flags.max_steps is not None:
        update |= {"max_steps": flags.max_steps, "epochs": None}
    if flags.lr is not None:
        update["learning_rate"] = flags.lr
    if flags.output is not None:
        update["output"] = str(flags.output)
    if flags.template is not None:
        update["template"] = flags.template
    if flags.seed is not None:
        update["seed"] = _read_seed(flags.seed)
    if flags.log_to is not None:
        update["log_to"] = _read_trackers(flags.log_to)
    if flags.on is not None:
        update["on"] = flags.on
    return update | _read_eval(recipe, flags.eval)


def _read_eval(recipe: Recipe, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    trained = tuple(source for source in recipe.data if source.split == "train")
    try:
        share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        held_out = DataSource(path=text, split="eval")
        return {"data": (*trained, held_out), "eval_fraction": None}
    if not 0 < share <= MOST_HELD_BACK:
        raise UsageError(
            f"`--eval {shorten(text)}` is neither a file nor a share up to {MOST_HELD_BACK}.",
            remedy="--eval 0.05",
        )
    return {"data": trained, "eval_fraction": share}


def _read_seed(text: str) -> int:
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise UsageError(
            f"`--seed {shorten(text)}` is not a whole number from 0 to {2**32 - 1:,}.",
            remedy="--seed 17",
        )
    return int(text)


def _read_trackers(text: str) -> tuple[str, ...]:
    words = [read_word(word, TRACKERS, option="--log-to") for word in text.split(",")]
    return tuple(dict.fromkeys(word for word in words if word != "none"))


def make_absolute(source: DataSource) -> DataSource:
    """A run can be gone on with from another folder."""
    path = Path(source.path)
    if source.path.startswith("~"):
        return source
    return source.model_copy(update={"path": str(path.absolute())})


def _make_model_absolute(model: str) -> str:
    """A folder or file that is here; a name in the catalogue or cache stays as it is."""
    path = Path(model)
    return str(path.absolute()) if path.exists() else model


def check_recipe(recipe: Recipe, *, needs_data: bool = True) -> None:
    """The recipe's own rules, which a flag may have broken."""
    if needs_data and not any(source.split == "train" for source in recipe.data):
        raise UsageError("No data to train on was named.", remedy="--data train.jsonl")
    try:
        Recipe.model_validate(recipe.model_dump())
    except ValidationError as fault:
        said = fault.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{said}.", remedy="tightfit train --help") from fault
