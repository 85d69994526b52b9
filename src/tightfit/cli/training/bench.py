"""What `bench` measures: plans, and the rows that their steps take."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.api.options.training import DEFAULT_LEVERS
from tightfit.cli.flags.training import BenchFlags, TrainFlags
from tightfit.cli.training.command_line import NOT_SEARCHED, list_plan_options, show_value
from tightfit.cli.training.hardware import ELSEWHERE, find_hardware
from tightfit.cli.training.plan import encoded_len, make_job_request, read_spec, search_plans
from tightfit.cli.training.prepare import encode_for
from tightfit.cli.training.request import (
    RunRecipe,
    profile_sources,
    read_run_recipe,
    read_saved_plans,
)
from tightfit.cli.training.tracing import trace_search
from tightfit.core.data_profile import DataProfile
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.files import write_atomic
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.strategy import Method, Strategy
from tightfit.core.text import shorten
from tightfit.core.training import Schedule, Training
from tightfit.data.profile import profile_from_store
from tightfit.data.synthetic import count_rows, draw_lengths, write_synthetic
from tightfit.data.token_store import TokenStore
from tightfit.hardware.types import Cluster
from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import NUM_PLANS
from tightfit.runs.find import find_run

_OWN_OPTIONS = ("method", "seq_len")
"""By options of their own."""


def expand_saved_plan(flags: BenchFlags) -> BenchFlags:
    """The plan is estimated anew for this machine: a prediction for another says nothing here."""
    plan = _find_plan(flags.job)
    if plan is None:
        return flags
    _refuse_plan_changes(flags, plan)
    held = plan.training
    data, template = flags.data, flags.template
    if held is not None:
        data = data or next((Path(part.path) for part in held.data if part.split == "train"), None)
        template = template or held.template
    words = list_plan_options(plan.strategy)
    return replace(
        flags,
        job=plan.model.name if held is None else held.model_path,
        data=data,
        template=template,
        method=words[1],
        seq_len=encoded_len(plan),
        effective_batch=plan.effective_batch,
        settings=[*words[3::2], *_list_unusual(plan.strategy)],
        random_weights=flags.random_weights or (held is not None and held.random_weights),
    )


def _find_plan(name: str) -> Plan | None:
    run = find_run(name)
    if run is not None:
        return run.read_plan()
    saved = read_saved_plans(name)
    return None if saved is None else saved.plans[0]


def _list_unusual(strategy: Strategy) -> list[str]:
    """What a plan's words leave out, as far as it is not what a job has anyway."""
    plainest = Strategy()
    return [
        f"{name}={show_value(getattr(strategy, name))}"
        for name in NOT_SEARCHED
        if name not in _OWN_OPTIONS and getattr(strategy, name) != getattr(plainest, name)
    ]


def _refuse_plan_changes(flags: BenchFlags, plan: Plan) -> None:
    given = {
        "--method": flags.method,
        "--seq-len": flags.seq_len,
        "--effective-batch": flags.effective_batch,
        "--set": flags.settings,
        "--top": flags.top,
        "--all-levers": flags.all_levers or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        name = shlex.quote(plan.model.name)
        raise UsageError(
            f"{flags.job} holds one plan, which {option} cannot change.",
            remedy=f"tightfit bench {name} with the same options    (plans it anew)",
        )


# What `bench` measures: the plans, and the rows that their steps take.

LEARNING_RATE = 1e-9
"""As much work as any other, and no loss can diverge by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the steps are fed with."""

    store: TokenStore
    profile: DataProfile | None
    """None: all rows are full, as `tightfit plan` assumes without data."""
    words: str

    @property
    def trained_fraction(self) -> float:
        about = self.store.description
        return about.num_trained_tokens / about.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """Plans best first, as the planner sees it, ready to run."""

    plans: tuple[Plan, ...]
    rows: Rows
    cluster: Cluster
    has_random_weights: bool


def read_bench_job(flags: BenchFlags, home: Path) -> BenchJob:
    """Find or draw model and data, and search. `home` is a folder for what is made up."""
    asked = as_train_flags(flags)
    wanted = _read_request(flags, asked)
    recipe = wanted.recipe
    _refuse_clusters(recipe)
    cluster = find_hardware(asked, recipe.on)
    folder = _find_model(recipe, home)
    request = make_job_request(wanted, asked, read_spec(recipe.model, folder))
    training = _make_training(recipe, folder, num_steps=flags.warm_up + flags.steps)
    rows = _make_rows(flags, recipe, request, training[Method.LORA], cluster, home)
    request = replace(
        request, seq_len=request.planned_seq_len, profile=rows.profile, training=training
    )
    count = flags.top or (DEFAULT_LEVERS if flags.all_levers else 1)
    result = search_plans(
        request,
        cluster,
        wanted,
        asked,
        num_plans=max(NUM_PLANS, count),
        is_exhaustive=flags.all_levers,
    )
    plans = trace_search(result, asked=None).result.plans
    return BenchJob(
        plans=plans[:count],
        rows=rows,
        cluster=cluster,
        has_random_weights=bool(recipe.random_weights),
    )


def as_train_flags(flags: BenchFlags) -> TrainFlags:
    """The same job as `train` would be asked for."""
    return TrainFlags(
        job=flags.job,
        data=flags.data,
        on=flags.on,
        method=flags.method,
        seq_len=flags.seq_len,
        effective_batch=flags.effective_batch,
        template=flags.template,
        settings=flags.settings,
        memory_limit=flags.memory_limit,
    )


def _read_request(flags: BenchFlags, asked: TrainFlags) -> RunRecipe:
    wanted = read_run_recipe(asked, needs_data=False)
    if not flags.random_weights:
        return wanted
    recipe = wanted.recipe.model_copy(update={"random_weights": True})
    return wanted.model_copy(update={"recipe": recipe})


def _refuse_clusters(recipe: Recipe) -> None:
    said = recipe.on or "here"
    if said.partition(":")[0].strip().casefold() in ELSEWHERE:
        raise UsageError(
            f"`--on {shorten(said)}` is a cluster; `bench` measures where it is started.",
            remedy="--on here",
        )


def _find_model(recipe: Recipe, home: Path) -> Path:
    """The model's folder; one with the catalogue's config alone where weights are drawn."""
    from tightfit.runtime.model_files import locate_model

    try:
        return locate_model(recipe.model, needs_weights=not recipe.random_weights)
    except NotFoundError as fault:
        config = read_source_config(resolve_model(recipe.model))
        if config is None:
            raise
        if not recipe.random_weights:
            remedy = "--random-weights    (draws them: they cost the same time and memory)"
            raise NotFoundError(fault.problem, remedy=remedy) from fault
    folder = home / "model"
    folder.mkdir()
    write_atomic(folder / "config.json", json.dumps(config, indent=1) + "\n")
    return folder


def _make_training(recipe: Recipe, folder: Path, *, num_steps: int) -> dict[Method, Training]:
    """The learning side of a run that is to leave nothing behind."""
    update = {
        "learning_rate": LEARNING_RATE,
        "schedule": Schedule.CONSTANT,
        "max_steps": num_steps,
        "keep_checkpoints": 0,
        "keep_result": False,
        "log_to": (),
    }
    return {
        method: make_training(recipe, method=method, model_path=folder).model_copy(update=update)
        for method in (Method.FULL, Method.LORA)
    }


def _make_rows(
    flags: BenchFlags,
    recipe: Recipe,
    request: JobRequest,
    training: Training,
    cluster: Cluster,
    home: Path,
) -> Rows:
    """The data's own rows where they can be encoded, else made-up ones of the same lengths."""
    sources = tuple(source for source in recipe.data if source.split == "train")
    folder, seq_len = Path(training.model_path), request.planned_seq_len
    if sources and not flags.synthetic and (folder / "tokenizer.json").is_file():
        encoded = encode_for(training, model_folder=folder, seq_len=seq_len)
        profile = profile_from_store(encoded.train)
        return Rows(
            store=encoded.train, profile=profile, words=f"{profile.num_rows:,} rows of the data"
        )
    num_gpus = max(group.num_nodes * group.node.num_gpus for group in cluster.groups)
    batch = max(request.effective_batch, num_gpus)
    count = count_rows(seq_len, effective_batch=batch, num_steps=flags.warm_up + flags.steps)
    guessed = None
    if sources:
        guessed = profile_sources(sources, seq_len=seq_len, model=recipe.model)
        # Short rows may be packed: as many more of them fill a sequence.
        count *= max(1, round(seq_len / guessed.mean_tokens))
    lengths = [seq_len] * count if guessed is None else draw_lengths(guessed, count)
    store = write_synthetic(
        home / "tokens",
        lengths,
        vocab_size=request.spec.vocab_size,
        seq_len=seq_len,
        trained_fraction=(
            1.0 if guessed is None else guessed.num_trained_tokens / guessed.num_tokens
        ),
        is_encoder_decoder=request.spec.is_encoder_decoder,
    )
    if guessed is None:
        return Rows(store=store, profile=None, words=f"random tokens, rows of {seq_len:,}")
    profile = profile_from_store(store)
    words = f"random tokens, rows as long as the data's ({profile.mean_tokens:,.0f} on average)"
    return Rows(store=store, profile=profile, words=words)
