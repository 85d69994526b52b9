"""From a training request to the plan that will run, with its encoded data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.api.options.training import TrainingOptions
from tightfit.api.plan import search_plans
from tightfit.api.training.hardware import find_hardware
from tightfit.api.training.recipe import (
    RunRecipe,
    make_request,
    read_new_tokens,
    report_reading,
)
from tightfit.api.training.tracing import trace_search
from tightfit.core.errors import UsageError
from tightfit.core.objectives import Objective
from tightfit.core.progress import Progress
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.settings import Method, names_where
from tightfit.core.strategy import Training
from tightfit.core.text import count_of
from tightfit.data.encode import EncodedDataset, EncodeRequest, encode_dataset
from tightfit.data.new_tokens import with_new_tokens
from tightfit.data.profile import profile_from_store
from tightfit.hardware.types import Cluster
from tightfit.models.spec import ModelSpec
from tightfit.planning.plan import Plan
from tightfit.planning.search import NUM_PLANS
from tightfit.runtime.resolve import resolve_model

REPORTED_FINDINGS = ("empty-answer", "answer-cut-off", "truncated", "in-both")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A plan to run and its encoded data."""

    plan: Plan
    encoded: EncodedDataset


def plan_job(
    wanted: RunRecipe,
    options: TrainingOptions,
    *,
    cluster: Cluster | None = None,
    cache: Path | None = None,
    begun: Plan | None = None,
) -> PlannedJob:
    """Find the model, encode the data, search.

    `cluster` is where a submitted job will run; None: what `--on` means here. `begun` is the
    plan of a run that goes on with other hardware: what it learns stays.
    """
    recipe = wanted.recipe
    folder = _locate_model(recipe)
    if cluster is None:
        cluster = find_hardware(options, recipe.on)
    training = {
        method: make_training(recipe, method=method, model_path=folder)
        for method in (Method.FULL, Method.LORA)
    }
    fixed = wanted.fixed_strategy()
    if (options.nodes or 1) > 1:
        fixed["num_nodes"] = options.nodes
    if begun is not None:
        kept = names_where(changes_learning=True)
        fixed |= {name: getattr(begun.strategy, name) for name in kept}
        fixed["seq_len"] = encoded_len(begun)
        recipe = recipe.model_copy(update={"effective_batch": begun.effective_batch})
    request = make_request(recipe, read_spec(recipe.model, folder), fixed, model=folder)
    encoded = encode_for(
        training[Method.LORA],  # the data side is the same for every method
        objective=recipe.objective or Objective.SFT,
        model_folder=with_new_tokens(folder, read_new_tokens(fixed)),
        seq_len=request.planned_seq_len,
        cache=cache,
        progress=options.progress,
    )
    request = replace(
        request,
        seq_len=request.planned_seq_len,
        profile=profile_from_store(encoded.train),
        training=training,
    )
    number = wanted.plan_number
    result = search_plans(request, recipe, cluster, options, num_plans=max(NUM_PLANS, number))
    num_plans = len(result.plans)
    if number > num_plans:
        raise UsageError(
            f"`--plan {number}`: there are only {num_plans} plans.", remedy=f"--plan {num_plans}"
        )
    chosen = replace(result, plans=result.plans[number - 1 :])
    traced = trace_search(chosen, num_traced=1, progress=options.progress)
    plan = traced.result.plans[0]
    learnt = _make_training(recipe, plan, folder)  # by the optimizer that the search chose
    return PlannedJob(
        plan=_warn(plan.model_copy(update={"training": learnt}), encoded), encoded=encoded
    )


def reuse_plan(
    saved: Plan, wanted: RunRecipe, options: TrainingOptions, *, cache: Path | None = None
) -> PlannedJob:
    """A saved plan as it is, with the data and the learning side that were asked for."""
    folder = _locate_model(wanted.recipe)
    training = _make_training(wanted.recipe, saved, folder)
    encoded = encode_for(
        training,
        objective=saved.strategy.objective,
        model_folder=with_new_tokens(folder, saved.strategy.new_tokens),
        seq_len=encoded_len(saved),
        cache=cache,
        progress=options.progress,
    )
    profile = profile_from_store(encoded.train)
    update = {"training": training, "data": profile, "num_epochs": wanted.recipe.num_epochs}
    return PlannedJob(plan=_warn(saved.model_copy(update=update), encoded), encoded=encoded)


def _make_training(recipe: Recipe, plan: Plan, folder: Path) -> Training:
    chosen = plan.strategy
    return make_training(
        recipe.model_copy(update={"objective": chosen.objective}),
        method=chosen.method,
        optimizer=chosen.optimizer,
        model_path=folder,
    )


def encode_for(  # noqa: PLR0913
    training: Training,
    *,
    objective: Objective = Objective.SFT,
    model_folder: Path,
    seq_len: int,
    cache: Path | None = None,
    skip_invalid: bool = False,
    progress: Progress | None = None,
) -> EncodedDataset:
    """Encode the data as a run reads it, or find it encoded."""
    request = EncodeRequest(
        sources=training.data,
        model_folder=model_folder,
        template=training.template,
        train_on=training.train_on,
        objective=objective,
        seq_len=seq_len,
        eval_fraction=training.eval_fraction,
        seed=training.seed,
        cache=cache,
        skip_invalid=skip_invalid,
    )
    return encode_dataset(request, progress=report_reading(progress, "encoding data"))


def _locate_model(recipe: Recipe) -> Path:
    from tightfit.runtime.model_files import locate_model

    return locate_model(recipe.model, needs_weights=not recipe.random_weights)


def _warn(plan: Plan, encoded: EncodedDataset) -> Plan:
    """The plan with a warning for each kind of row that trains less than it seems to."""
    warnings = [
        f"{count_of(finding.num_rows, 'row')}: {finding.says}    (tightfit prepare lists them)"
        for finding in encoded.report.findings
        if finding.kind in REPORTED_FINDINGS
    ]
    return plan.model_copy(update={"warnings": (*plan.warnings, *warnings)})


def encoded_len(plan: Plan) -> int:
    """Where rows are cut; the strategy's own length ends at the longest row."""
    return plan.strategy.seq_len if plan.data is None else plan.data.seq_len


def read_spec(name: str, folder: Path) -> ModelSpec:
    """The architecture of the files that are trained, under the name that the user knows."""
    spec = resolve_model(str(folder))
    return spec.model_copy(update={"name": resolve_model(name).name})
