"""The next command to try where a search found no plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.cli.flags.training import PlanFlags, TrainFlags
from tightfit.cli.training.command_line import list_given, name_setting, repeat_plan
from tightfit.core.recipe import Recipe
from tightfit.hardware.types import Cluster
from tightfit.planning.known_outcomes import KnownOutcome
from tightfit.planning.request import JobRequest
from tightfit.planning.search import SearchResult, find_conflicting_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlanError:
    """A search that found no plan, and what it was asked."""

    result: SearchResult
    request: JobRequest
    cluster: Cluster
    known: Sequence[KnownOutcome] = ()


def suggest_fix(
    vain: NoPlanError,
    flags: PlanFlags | TrainFlags,
    recipe: Recipe,
    *,
    is_explained: bool = False,
) -> str:
    """The same without a setting that stands in the way; else other hardware where memory is
    short, and every reason where it is not."""
    where = _repeat_place(flags, recipe)
    typed = [name_setting(text) for text in flags.settings or ()]
    in_file = _list_stated(recipe)
    blamed = find_conflicting_settings(
        vain.request,
        vain.cluster,
        list(dict.fromkeys((*typed, *in_file))),
        # Where `--set` stood over the recipe, the recipe's own value comes back.
        instead={name: value for name, value in in_file.items() if name in typed},
        known=vain.known,
    )
    left_out = [text for text in flags.settings or () if name_setting(text) in blamed]
    settings = " ".join(f"--set {shlex.quote(text)}" for text in left_out)
    edited = ", ".join(name for name in blamed if name not in typed)
    if edited and settings:
        return f"leave {edited} out of {flags.job}, and {settings} out of the command"
    if edited:
        return f"leave {edited} out of {flags.job}"
    if settings:
        return f"{repeat_plan(flags, without=left_out)}{where}    (without {settings})"
    if vain.result.shortfall is None and not is_explained:
        return f"{repeat_plan(flags)}{where} --explain    (every reason)"
    return f"{repeat_plan(flags)} --buy    (the cheapest hardware that fits it)"


def _repeat_place(flags: PlanFlags | TrainFlags, recipe: Recipe) -> str:
    """The hardware as it was typed; `plan` wants it named where `train` means this machine."""
    is_here = isinstance(flags, TrainFlags) and recipe.on is None
    on = flags.on or ("here" if is_here else None)
    words = list_given((("--on", on), ("--network", flags.network)))
    return f" {shlex.join(words)}" if words else ""


def _list_stated(recipe: Recipe) -> dict[str, object]:
    """Levers that the recipe fixes, with their values; what is to be learnt is not one."""
    levers = {name: value for name, value in recipe.strategy if value is not None}
    return levers if recipe.packing is None else {**levers, "packing": recipe.packing}
