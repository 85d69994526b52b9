"""`plan`: the best ways to run a job on given hardware; `longest`: the longest row that fits there;
`buy`: the hardware to rent for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import JobOptions, PlanOptions
from tightfit.api.training.hardware import find_cluster, limit_cluster, state_network
from tightfit.api.training.recipe import (
    profile_source_lengths,
    read_plan_job,
    read_saved_plans,
    refuse_given,
    repeat_saved_plan,
    training_sources,
)
from tightfit.api.training.settings import name_setting, refuse_trace, repeat_plan
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.objectives import Objective
from tightfit.core.options import repeat_options
from tightfit.core.profiles import DataProfile
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.settings import Method
from tightfit.estimation.result import Verdict
from tightfit.hardware.types import Cluster
from tightfit.planning.buying import Offer, buying_guide
from tightfit.planning.filter import KnownOutcome
from tightfit.planning.longest import LongestRow, describe_length_notes, find_longest_rows
from tightfit.planning.plan import Exclusion, Plan, RequiredPackage, list_missing_packages
from tightfit.planning.request import JobRequest
from tightfit.planning.search import SearchResult, find_conflicting_settings, search

if TYPE_CHECKING:
    from tightfit.trace.result import TracedMemory


# The search for plans, and the next command to try where none was found.


class NoPlanError(DoesNotFitError):
    """No strategy can run the job on the hardware; `result` says why each was excluded."""

    def __init__(self, problem: str, *, remedy: str, result: SearchResult) -> None:
        super().__init__(problem, remedy=remedy)
        self.result = result


def search_plans(
    request: JobRequest,
    recipe: Recipe,
    cluster: Cluster,
    options: JobOptions,
    *,
    num_plans: int,
    is_exhaustive: bool = False,
) -> SearchResult:
    """At least one plan, best first. Raises NoPlanError, with `options` repeated in its remedy.

    Outcomes of earlier runs count for a job that runs here, not for a plan that is only asked for.
    """
    known: Sequence[KnownOutcome] = ()
    if not isinstance(options, PlanOptions):
        from tightfit.runs.store import known_outcomes  # loads far more than `plan` needs

        known = known_outcomes(request.spec.name)
    result = search(request, cluster, num_plans=num_plans, is_exhaustive=is_exhaustive, known=known)
    if result.plans:
        return result
    typed = [name_setting(text) for text in options.settings or ()]
    in_recipe = {name: value for name, value in recipe.strategy if value is not None}
    if recipe.packing is not None:
        in_recipe["packing"] = recipe.packing
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
    options: JobOptions, recipe: Recipe, conflicting: Sequence[str], *, is_short: bool
) -> str:
    """The same job without the conflicting settings; without any, other hardware or all reasons.

    `is_short`: memory alone is missing, so that other hardware helps.
    """
    # The hardware as it was typed; `plan` wants it named where `train` means this machine.
    is_here = not isinstance(options, PlanOptions) and recipe.on is None
    on = options.on or ("here" if is_here else None)
    hardware = repeat_options({"--on": on, "--network": getattr(options, "network", None)})
    where = f" {shlex.join(hardware)}" if hardware else ""
    typed = {text: name_setting(text) for text in options.settings or ()}
    left_out = [text for text, name in typed.items() if name in conflicting]
    settings = shlex.join(repeat_options({"--set": left_out}))
    edited = ", ".join(name for name in conflicting if name not in typed.values())
    if edited and settings:
        return f"leave {edited} out of {options.job}, and {settings} out of the command"
    if edited:
        return f"leave {edited} out of {options.job}"
    if settings:
        return f"{repeat_plan(options, without=left_out)}{where}    (without {settings})"
    if not is_short and not (isinstance(options, PlanOptions) and options.explain):
        return f"{repeat_plan(options)}{where} --explain    (every reason)"
    return f"{repeat_plan(options)} --buy    (the cheapest hardware that fits it)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Plans, best first, and what was excluded."""

    search: SearchResult
    cluster: Cluster | None
    """None: the plans were read from a file."""
    traces: tuple[TracedMemory | None, ...] = ()
    """Of the first plans, where they were traced."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        return self.search.plans

    @property
    def best(self) -> Plan:
        return self.search.plans[0]

    @property
    def excluded(self) -> tuple[Exclusion, ...]:
        return tuple(self.search.excluded)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuyResult:
    """Offers, cheapest first."""

    offers: list[Offer]
    request: JobRequest
    on: str | None
    """Hardware that the recipe names, which is not looked at."""


def list_config_files(plan: Plan, saved_as: Path) -> dict[Path, str]:
    """The plan as its trainer's own configuration: files beside the saved plan, and their text."""
    if not plan.strategy.trainer:
        return {}
    from tightfit.planning.trainer_configs import write_configs  # loads YAML, which few plans need

    texts = write_configs(plan, saved_as.name.removesuffix(".json"))
    return {saved_as.with_name(name): text for name, text in texts.items()}


@accepts_keywords(PlanOptions)
def plan(options: PlanOptions) -> PlanResult:
    """Search the plans of a job, or read those of a saved file. Raises NoPlanError."""
    saved = read_saved_plans(options.job)
    if saved is not None:
        refuse_given(
            options,
            (
                *("on", "network", "seq_len", "data", "method", "objective", "epochs"),
                *("effective_batch", "settings", "explain", "trainer"),
            ),
            what="is a saved plan",
            remedy=_suggest_new_plan(saved.plans[0]),
        )
        return PlanResult(search=saved, cluster=None)
    refuse_trace(options.trainer, is_traced=options.trace)
    recipe, request = read_plan_job(options)
    cluster = _find_cluster(options, recipe)
    result = search_plans(request, recipe, cluster, options, num_plans=options.top)
    result = warn_of_missing_packages(result)
    if options.trainer:  # its configuration says how it learns
        result = replace(result, plans=tuple(_with_training(one, recipe) for one in result.plans))
    if not options.trace:
        return PlanResult(search=_offer_trace(result, options), cluster=cluster)
    # Loaded only where a trace was asked for: `plan` answers in about a second without it.
    from tightfit.api.training.tracing import trace_search

    # All that are shown: traced and untraced figures do not make one ranking.
    traced = trace_search(result, asked=True, num_traced=options.top, progress=options.progress)
    return PlanResult(search=traced.result, cluster=cluster, traces=tuple(traced.traces))


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCost:
    """What one `seq_len` costs, and what it cuts."""

    profile: DataProfile
    plan: Plan | None
    """The best for that length: of the first plan's method, weights and sharding where these fit.
    None: nothing fits."""


MOST_LENGTHS = 6


def compare_lengths(options: PlanOptions, found: PlanResult) -> tuple[LengthCost, ...]:
    """What other lengths would cost than the one that was planned with, shortest first; none
    without data, or where one length alone makes sense."""
    cluster = found.cluster
    if cluster is None or found.best.data is None:
        return ()
    recipe, request = read_plan_job(options)
    asked, *others = profile_source_lengths(
        training_sources(recipe),
        seq_len=request.planned_seq_len,
        model=recipe.model,
        example=(recipe.objective or Objective.SFT).record.example,
    )
    others = sorted(others, key=lambda profile: -profile.seq_len)[:MOST_LENGTHS]
    costs = [LengthCost(profile=asked, plan=found.best)]
    costs += [
        LengthCost(profile=one, plan=_plan_length(request, cluster, found.best, one))
        for one in others
    ]
    return tuple(sorted(costs, key=lambda cost: cost.profile.seq_len)) if others else ()


_KEPT = ("weights", "compute", "adapter_dtype", "optimizer", "sharding", "offload")
"""What the plans of other lengths share with the first, if they can."""


def _plan_length(
    request: JobRequest, cluster: Cluster, best: Plan, profile: DataProfile
) -> Plan | None:
    asked = replace(request, seq_len=profile.seq_len, profile=profile)
    kept = {name: getattr(best.strategy, name) for name in (*_KEPT, "num_nodes", "gpus_per_node")}
    method = best.strategy.method.value
    if best.strategy.weights is Dtype.NF4 and best.strategy.method is Method.LORA:
        method = "qlora"
    group = [one for one in cluster.groups if one.name == best.hardware.group]
    alike = search(
        replace(asked, method=method, fixed={**kept, **request.fixed}),
        cluster.model_copy(update={"groups": tuple(group)}),
        num_plans=1,
    )
    plans = alike.plans or search(asked, cluster, num_plans=1).plans
    return plans[0] if plans else None


def _with_training(plan: Plan, recipe: Recipe) -> Plan:
    chosen = plan.strategy
    training = make_training(
        recipe, method=chosen.method, model_path=recipe.model, optimizer=chosen.optimizer
    )
    return plan.model_copy(update={"training": training})


def _find_cluster(options: PlanOptions, recipe: Recipe) -> Cluster:
    cluster = find_cluster(recipe.on)
    if cluster is None:
        raise UsageError(
            "No GPU is here, and --on was not given.",
            remedy=f"{repeat_plan(options)} --on 4xV100-32GB    (--on cpu for this machine; --buy "
            "for what to rent)",
        )
    return limit_cluster(state_network(cluster, options.network), options)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestResult:
    """The longest row under each set of levers, each with all those before it."""

    rows: tuple[LongestRow, ...]
    request: JobRequest
    cluster: Cluster
    notes: tuple[str, ...]

    @property
    def longest(self) -> LongestRow:
        return max(self.rows, key=lambda row: row.seq_len)


@accepts_keywords(PlanOptions)
def longest(options: PlanOptions) -> LongestResult:
    """How long a row fits on the hardware, and how fast it is. Raises NoPlanError."""
    saved = read_saved_plans(options.job)
    if saved is not None:
        raise UsageError(
            f"{options.job} is a saved plan, whose rows have a length.",
            remedy=_suggest_new_plan(saved.plans[0]),
        )
    recipe, request = read_plan_job(options)
    cluster = _find_cluster(options, recipe)
    rows = find_longest_rows(request, cluster)
    if not any(row.seq_len for row in rows):  # says why
        search_plans(request, recipe, cluster, options, num_plans=1)
    notes = (*cluster.warnings, *describe_length_notes(request, rows))
    return LongestResult(rows=rows, request=request, cluster=cluster, notes=notes)


def _offer_trace(result: SearchResult, options: PlanOptions) -> SearchResult:
    """With a warning where the formulas' error could change the first plan's verdict."""
    best = result.plans[0]
    is_ours = not best.hardware.node.gpu.is_cpu and not best.strategy.trainer
    if best.estimate.verdict is not Verdict.TIGHT or not is_ours:
        return result
    command = shlex.join(repeat_options({"--on": options.on, "--network": options.network}))
    warning = (
        "tight by formula, whose error is of the same size: "
        f"{repeat_plan(options)} {command} --trace    (the very step on fake tensors, minutes)"
    )
    best = best.model_copy(update={"warnings": (*best.warnings, warning)})
    return replace(result, plans=(best, *result.plans[1:]))


@accepts_keywords(PlanOptions)
def buy(options: PlanOptions) -> BuyResult:
    """The hardware with a known price that does the job, by price per run."""
    saved = read_saved_plans(options.job)
    if saved is not None:
        raise UsageError(
            f"{options.job} is a saved plan, which --buy cannot change.",
            remedy=_suggest_new_plan(saved.plans[0]),
        )
    recipe, request = read_plan_job(options)
    return BuyResult(offers=buying_guide(request), request=request, on=recipe.on)


def _suggest_new_plan(plan: Plan) -> str:
    trainer = f" --trainer {plan.strategy.trainer}" if plan.strategy.trainer else ""
    return f"{repeat_saved_plan(plan)}{trainer}    (plans it anew)"


def find_missing_packages(plan: Plan) -> tuple[RequiredPackage, ...]:
    """Packages that the plan needs and this machine lacks; none for a plan of another machine."""
    if plan.hardware.source != "here":
        return ()
    from tightfit.hardware import machine

    return list_missing_packages(plan.strategy, machine.read_version)


def warn_of_missing_packages(result: SearchResult) -> SearchResult:
    """Each plan with a warning for each package that it lacks here."""

    def warn(plan: Plan) -> Plan:
        warnings = [
            f"needs {need.package}, which is not installed here: {need.command}"
            for need in find_missing_packages(plan)
        ]
        return plan.model_copy(update={"warnings": (*plan.warnings, *warnings)})

    return replace(result, plans=tuple(warn(plan) for plan in result.plans))
