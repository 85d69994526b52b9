"""A training job as asked for: a recipe, a model or a saved plan, with options on top."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from tightfit.api.options import choices
from tightfit.api.options.choices import read_word
from tightfit.cli.flags.training import PlanFlags, TrainFlags
from tightfit.cli.terminal.output import write_err
from tightfit.cli.training.command_line import read_settings, refuse_twice, show_value
from tightfit.core.data_profile import DataProfile
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.frozen import Frozen
from tightfit.core.recipe import Recipe, RecipeMethod, read_recipe
from tightfit.core.text import count_of, shorten
from tightfit.core.training import DataSource
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import SearchResult

if TYPE_CHECKING:
    from tightfit.data.streams import ReadProgress


RECIPE_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """A request, and the hardware that was named with it."""

    request: JobRequest
    on: str | None
    recipe: Recipe
    """What was asked, flags and file together."""


def read_plan_job(flags: PlanFlags) -> PlanJob:
    """The recipe where one is named, else a bare model; flags win over the recipe."""
    settings = read_settings(flags.settings)
    refuse_twice(settings, {"method": flags.method, "seq_len": flags.seq_len})
    recipe = apply_flags(read_base_recipe(flags.job), flags)
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
        profile = profile_sources(sources, seq_len=request.planned_seq_len, model=recipe.model)
        request = replace(request, profile=profile)
    request = replace(request, num_epochs=recipe.num_epochs, max_steps=recipe.max_steps)
    return PlanJob(request=request, on=flags.on or recipe.on, recipe=recipe)


def read_base_recipe(name: str) -> Recipe:
    if name.lower().endswith(RECIPE_ENDINGS):
        return read_recipe(Path(name).expanduser())
    # The name is checked where it is looked up, with a better message than a length limit.
    return Recipe(model="unnamed").model_copy(update={"model": name})


def apply_flags(recipe: Recipe, flags: PlanFlags) -> Recipe:
    update: dict[str, Any] = {}
    if flags.method is not None:
        word = choices.read_word(flags.method, choices.PLAN_METHODS, option="--method")
        update["method"] = RecipeMethod(word)
    if flags.seq_len is not None:
        update["seq_len"] = flags.seq_len
    if flags.epochs is not None:
        update |= {"epochs": flags.epochs, "max_steps": None}
    if flags.effective_batch is not None:
        update["effective_batch"] = flags.effective_batch
    if flags.data is not None:
        held_out = tuple(source for source in recipe.data if source.split == "eval")
        named = DataSource(path="unnamed").model_copy(update={"path": str(flags.data)})
        update["data"] = (named, *held_out)
    return recipe.model_copy(update=update)


def refuse_plain_qlora(recipe: Recipe, fixed: dict[str, Any]) -> None:
    weights = fixed.get("weights")
    if recipe.method is RecipeMethod.QLORA and weights is not None and not weights.is_quantized:
        raise UsageError(
            f"`--method qlora` trains over quantized weights, not {weights.value}.",
            remedy=f"--method lora --set weights={weights.value}",
        )


def profile_sources(sources: tuple[DataSource, ...], *, seq_len: int, model: str) -> DataProfile:
    """Read the data, counting aloud where somebody watches."""
    from tightfit.data.profile import profile_dataset

    is_watched = sys.stderr is not None and sys.stderr.isatty()

    def tell(state: ReadProgress) -> None:
        rows = count_of(state.num_rows, "row")
        write_err(f"\rreading data: {rows} ({state.fraction:.0%})")

    try:
        return profile_dataset(
            sources,
            seq_len=seq_len,
            model=model,
            watch=tell if is_watched else None,
        )
    finally:
        if is_watched:
            write_err("\r\x1b[K")


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
    except ValidationError as fault:
        maker = held[0].get("tightfit_version", "another version")
        raise InvalidInputError(
            f"{name} is a plan that this version cannot read (written by tightfit {maker}).",
            remedy="plan the model again: tightfit plan MODEL --on HARDWARE --save plan.json",
        ) from fault
    return SearchResult(plans=plans, excluded=(), num_considered=0, shortfall=None)


def refuse_new_options(flags: PlanFlags, plan: Plan) -> None:
    """Options that would ask for another plan than the saved one."""
    given = {
        "--on": flags.on,
        "--network": flags.network,
        "--seq-len": flags.seq_len,
        "--data": flags.data,
        "--method": flags.method,
        "--epochs": flags.epochs,
        "--effective-batch": flags.effective_batch,
        "--set": flags.settings or None,
        "--buy": flags.buy or None,
        "--explain": flags.explain or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"{flags.job} is a saved plan, which {option} cannot change.",
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


# What `train` is asked: a recipe with the flags laid over it, kept beside the run.

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


def read_run_recipe(flags: TrainFlags, *, needs_data: bool = True) -> RunRecipe:
    """The recipe where one is named, else a bare model; flags win over the recipe."""
    settings = read_settings(flags.settings)
    refuse_twice(settings, {"method": flags.method, "seq_len": flags.seq_len})
    recipe = apply_flags(read_base_recipe(flags.job), _as_plan_flags(flags))
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
    return RunRecipe(recipe=recipe, settings=shown, plan_number=flags.plan)


def fixed_fields(wanted: RunRecipe) -> dict[str, Any]:
    """Strategy fields that recipe and `--set` have decided."""
    settings = read_settings([f"{name}={value}" for name, value in wanted.settings.items()])
    return wanted.recipe.fixed_strategy() | settings


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
