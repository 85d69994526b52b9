"""A training job as asked for: a recipe, a model, a saved plan or a run, with options on top."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from tightfit.api.options.training import JobOptions, PlanOptions, TrainingOptions
from tightfit.api.training.settings import (
    list_plan_options,
    read_settings,
    refuse_twice,
    show_value,
)
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.frozen import Frozen
from tightfit.core.new_tokens import NEW_TOKENS, NewTokens
from tightfit.core.objectives import ExampleKind, Objective
from tightfit.core.options import list_given, read_word
from tightfit.core.profiles import DataProfile
from tightfit.core.progress import Progress
from tightfit.core.reading import read_bytes, read_json_file
from tightfit.core.recipe import Recipe, read_recipe
from tightfit.core.settings import RecipeMethod, TrainOn
from tightfit.core.strategy import DataSource
from tightfit.core.text import shorten
from tightfit.core.trackers import TRACKERS
from tightfit.core.trainers import TrainerVersion, find_trainer
from tightfit.data.new_tokens import grow_spec
from tightfit.models.spec import ModelSpec
from tightfit.planning.plan import Plan
from tightfit.planning.request import DEFAULT_EFFECTIVE_BATCH, JobRequest
from tightfit.planning.search import SearchResult
from tightfit.runtime.resolve import resolve_model

if TYPE_CHECKING:
    from tightfit.data.readers import ReadProgress
    from tightfit.runs.run_folder import RunFolder

RECIPE_ENDINGS = (".yaml", ".yml")
MOST_HELD_BACK = 0.5
_OVERLAID = {
    name: name
    for name in (
        *("method", "objective", "seq_len", "epochs", "max_steps", "effective_batch"),
        *("template", "seed", "beta"),
    )
} | {"lr": "learning_rate", "on": "on", "output": "output", "train_on": "train_on"}
"""Options that are a key of the recipe, and the key."""


def read_plan_job(options: PlanOptions) -> tuple[Recipe, JobRequest]:
    """The recipe where one is named, else a bare model, and what it asks of the planner."""
    recipe, settings = _read_asked(options)
    fixed = recipe.fixed_strategy() | settings
    trainer = find_trainer(options.trainer) if options.trainer else None
    request = make_request(
        recipe, resolve_model(recipe.model), fixed, model=recipe.model, trainer=trainer
    )
    sources = training_sources(recipe)
    if sources:
        profile = profile_sources(
            sources,
            seq_len=request.planned_seq_len,
            model=recipe.model,
            example=(recipe.objective or Objective.SFT).record.example,
            progress=options.progress,
        )
        request = replace(request, profile=profile)
    return recipe, request


def make_request(
    recipe: Recipe,
    spec: ModelSpec,
    fixed: dict[str, Any],
    *,
    model: str | Path,
    trainer: TrainerVersion | None = None,
) -> JobRequest:
    """What is asked of the planner, before the data is known; `fixed` is what is not searched.
    `model`: where its tokenizer is looked up."""
    return JobRequest(
        spec=grow_spec(spec, model, read_new_tokens(fixed)),
        method=recipe.method.value,
        seq_len=fixed.get("seq_len"),
        effective_batch=recipe.effective_batch or DEFAULT_EFFECTIVE_BATCH,
        num_epochs=recipe.num_epochs,
        max_steps=recipe.max_steps,
        fixed={name: value for name, value in fixed.items() if name != "seq_len"},
        trainer=trainer,
    )


def read_new_tokens(fixed: dict[str, Any]) -> NewTokens:
    return NewTokens(*(fixed.get(name, ()) for name in NEW_TOKENS))


_PROFILES: dict[Any, tuple[DataProfile, ...]] = {}
"""Of this process: a page that plans while one types asks for the same one again and again."""
MOST_PROFILES = 16


def profile_sources(
    sources: tuple[DataSource, ...],
    *,
    seq_len: int,
    model: str,
    example: ExampleKind = ExampleKind.ANSWER,
    progress: Progress | None = None,
) -> DataProfile:
    """The data's length distribution, from its files."""
    return profile_source_lengths(
        sources, seq_len=seq_len, model=model, example=example, progress=progress
    )[0]


def profile_source_lengths(
    sources: tuple[DataSource, ...],
    *,
    seq_len: int,
    model: str,
    example: ExampleKind = ExampleKind.ANSWER,
    progress: Progress | None = None,
) -> tuple[DataProfile, ...]:
    """The same at other lengths too, behind the one asked for."""
    from tightfit.data.profile import profile_lengths
    from tightfit.data.sources import open_source

    stats = [path.stat() for source in sources for path in open_source(source).inputs]
    changes = tuple((read.st_mtime_ns, read.st_size, read.st_ino) for read in stats)
    key = (sources, seq_len, model, example, changes)
    if key not in _PROFILES:
        reading = report_reading(progress, "reading data")
        profiles = profile_lengths(
            sources, seq_len=seq_len, model=model, example=example, progress=reading
        )
        while len(_PROFILES) >= MOST_PROFILES:
            del _PROFILES[next(iter(_PROFILES))]
        _PROFILES[key] = profiles
    return _PROFILES[key]


def report_reading(progress: Progress | None, what: str) -> Callable[[ReadProgress], None] | None:
    """Progress in bytes, as `data/` reports it."""
    if progress is None:
        return None
    return lambda state: progress(what, state.num_bytes, state.total_bytes)


def training_sources(recipe: Recipe) -> tuple[DataSource, ...]:
    return tuple(source for source in recipe.data if source.split == "train")


def _read_asked(options: JobOptions) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with the options on top, and the fields that `--set` fixes."""
    settings = read_settings(options.settings)
    refuse_twice(settings, {"method": options.method, "seq_len": options.seq_len})
    recipe = lay_over(read_base_recipe(options.job), options)
    weights = (recipe.fixed_strategy() | settings).get("weights")
    if recipe.method is RecipeMethod.QLORA and weights is not None and not weights.is_quantized:
        raise UsageError(
            f"`--method qlora` trains over quantized weights, not {weights.value}.",
            remedy=f"--method lora --set weights={weights.value}",
        )
    return recipe, settings


def read_base_recipe(name: str) -> Recipe:
    if name.lower().endswith(RECIPE_ENDINGS):
        return read_recipe(Path(name).expanduser())
    # The name is checked where it is looked up, with a better message than a length limit.
    return Recipe(model="unnamed").model_copy(update={"model": name})


def lay_over(recipe: Recipe, options: object) -> Recipe:
    """The recipe with the options that were given on top; each verb has some of them."""
    update: dict[str, Any] = {
        key: value
        for name, key in _OVERLAID.items()
        if (value := getattr(options, name, None)) is not None
    }
    if "method" in update:
        update["method"] = RecipeMethod(update["method"])
    if "objective" in update:
        update["objective"] = Objective(update["objective"])
    if "train_on" in update:
        update["train_on"] = TrainOn(update["train_on"])
    if "output" in update:
        update["output"] = str(update["output"])
    if "epochs" in update and "max_steps" in update:
        raise UsageError(
            "--epochs and --max-steps both say how long to train.",
            remedy=f"keep one: --max-steps {update['max_steps']}",
        )
    if "epochs" in update or "max_steps" in update:
        update = {"epochs": None, "max_steps": None} | update
    trackers = getattr(options, "log_to", None)
    if trackers is not None:
        words = [
            read_word(word, (*TRACKERS, "none"), option="--log-to") for word in trackers.split(",")
        ]
        update["log_to"] = tuple(dict.fromkeys(word for word in words if word != "none"))
    data = getattr(options, "data", None)
    if isinstance(data, Path):
        held_out = tuple(source for source in recipe.data if source.split == "eval")
        named = DataSource(path="unnamed").model_copy(update={"path": str(data)})
        recipe = recipe.model_copy(update={"data": (named, *held_out)})
    update |= read_eval(recipe, getattr(options, "eval", None))
    tools = getattr(options, "tools", None)
    if tools is not None:
        sources = update.get("data", recipe.data)
        update["data"] = tuple(one.model_copy(update={"tools": tools}) for one in sources)
    return recipe.model_copy(update=update)


def read_eval(recipe: Recipe, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    trained = training_sources(recipe)
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


def make_absolute(recipe: Recipe) -> Recipe:
    """With absolute paths: a run can be gone on with from another folder."""

    def absolute(path: str) -> str:
        return path if path.startswith("~") else str(Path(path).absolute())

    data = tuple(source.with_paths(absolute) for source in recipe.data)
    # A folder or file that is here; a name in the catalogue or cache stays as it is.
    model = Path(recipe.model)
    name = str(model.absolute()) if model.exists() else recipe.model
    return recipe.model_copy(update={"model": name, "data": data})


def check_recipe(recipe: Recipe, *, needs_data: bool = True) -> None:
    """The recipe's own rules, which an option may have broken."""
    if needs_data and not training_sources(recipe):
        raise UsageError("No data to train on was named.", remedy="--data train.jsonl")
    try:
        Recipe.model_validate(recipe.model_dump())
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{message}.", remedy="tightfit train --help") from error


# A saved plan given as the job: read back, not searched again.

_PLAN_KEYS = {"strategy", "estimate", "hardware", "model"}
MAX_FILE_BYTES = 64 * 2**20


def read_saved_plans(name: str) -> SearchResult | None:
    """What `--save` or `plan --json` wrote; None where the name is no such file."""
    document = _read_json(Path(name).expanduser()) if name.lower().endswith(".json") else None
    if not isinstance(document, dict):
        return None
    written = document.get("plans", [document])
    if not isinstance(written, list) or not written:
        return None
    if not all(isinstance(plan, dict) and plan.keys() >= _PLAN_KEYS for plan in written):
        return None
    try:
        plans = tuple(Plan.model_validate_json(json.dumps(plan)) for plan in written)
    except ValidationError as error:
        maker = written[0].get("tightfit_version", "another version")
        raise InvalidInputError(
            f"{name} is a plan that this version cannot read (written by tightfit {maker}).",
            remedy="plan the model again: tightfit plan MODEL --on HARDWARE --save plan.json",
        ) from error
    return SearchResult(plans=plans, excluded=(), num_considered=0, shortfall=None)


def _read_json(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return read_json_file(path)
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads it as a model says what is wrong with it


def pick_saved_plan(options: TrainingOptions) -> Plan | None:
    """The plan that `--plan` takes of a saved file; None where the job is no such file."""
    saved = read_saved_plans(options.job)
    if saved is None:
        return None
    if options.plan > len(saved.plans):
        raise UsageError(
            f"`--plan {options.plan}`: {options.job} holds {len(saved.plans)} plans.",
            remedy=f"--plan {len(saved.plans)}",
        )
    plan = saved.plans[options.plan - 1]
    refuse_other_trainer(plan, options.job)
    return plan


def refuse_other_trainer(plan: Plan, job: str) -> None:
    """A plan made with `--trainer` is for that trainer to run: ours holds and does other things."""
    if plan.strategy.trainer:
        other = find_trainer(plan.strategy.trainer)
        raise UsageError(
            f"{job} is a plan for {other.title}, which tightfit does not run.",
            remedy=f"{repeat_saved_plan(plan)} --save ours.json    (plans it for tightfit)",
        )


def repeat_saved_plan(plan: Plan) -> str:
    """`tightfit plan` of a saved plan's model, data, hardware and method, to be continued."""
    model, data, hardware = plan.model, plan.data, plan.hardware
    here = "cpu" if hardware.node.gpu.is_cpu else "here"
    words = ["tightfit", "plan", model.source if Path(model.source).exists() else model.name]
    if data is not None and Path(data.source).exists():
        words += ["--data", data.source]
    if hardware.source in ("here", "words"):  # else the name is one of a cluster's own groups
        words += ["--on", hardware.group if hardware.source == "words" else here]
    if plan.strategy.objective is not Objective.SFT:
        words += ["--objective", plan.strategy.objective.value]
    return shlex.join([*words, *list_plan_options(plan.strategy)[:2]])


def refuse_given(options: JobOptions, names: Iterable[str], *, what: str, remedy: str) -> None:
    """Refuse the first of these options that was given: it would change what the job holds."""
    option = next(iter(list_given(options, names)), None)
    if option is not None:
        raise UsageError(f"{options.job} {what}, which {option} cannot change.", remedy=remedy)


# What `train` is asked: a recipe with the options laid over it, kept beside the run.


class RunRecipe(Frozen):
    """Everything that decides what a run learns; `recipe.json` in its folder."""

    recipe: Recipe
    settings: dict[str, str] = Field(default_factory=dict)
    """Of `--set`, as typed."""
    plan_number: int = 1

    def is_same(self, other: RunRecipe) -> bool:
        """Whether both ask for the same training, wherever."""
        return not self.list_differences(other)

    def list_differences(self, other: RunRecipe) -> list[str]:
        """The recipe's keys in which both differ, and `--set` or `--plan`."""
        found = [
            key
            for key in Recipe.model_fields
            # Where a run happens and lies does not make it another one.
            if key not in ("output", "on")
            and getattr(self.recipe, key) != getattr(other.recipe, key)
        ]
        found += ["--set"] if self.settings != other.settings else []
        return found + (["--plan"] if self.plan_number != other.plan_number else [])

    def fixed_strategy(self) -> dict[str, Any]:
        """Strategy fields that recipe and `--set` have decided."""
        typed = [f"{name}={value}" for name, value in self.settings.items()]
        return self.recipe.fixed_strategy() | read_settings(typed)


def read_run_recipe(options: JobOptions, *, needs_data: bool = True) -> RunRecipe:
    """The recipe where one is named, else a bare model; options win over the recipe."""
    recipe, settings = _read_asked(options)
    recipe = make_absolute(recipe)
    check_recipe(recipe, needs_data=needs_data)
    shown = {name: show_value(value) for name, value in settings.items()}
    return RunRecipe(recipe=recipe, settings=shown, plan_number=getattr(options, "plan", 1))


RUN_RECIPE_FILE = "recipe.json"


def read_run_recipe_file(folder: Path) -> RunRecipe | None:
    try:
        return RunRecipe.model_validate_json(read_bytes(folder / RUN_RECIPE_FILE))
    except (OSError, ValidationError):
        return None


def read_training_job(options: TrainingOptions) -> tuple[RunRecipe, Plan | None]:
    """What `train` and `submit` are asked, and the plan where a saved one was named."""
    from tightfit.runs.report import find_run  # loads far more than `plan` needs

    run = find_run(options.job)
    if run is not None:
        return _recipe_of_run(run, options), None
    plan = pick_saved_plan(options)
    if plan is None:
        return read_run_recipe(options), None
    refuse_given(
        options,
        ("method", "objective", "seq_len", "settings", "on", "effective_batch"),
        what="is a saved plan",
        remedy=f"tightfit train {plan.model.name} with the same options    (plans it anew)",
    )
    # Data and learning side may be given beside the plan.
    planned, data = plan.training, options.data
    if data is None and planned is not None and planned.data:
        data = Path(planned.data[0].path)
    name = plan.model.name if planned is None else planned.model_path
    return read_run_recipe(replace(options, job=name, data=data, plan=1)), plan


def _recipe_of_run(run: RunFolder, options: TrainingOptions) -> RunRecipe:
    """A run goes on as it was; only where it runs may change."""
    refuse_changes(options)
    wanted = read_run_recipe_file(run.path)
    if wanted is None:
        raise UsageError(
            f"{options.job} does not hold the recipe it was started with.",
            remedy="start it with the command that began it",
        )
    update = {"output": str(run.path), "on": options.on or wanted.recipe.on}
    return wanted.model_copy(update={"recipe": wanted.recipe.model_copy(update=update)})


def refuse_changes(options: TrainingOptions, *more: str) -> None:
    """Options that would make another run of it."""
    refuse_given(
        options,
        (
            *(
                "data",
                "tools",
                "eval",
                "method",
                "objective",
                "seq_len",
                "epochs",
                "max_steps",
                "lr",
            ),
            *("effective_batch", "beta", "template", "seed", "settings", "output", "log_to"),
            *more,
        ),
        what="is a run",
        remedy=f"tightfit train {options.job}    (goes on with it as it is)",
    )
