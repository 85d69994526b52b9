"""The search for plans, and the next command to try where none was found."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tightfit.api.options.training import PlanOptions, TrainOptions
from tightfit.api.training.recipe import PlanJob
from tightfit.api.training.settings import list_given, name_setting, repeat_plan
from tightfit.core.errors import DoesNotFitError
from tightfit.core.recipe import Recipe
from tightfit.hardware.types import Cluster
from tightfit.planning.known_outcomes import KnownOutcome
from tightfit.planning.search import SearchResult, find_conflicting_settings, search


class NoPlanError(DoesNotFitError):
    """No strategy can run the job on the hardware; `result` says why each was excluded."""

    def __init__(self, problem: str, *, remedy: str, result: SearchResult) -> None:
        super().__init__(problem, remedy=remedy)
        self.result = result


def search_plans(
    job: PlanJob,
    cluster: Cluster,
    options: PlanOptions | TrainOptions,
    *,
    num_plans: int,
    is_exhaustive: bool = False,
    known: Sequence[KnownOutcome] = (),
) -> SearchResult:
    """At least one plan, best first; `known` are outcomes of earlier runs.

    Raises NoPlanError; `options` are repeated in the command of its remedy.
    """
    request, recipe = job.request, job.recipe
    result = search(request, cluster, num_plans=num_plans, is_exhaustive=is_exhaustive, known=known)
    if result.plans:
        return result
    typed = [name_setting(text) for text in options.settings or ()]
    in_recipe = _list_recipe_settings(recipe)
    conflicting = find_conflicting_settings(
        request,
        cluster,
        list(dict.fromkeys((*typed, *in_recipe))),
        # Without `--set`, the recipe's own value for the same setting applies again.
        instead={name: value for name, value in in_recipe.items() if name in typed},
        known=known,
    )
    remedy = suggest_fix(options, recipe, conflicting, is_short=result.shortfall is not None)
    raise NoPlanError(result.failure or "Nothing fits.", remedy=remedy, result=result)


def suggest_fix(
    options: PlanOptions | TrainOptions,
    recipe: Recipe,
    conflicting: Sequence[str],
    *,
    is_short: bool,
) -> str:
    """The same job without the conflicting settings; without any, other hardware or all reasons.

    `is_short`: memory alone is missing, so that other hardware helps.
    """
    where = _repeat_hardware(options, recipe)
    typed = [name_setting(text) for text in options.settings or ()]
    left_out = [text for text in options.settings or () if name_setting(text) in conflicting]
    settings = " ".join(f"--set {shlex.quote(text)}" for text in left_out)
    edited = ", ".join(name for name in conflicting if name not in typed)
    if edited and settings:
        return f"leave {edited} out of {options.job}, and {settings} out of the command"
    if edited:
        return f"leave {edited} out of {options.job}"
    if settings:
        return f"{repeat_plan(options, without=left_out)}{where}    (without {settings})"
    is_explained = isinstance(options, PlanOptions) and options.explain
    if not is_short and not is_explained:
        return f"{repeat_plan(options)}{where} --explain    (every reason)"
    return f"{repeat_plan(options)} --buy    (the cheapest hardware that fits it)"


def _repeat_hardware(options: PlanOptions | TrainOptions, recipe: Recipe) -> str:
    """The hardware as it was typed; `plan` wants it named where `train` means this machine."""
    is_here = isinstance(options, TrainOptions) and recipe.on is None
    on = options.on or ("here" if is_here else None)
    words = list_given((("--on", on), ("--network", options.network)))
    return f" {shlex.join(words)}" if words else ""


def _list_recipe_settings(recipe: Recipe) -> dict[str, object]:
    """Strategy settings that the recipe fixes, with their values."""
    levers = {name: value for name, value in recipe.strategy if value is not None}
    return levers if recipe.packing is None else {**levers, "packing": recipe.packing}
