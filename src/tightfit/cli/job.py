"""What `plan` is asked: a model or a recipe, with the flags laid over it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.cli import choices
from tightfit.cli.describe import count_of
from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.settings import read_settings, refuse_twice
from tightfit.cli.terminal.output import write_err
from tightfit.core.errors import UsageError
from tightfit.core.recipe import Recipe, RecipeMethod, read_recipe
from tightfit.core.training import DataSource
from tightfit.core.workload import DataProfile
from tightfit.models.resolve import resolve_model
from tightfit.planning.request import JobRequest

if TYPE_CHECKING:
    from tightfit.data.meter import ReadProgress

RECIPE_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, and the hardware that was named with it."""

    request: JobRequest
    on: str | None
    recipe: Recipe
    """What was asked, flags and file together."""


def read_job(flags: PlanFlags) -> Job:
    """The recipe where one is named, else a bare model; flags win over the recipe."""
    settings = read_settings(flags.settings)
    refuse_twice(settings, {"method": flags.method, "seq_len": flags.seq_len})
    recipe = lay_over(read_base(flags.job), flags)
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
    return Job(request=request, on=flags.on or recipe.on, recipe=recipe)


def read_base(name: str) -> Recipe:
    if name.lower().endswith(RECIPE_ENDINGS):
        return read_recipe(Path(name).expanduser())
    # The name is checked where it is looked up, with a better message than a length limit.
    return Recipe(model="unnamed").model_copy(update={"model": name})


def lay_over(recipe: Recipe, flags: PlanFlags) -> Recipe:
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
