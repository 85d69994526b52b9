"""A training job as asked for: a recipe, a model or a saved plan, with options on top."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tightfit.api.options import choices
from tightfit.api.options.choices import read_word
from tightfit.api.options.training import PlanOptions, TrainOptions
from tightfit.api.training.data import profile_sources
from tightfit.api.training.settings import read_settings, refuse_twice, show_value
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.frozen import Frozen
from tightfit.core.recipe import Recipe, RecipeMethod, read_recipe
from tightfit.core.text import shorten
from tightfit.core.training import DataSource
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import SearchResult

RECIPE_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """A request, and the hardware that was named with it."""

    request: JobRequest
    on: str | None
    recipe: Recipe
    """What was asked, options and file together."""


def read_plan_job(options: PlanOptions) -> PlanJob:
    """The recipe where one is named, else a bare model; options win over the recipe."""
    settings = read_settings(options.settings)
    refuse_twice(settings, {"method": options.method, "seq_len": options.seq_len})
    recipe = apply_options(read_base_recipe(options.job), options)
    fixed = recipe.fixed_strategy() | settings
    refuse_plain_qlora(recipe, fixed)
    stated: dict[str, Any] = {"seq_len": fixed.pop("seq_len", None)}
    if recipe.effective_batch is not None:
        stated["effective_batch"] = recipe.effective_batch
    request = JobRequest(
        spec=resolve_model(recipe.model), method=recipe.method.value, fixed=fixed, **stated
    )
    sources = tuple(source for source in recipe.data if source.split == "train")
    if sources:
        profile = profile_sources(
            sources,
            seq_len=request.planned_seq_len,
            model=recipe.model,
            progress=options.progress,
        )
        request = replace(request, profile=profile)
    request = replace(request, num_epochs=recipe.num_epochs, max_steps=recipe.max_steps)
    return PlanJob(request=request, on=options.on or recipe.on, recipe=recipe)


def read_base_recipe(name: str) -> Recipe:
    if name.lower().endswith(RECIPE_ENDINGS):
        return read_recipe(Path(name).expanduser())
    # The name is checked where it is looked up, with a better message than a length limit.
    return Recipe(model="unnamed").model_copy(update={"model": name})


def apply_options(recipe: Recipe, options: PlanOptions) -> Recipe:
    update: dict[str, Any] = {}
    if options.method is not None:
        word = choices.read_word(options.method, choices.PLAN_METHODS, option="--method")
        update["method"] = RecipeMethod(word)
    if options.seq_len is not None:
        update["seq_len"] = options.seq_len
    if options.epochs is not None:
        update |= {"epochs": options.epochs, "max_steps": None}
    if options.effective_batch is not None:
        update["effective_batch"] = options.effective_batch
    if options.data is not None:
        held_out = tuple(source for source in recipe.data if source.split == "eval")
        named = DataSource(path="unnamed").model_copy(update={"path": str(options.data)})
        update["data"] = (named, *held_out)
    return recipe.model_copy(update=update)


def refuse_plain_qlora(recipe: Recipe, fixed: dict[str, Any]) -> None:
    weights = fixed.get("weights")
    if recipe.method is RecipeMethod.QLORA and weights is not None and not weights.is_quantized:
        raise UsageError(
            f"`--method qlora` trains over quantized weights, not {weights.value}.",
            remedy=f"--method lora --set weights={weights.value}",
        )


# A saved plan given as the job: read back and shown, not searched again.

_PLAN_KEYS = {"strategy", "estimate", "hardware", "model"}
MAX_FILE_BYTES = 64 * 2**20


def read_saved_plans(name: str) -> SearchResult | None:
    """What `--save` or `plan --json` wrote; None where the name is no such file."""
    path = Path(name).expanduser() if name.lower().endswith(".json") else None
    document = None if path is None else _read_json(path)
    if not isinstance(document, dict):
        return None
    held = document.get("plans", [document])
    if not isinstance(held, list) or not held or not all(map(_is_plan, held)):
        return None
    try:
        plans = tuple(Plan.model_validate_json(json.dumps(plan)) for plan in held)
    except ValidationError as error:
        maker = held[0].get("tightfit_version", "another version")
        raise InvalidInputError(
            f"{name} is a plan that this version cannot read (written by tightfit {maker}).",
            remedy="plan the model again: tightfit plan MODEL --on HARDWARE --save plan.json",
        ) from error
    return SearchResult(plans=plans, excluded=(), num_considered=0, shortfall=None)


def refuse_new_options(options: PlanOptions, plan: Plan) -> None:
    """Options that would ask for another plan than the saved one."""
    given = {
        "--on": options.on,
        "--network": options.network,
        "--seq-len": options.seq_len,
        "--data": options.data,
        "--method": options.method,
        "--epochs": options.epochs,
        "--effective-batch": options.effective_batch,
        "--set": options.settings or None,
        "--explain": options.explain or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise saved_plan_error(options.job, plan, option)


def saved_plan_error(job: str, plan: Plan, option: str) -> UsageError:
    return UsageError(
        f"{job} is a saved plan, which {option} cannot change.",
        remedy=f"tightfit plan {plan.model.name} with the same options    (plans it anew)",
    )


def _read_json(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads it as a model says what is wrong with it


def _is_plan(document: Any) -> bool:
    return isinstance(document, dict) and document.keys() >= _PLAN_KEYS


# What `train` is asked: a recipe with the options laid over it, kept beside the run.

TRACKERS = ("tensorboard", "wandb", "mlflow", "none")
MOST_HELD_BACK = 0.5
_NOT_LEARNT = {"output", "on"}
"""Where a run happens and lies does not make it another one."""


class RunRecipe(Frozen):
    """Everything that decides what a run learns; `recipe.json` in its folder."""

    recipe: Recipe
    settings: dict[str, str] = Field(default_factory=dict)
    """Of `--set`, as typed."""
    plan_number: int = 1

    def is_same(self, other: RunRecipe) -> bool:
        """Whether both ask for the same training, wherever."""
        return self._essence() == other._essence()

    def _essence(self) -> dict[str, Any]:
        return self.model_dump(exclude={"recipe": _NOT_LEARNT})

    def list_differences(self, other: RunRecipe) -> list[str]:
        """The recipe's keys in which both differ, and `--set` or `--plan`."""
        mine, theirs = self._essence(), other._essence()
        found = [key for key, value in mine["recipe"].items() if theirs["recipe"][key] != value]
        found += ["--set"] if mine["settings"] != theirs["settings"] else []
        return found + (["--plan"] if mine["plan_number"] != theirs["plan_number"] else [])


def read_run_recipe(options: TrainOptions, *, needs_data: bool = True) -> RunRecipe:
    """The recipe where one is named, else a bare model; options win over the recipe."""
    settings = read_settings(options.settings)
    refuse_twice(settings, {"method": options.method, "seq_len": options.seq_len})
    recipe = apply_options(read_base_recipe(options.job), _as_plan_flags(options))
    recipe = recipe.model_copy(update=read_overlay(recipe, options))
    recipe = recipe.model_copy(
        update={
            "model": _make_model_absolute(recipe.model),
            "data": tuple(map(make_absolute, recipe.data)),
        }
    )
    refuse_plain_qlora(recipe, recipe.fixed_strategy() | settings)
    check_recipe(recipe, needs_data=needs_data)
    shown = {name: show_value(value) for name, value in settings.items()}
    return RunRecipe(recipe=recipe, settings=shown, plan_number=options.plan)


def fixed_fields(wanted: RunRecipe) -> dict[str, Any]:
    """Strategy fields that recipe and `--set` have decided."""
    settings = read_settings([f"{name}={value}" for name, value in wanted.settings.items()])
    return wanted.recipe.fixed_strategy() | settings


def _as_plan_flags(options: TrainOptions) -> PlanOptions:
    return PlanOptions(
        job=options.job,
        method=options.method,
        seq_len=options.seq_len,
        epochs=options.epochs,
        effective_batch=options.effective_batch,
        data=options.data,
    )


def read_overlay(recipe: Recipe, options: TrainOptions) -> dict[str, Any]:
    if options.epochs is not None and options.max_steps is not None:
        raise UsageError(
            "--epochs and --max-steps both say how long to train.",
            remedy=f"keep one: --max-steps {options.max_steps}",
        )
    update: dict[str, Any] = {}
    if options.max_steps is not None:
        update |= {"max_steps": options.max_steps, "epochs": None}
    if options.lr is not None:
        update["learning_rate"] = options.lr
    if options.output is not None:
        update["output"] = str(options.output)
    if options.template is not None:
        update["template"] = options.template
    if options.seed is not None:
        update["seed"] = _read_seed(options.seed)
    if options.log_to is not None:
        update["log_to"] = _read_trackers(options.log_to)
    if options.on is not None:
        update["on"] = options.on
    return update | _read_eval(recipe, options.eval)


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
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{message}.", remedy="tightfit train --help") from error
