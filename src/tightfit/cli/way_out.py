"""The next command after a search that found no plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.repeat import list_given, repeat_plan
from tightfit.cli.settings import name_setting
from tightfit.core.recipe import Recipe
from tightfit.hardware.types import Cluster
from tightfit.planning.hindrance import find_hindrance
from tightfit.planning.known import KnownOutcome
from tightfit.planning.request import JobRequest
from tightfit.planning.search import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class VainSearch:
    """A search that found no plan, and what it was asked."""

    result: SearchResult
    request: JobRequest
    cluster: Cluster
    known: Sequence[KnownOutcome] = ()


def find_way_out(
    vain: VainSearch,
    flags: PlanFlags | TrainFlags,
    recipe: Recipe,
    *,
    is_explained: bool = False,
) -> str:
    """The same without a setting that stands in the way; else other hardware where memory is
    short, and every reason where it is not."""
    place = list_given((("--on", flags.on), ("--network", flags.network)))
    where = f" {shlex.join(place)}" if place else ""
    typed = {name_setting(text): text for text in flags.settings or ()}
    in_file = {name for name, value in recipe.strategy if value is not None}
    # Without `--set` the recipe's own value would come back: what is in both is not looked at.
    names = [name for name in (*typed, *sorted(in_file)) if (name in typed) != (name in in_file)]
    blamed = find_hindrance(vain.request, vain.cluster, names, known=vain.known)
    if blamed and all(name in typed for name in blamed):
        left_out = [typed[name] for name in blamed]
        again = repeat_plan(flags, without=left_out)
        return f"{again}{where}    (without {' '.join(f'--set {text}' for text in left_out)})"
    if blamed:
        return f"leave {', '.join(blamed)} out of {flags.job}"
    if vain.result.shortfall is None and not is_explained:
        return f"{repeat_plan(flags)}{where} --explain    (every reason)"
    return f"{repeat_plan(flags)} --buy    (the cheapest hardware that fits it)"
