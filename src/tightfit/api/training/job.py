"""From a training request to the plan that will run, with its encoded data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.api.options.training import TrainOptions
from tightfit.api.training.data import encode_for
from tightfit.api.training.hardware import find_hardware
from tightfit.api.training.recipe import PlanJob, RunRecipe, fixed_fields
from tightfit.api.training.search import search_plans
from tightfit.api.training.tracing import trace_search
from tightfit.core.errors import UsageError
from tightfit.core.recipe import make_training
from tightfit.core.settings import names_where
from tightfit.core.strategy import Method
from tightfit.core.text import count_of
from tightfit.data.encode import EncodedDataset
from tightfit.data.profile import profile_from_store
from tightfit.hardware.types import Cluster
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.planning.known_outcomes import KnownOutcome
from tightfit.planning.plan import Plan
from tightfit.planning.request import DEFAULT_EFFECTIVE_BATCH, JobRequest
from tightfit.planning.search import NUM_PLANS, SearchResult

SAME_TRAINING = names_where(changes_learning=True)
"""Fields that decide what is learnt: they stay when a run goes on with other hardware."""

REPORTED_FINDINGS = ("empty-answer", "answer-cut-off", "truncated", "in-both")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A plan to run and its encoded data."""

    plan: Plan
    encoded: EncodedDataset

    def keep(self, plan: Plan) -> PlannedJob:
        """The same data under a plan as it was."""
        return replace(self, plan=plan)


def plan_job(
    wanted: RunRecipe,
    options: TrainOptions,
    *,
    cluster: Cluster | None = None,
    cache: Path | None = None,
    begun: Plan | None = None,
) -> PlannedJob:
    """Find the model, encode the data, search.

    `cluster` is where a submitted job will run; None: what `--on` means here. `begun` is the
    plan of a run that goes on with other hardware: what it learns stays.
    """
    from tightfit.runtime.model_files import locate_model

    recipe = wanted.recipe
    folder = locate_model(recipe.model, needs_weights=not recipe.random_weights)
    if cluster is None:
        cluster = find_hardware(options, recipe.on)
    training = {
        method: make_training(recipe, method=method, model_path=folder)
        for method in (Method.FULL, Method.LORA)
    }
    request = make_job_request(wanted, options, read_spec(recipe.model, folder), begun)
    encoded = encode_for(
        training[Method.LORA],  # the data side is the same for every method
        model_folder=folder,
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
    num_plans = max(NUM_PLANS, wanted.plan_number)
    result = search_plans(
        PlanJob(request=request, on=recipe.on, recipe=recipe),
        cluster,
        options,
        num_plans=num_plans,
        known=recall_outcomes(request.spec),
    )
    result = trace_search(result, asked=None, progress=options.progress).result
    return PlannedJob(plan=_warn(_pick(result, wanted), encoded), encoded=encoded)


def make_job_request(
    wanted: RunRecipe, options: TrainOptions, spec: ModelSpec, begun: Plan | None = None
) -> JobRequest:
    """What is asked of the planner, before the data is known."""
    recipe, fixed = wanted.recipe, fixed_fields(wanted)
    batch = recipe.effective_batch or DEFAULT_EFFECTIVE_BATCH
    if begun is not None:
        fixed |= {name: getattr(begun.strategy, name) for name in SAME_TRAINING}
        fixed["seq_len"] = encoded_len(begun)
        batch = begun.effective_batch
    if options.nodes > 1:
        fixed["num_nodes"] = options.nodes
    return JobRequest(
        spec=spec,
        method=recipe.method.value,
        seq_len=fixed.pop("seq_len", None),
        effective_batch=batch,
        num_epochs=recipe.num_epochs,
        max_steps=recipe.max_steps,
        fixed=fixed,
    )


def reuse_plan(
    saved: Plan, wanted: RunRecipe, options: TrainOptions, *, cache: Path | None = None
) -> PlannedJob:
    """A saved plan as it is, with the data and the learning side that were asked for."""
    from tightfit.runtime.model_files import locate_model

    folder = locate_model(wanted.recipe.model, needs_weights=not wanted.recipe.random_weights)
    training = make_training(wanted.recipe, method=saved.strategy.method, model_path=folder)
    encoded = encode_for(
        training,
        model_folder=folder,
        seq_len=encoded_len(saved),
        cache=cache,
        progress=options.progress,
    )
    profile = profile_from_store(encoded.train)
    update = {"training": training, "data": profile, "num_epochs": wanted.recipe.num_epochs}
    return PlannedJob(plan=_warn(saved.model_copy(update=update), encoded), encoded=encoded)


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


def recall_outcomes(spec: ModelSpec) -> list[KnownOutcome]:
    """Outcomes of earlier runs of this model that bear on planning."""
    from tightfit.runs.store import read_outcomes

    return [
        KnownOutcome(
            model_name=outcome.model_name,
            gpu_name=outcome.gpu_name,
            strategy=outcome.strategy,
            status="finished" if outcome.status.value == "finished" else "out-of-memory",
            peak_bytes=outcome.measured_peak_bytes,
            date=outcome.date,
        )
        for outcome in read_outcomes(model=spec.name)
        if outcome.status.value in ("finished", "out-of-memory")
    ]


def _pick(result: SearchResult, wanted: RunRecipe) -> Plan:
    number = wanted.plan_number
    if number > len(result.plans):
        raise UsageError(
            f"`--plan {number}`: there are only {len(result.plans)} plans.",
            remedy=f"--plan {len(result.plans)}",
        )
    return result.plans[number - 1]
