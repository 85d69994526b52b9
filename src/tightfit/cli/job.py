"""What `plan` is asked: a model or a recipe, with the flags laid over it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.cli import choices
from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.settings import read_settings
from tightfit.core.errors import UsageError
from tightfit.core.recipe import Recipe, RecipeMethod, read_recipe
from tightfit.core.workload import DataProfile
from tightfit.data.profile import profile_dataset
from tightfit.models.resolve import resolve_model
from tightfit.planning.request import JobRequest

RECIPE_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, and the hardware that was named with it."""

    request: JobRequest
    on: str | None


def read_job(flags: PlanFlags) -> Job:
    """The recipe where one is named, else a bare model; flags win over the recipe."""
    recipe = _lay_over(_read_base(flags.job), flags)
    fixed = recipe.fixed_strategy() | read_settings(flags.settings)
    stated: dict[str, Any] = {"seq_len": fixed.pop("seq_len", None)}
    if recipe.effective_batch is not None:
        stated["effective_batch"] = recipe.effective_batch
    request = JobRequest(
        spec=resolve_model(recipe.model), method=recipe.method.value, fixed=fixed, **stated
    )
    paths = (flags.data,) if flags.data is not None else recipe.training_paths
    if paths:
        profile = _profile(paths, seq_len=request.planned_seq_len, model=recipe.model)
        request = replace(request, profile=profile)
    request = replace(request, num_epochs=recipe.num_epochs, max_steps=recipe.max_steps)
    return Job(request=request, on=flags.on or recipe.on)


def _read_base(name: str) -> Recipe:
    if name.lower().endswith(RECIPE_ENDINGS):
        return read_recipe(Path(name).expanduser())
    # The name is checked where it is looked up, with a better message than a length limit.
    return Recipe(model="unnamed").model_copy(update={"model": name})


def _lay_over(recipe: Recipe, flags: PlanFlags) -> Recipe:
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
    try:
        Recipe.model_validate(update | {"model": "unnamed"})
    except ValidationError as fault:
        first = fault.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise UsageError(
            f"`{option} {first['input']}`: {first['msg'][:1].lower()}{first['msg'][1:]}.",
            remedy="tightfit plan --help",
        ) from fault
    return recipe.model_copy(update=update)


def _profile(paths: tuple[Path, ...], *, seq_len: int, model: str) -> DataProfile:
    """Read the data, counting aloud where somebody watches."""
    is_watched = sys.stderr.isatty()

    def tell(num_rows: int) -> None:
        sys.stderr.write(f"\rreading data: {num_rows:,} rows")
        sys.stderr.flush()

    try:
        return profile_dataset(
            paths[0] if len(paths) == 1 else paths,
            seq_len=seq_len,
            model=model,
            progress=tell if is_watched else None,
        )
    finally:
        if is_watched:
            sys.stderr.write("\r\x1b[K")
