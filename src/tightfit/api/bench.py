"""`bench`: run plans for a few steps each and compare prediction with measurement."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import DEFAULT_LEVERS, BenchOptions, TrainOptions
from tightfit.api.training.data import encode_for, profile_sources
from tightfit.api.training.hardware import ELSEWHERE, find_hardware, limiting, read_limit
from tightfit.api.training.job import encoded_len, make_job_request, read_spec, recall_outcomes
from tightfit.api.training.recipe import (
    PlanJob,
    RunRecipe,
    read_run_recipe,
    read_saved_plans,
)
from tightfit.api.training.search import search_plans
from tightfit.api.training.settings import (
    NOT_SEARCHED,
    list_plan_options,
    repeat_bench,
    show_value,
)
from tightfit.api.training.tracing import trace_search
from tightfit.clusters.local.launcher import StopRequest, catch_signals
from tightfit.clusters.local.trial import TrialResult, open_trial_folder, run_trial
from tightfit.clusters.protocol import RunObserver
from tightfit.core.data_profile import DataProfile
from tightfit.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    DoesNotFitError,
    NotFoundError,
    SetupError,
    UsageError,
    UserError,
)
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.strategy import Method, Strategy
from tightfit.core.text import count_of, shorten
from tightfit.core.training import Schedule, Training
from tightfit.data.profile import profile_from_store
from tightfit.data.synthetic import count_rows, draw_lengths, write_synthetic
from tightfit.data.token_store import TokenStore
from tightfit.hardware.types import Cluster
from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model
from tightfit.planning.describe import describe_how, describe_levers
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import NUM_PLANS
from tightfit.runs.bench import (
    Bench,
    Trial,
    TrialStatus,
    compare_trial,
    measure_steps,
    rate_first,
    sort_trials,
)
from tightfit.runs.find import find_run
from tightfit.runs.metrics import Record
from tightfit.runs.run_folder import RunStatus
from tightfit.runs.store import make_outcome, record_outcome

_OWN_OPTIONS = ("method", "seq_len")
"""Settings with options of their own."""
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


_STATUSES = {
    RunStatus.FINISHED: TrialStatus.MEASURED,
    RunStatus.OUT_OF_MEMORY: TrialStatus.OUT_OF_MEMORY,
}


@dataclass(slots=True, kw_only=True)
class _Board:
    """Results so far."""

    options: BenchOptions
    job: BenchJob
    is_limited: bool
    observer: BenchObserver
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    exit_code: int = 0

    def note(self, text: str | None) -> None:
        if text is not None and text not in self.notes:
            self.notes.append(text)

    def make_bench(self) -> Bench:
        node = self.job.plans[0].hardware.node
        return Bench(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            model=self.job.plans[0].model.name,
            hardware=f"{node.num_gpus} x {node.gpu.name}",
            data=self.job.rows.words,
            num_warmup_steps=self.options.warm_up,
            num_steps=self.options.steps,
            has_random_weights=self.job.has_random_weights,
            is_calibrated=node.gpu.measured is not None,
            num_plans=len(self.job.plans),
            trials=sort_trials(self.trials),
            first_over_fastest=rate_first(self.trials),
            notes=tuple(self.notes),
        )


class BenchObserver(Protocol):
    """Told of every plan as it is measured."""

    def open_trial(
        self, rank: int, num_plans: int, plan: Plan
    ) -> AbstractContextManager[RunObserver]:
        """Before a plan runs; what it returns follows the steps."""

    def end_trial(self, trial: Trial) -> None:
        """After a plan was measured, or could not be."""


class _ProgressObserver:
    """Plans as calls of `progress`; steps are not followed."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def open_trial(
        self,
        rank: int,
        num_plans: int,
        plan: Plan,  # noqa: ARG002
    ) -> AbstractContextManager[RunObserver]:
        if self._progress is not None:
            self._progress("measuring plans", rank - 1, num_plans)
        return nullcontext(_NoObserver())

    def end_trial(self, trial: Trial) -> None:
        pass


class _NoObserver:
    def record(self, record: Record) -> None:
        pass

    def line(self, line: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Predicted beside measured, fastest first."""

    bench: Bench
    exit_code: int = 0
    """Not 0: stopped by a signal."""
    error: UserError | None = None
    """Why no plan could be measured."""
    command: str
    """Names the job; followed by a trial's words, it measures that plan again."""


@accepts_keywords(BenchOptions)
def bench(options: BenchOptions) -> BenchResult:
    """Run plans for a few steps each. Raises where none could be measured."""
    result = measure_plans(options, _ProgressObserver(options.progress))
    if result.error is not None:
        raise result.error
    return result


def measure_plans(options: BenchOptions, observer: BenchObserver) -> BenchResult:
    """The same with an observer; an error is part of the result."""
    options = _expand_saved_plan(options)
    if options.out is not None:
        check_writable(options.out)
    limit = read_limit(_as_train_options(options), os.environ)
    require_packages("Measuring", "torch", "transformers", "peft")
    with open_trial_folder() as home:
        job = read_bench_job(options, home)
        board = _Board(options=options, job=job, is_limited=limit is not None, observer=observer)
        _note_surroundings(board)
        with limiting(limit), catch_signals() as stop:
            _try_all(board, home, stop)
    found = board.make_bench()
    return BenchResult(
        bench=found,
        exit_code=board.exit_code,
        error=None if board.exit_code else _find_error(found.trials, options),
        command=repeat_bench(options),
    )


def _expand_saved_plan(options: BenchOptions) -> BenchOptions:
    """The plan is estimated anew for this machine: a prediction for another says nothing here."""
    plan = _find_plan(options.job)
    if plan is None:
        return options
    _refuse_plan_changes(options, plan)
    held = plan.training
    data, template = options.data, options.template
    if held is not None:
        data = data or next((Path(part.path) for part in held.data if part.split == "train"), None)
        template = template or held.template
    words = list_plan_options(plan.strategy)
    return replace(
        options,
        job=plan.model.name if held is None else held.model_path,
        data=data,
        template=template,
        method=words[1],
        seq_len=encoded_len(plan),
        effective_batch=plan.effective_batch,
        settings=[*words[3::2], *_list_unusual(plan.strategy)],
        random_weights=options.random_weights or (held is not None and held.random_weights),
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


def _refuse_plan_changes(options: BenchOptions, plan: Plan) -> None:
    given = {
        "--method": options.method,
        "--seq-len": options.seq_len,
        "--effective-batch": options.effective_batch,
        "--set": options.settings,
        "--top": options.top,
        "--all-levers": options.all_levers or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        name = shlex.quote(plan.model.name)
        raise UsageError(
            f"{options.job} holds one plan, which {option} cannot change.",
            remedy=f"tightfit bench {name} with the same options    (plans it anew)",
        )


def read_bench_job(options: BenchOptions, home: Path) -> BenchJob:
    """Find or draw model and data, and search. `home` is a folder for what is made up."""
    asked = _as_train_options(options)
    wanted = _read_request(options, asked)
    recipe = wanted.recipe
    _refuse_clusters(recipe)
    cluster = find_hardware(asked, recipe.on)
    folder = _find_model(recipe, home)
    request = make_job_request(wanted, asked, read_spec(recipe.model, folder))
    training = _make_training(recipe, folder, num_steps=options.warm_up + options.steps)
    rows = _make_rows(options, recipe, request, training[Method.LORA], cluster, home)
    request = replace(
        request, seq_len=request.planned_seq_len, profile=rows.profile, training=training
    )
    count = options.top or (DEFAULT_LEVERS if options.all_levers else 1)
    result = search_plans(
        PlanJob(request=request, on=recipe.on, recipe=recipe),
        cluster,
        asked,
        num_plans=max(NUM_PLANS, count),
        is_exhaustive=options.all_levers,
        known=recall_outcomes(request.spec),
    )
    plans = trace_search(result, asked=None, progress=options.progress).result.plans
    return BenchJob(
        plans=plans[:count],
        rows=rows,
        cluster=cluster,
        has_random_weights=bool(recipe.random_weights),
    )


def _as_train_options(options: BenchOptions) -> TrainOptions:
    """The same job as `train` would be asked for."""
    return TrainOptions(
        job=options.job,
        data=options.data,
        on=options.on,
        method=options.method,
        seq_len=options.seq_len,
        effective_batch=options.effective_batch,
        template=options.template,
        settings=options.settings,
        memory_limit=options.memory_limit,
    )


def _read_request(options: BenchOptions, asked: TrainOptions) -> RunRecipe:
    wanted = read_run_recipe(asked, needs_data=False)
    if not options.random_weights:
        return wanted
    recipe = wanted.recipe.model_copy(update={"random_weights": True})
    return wanted.model_copy(update={"recipe": recipe})


def _refuse_clusters(recipe: Recipe) -> None:
    named = recipe.on or "here"
    if named.partition(":")[0].strip().casefold() in ELSEWHERE:
        raise UsageError(
            f"`--on {shorten(named)}` is a cluster; `bench` measures where it is started.",
            remedy="--on here",
        )


def _find_model(recipe: Recipe, home: Path) -> Path:
    """The model's folder; one with the catalogue's config alone where weights are drawn."""
    from tightfit.runtime.model_files import locate_model

    try:
        return locate_model(recipe.model, needs_weights=not recipe.random_weights)
    except NotFoundError as error:
        config = read_source_config(resolve_model(recipe.model))
        if config is None:
            raise
        if not recipe.random_weights:
            remedy = "--random-weights    (draws them: they cost the same time and memory)"
            raise NotFoundError(error.problem, remedy=remedy) from error
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
    options: BenchOptions,
    recipe: Recipe,
    request: JobRequest,
    training: Training,
    cluster: Cluster,
    home: Path,
) -> Rows:
    """The data's own rows where they can be encoded, else made-up ones of the same lengths."""
    sources = tuple(source for source in recipe.data if source.split == "train")
    folder, seq_len = Path(training.model_path), request.planned_seq_len
    if sources and not options.synthetic and (folder / "tokenizer.json").is_file():
        encoded = encode_for(
            training, model_folder=folder, seq_len=seq_len, progress=options.progress
        )
        profile = profile_from_store(encoded.train)
        return Rows(
            store=encoded.train, profile=profile, words=f"{profile.num_rows:,} rows of the data"
        )
    num_gpus = max(group.num_nodes * group.node.num_gpus for group in cluster.groups)
    batch = max(request.effective_batch, num_gpus)
    count = count_rows(seq_len, effective_batch=batch, num_steps=options.warm_up + options.steps)
    guessed = None
    if sources:
        guessed = profile_sources(
            sources, seq_len=seq_len, model=recipe.model, progress=options.progress
        )
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


def _note_surroundings(board: _Board) -> None:
    gpu = board.job.plans[0].hardware.node.gpu
    if gpu.measured is None:
        device = " --device cpu" if gpu.is_cpu else ""
        board.note(
            f"{gpu.name} is not calibrated, so times are predicted from figures on paper: "
            f"tightfit calibrate{device}"
        )
    for warning in board.job.cluster.warnings:
        board.note(warning)
    asked, found = board.options.top, len(board.job.plans)
    if asked is not None and found < asked:
        more = "" if board.options.all_levers else "; --all-levers tries more settings"
        board.note(f"--top {asked}: the planner has {count_of(found, 'plan')}{more}")


def _try_all(board: _Board, home: Path, stop: StopRequest) -> None:
    options, plans = board.options, board.job.plans
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    for rank, plan in enumerate(plans, start=1):
        if stop.first is not None:
            board.exit_code = EXIT_INTERRUPTED if stop.first is signal.SIGINT else EXIT_REQUEUE
        elif board.trials and end is not None and time.monotonic() > end:
            board.note(f"--minutes {options.minutes:g} were over before plan {rank}")
            return
        else:
            _try_one(board, home, rank, plan)
        if board.exit_code:
            board.note(f"stopped as asked at plan {rank} of {len(plans)}")
            return


def _try_one(board: _Board, home: Path, rank: int, plan: Plan) -> None:
    options = board.options
    with board.observer.open_trial(rank, len(board.job.plans), plan) as display:
        ended = run_trial(home, plan, board.job.rows.store.folder, display)
    trial = _judge(board, rank, plan, ended)
    if ended.state.status is RunStatus.STOPPED:
        board.exit_code = ended.state.exit_code or EXIT_INTERRUPTED
        if trial.measured is None:
            return
        board.note(
            f"plan {rank}: {trial.measured.num_steps:,} of {options.steps:,} steps were taken"
        )
    board.trials.append(trial)
    board.observer.end_trial(trial)
    _store_outcome(board, plan, ended)
    if options.out is not None:
        with suppress(SetupError):  # reported at the end, after the figures
            write_atomic(options.out, board.make_bench().model_dump_json(indent=2) + "\n")


def _judge(board: _Board, rank: int, plan: Plan, ended: TrialResult) -> Trial:
    """The trial's row: figures, or why there are none."""
    how = describe_how(plan.strategy, is_cpu=plan.hardware.node.gpu.is_cpu)
    row = Trial(
        rank=rank,
        description=f"{how}, {describe_levers(plan.strategy)}",
        strategy=plan.strategy,
        words=list_plan_options(plan.strategy),
        status=_STATUSES.get(ended.state.status, TrialStatus.FAILED),
        predicted_seconds_per_step=plan.estimate.time.seconds_per_step,
        predicted_tokens_per_second=plan.estimate.time.tokens_per_second,
        tier=plan.estimate.time.tier,
    )
    measured = measure_steps(ended.past.steps, num_warmup=board.options.warm_up)
    if measured is not None and ended.state.status in (RunStatus.FINISHED, RunStatus.STOPPED):
        share = board.job.rows.trained_fraction
        compared = compare_trial(plan, ended.past.steps, measured, trained_fraction=share)
        figures = {"status": TrialStatus.MEASURED, "measured": measured, "compared": compared}
        return row.model_copy(update=figures)
    if row.status is TrialStatus.OUT_OF_MEMORY:
        return row.model_copy(update={"problem": "It ran out of memory."})
    error = {
        "problem": ended.state.problem or "The worker failed.",
        "remedy": _choose_remedy(ended),
        "exit_code": ended.state.exit_code,
        "log": ended.log,
    }
    return row.model_copy(update=error)


def _choose_remedy(ended: TrialResult) -> str:
    """The worker's own, unless it names checkpoints and files that a trial does not keep."""
    if ended.state.exit_code in (None, UserError.exit_code, EXIT_BUG) or not ended.state.remedy:
        return "the same command with --json    (`log` has the worker's last lines)"
    return ended.state.remedy


def _store_outcome(board: _Board, plan: Plan, ended: TrialResult) -> None:
    """As `train` does: plans that finished, and plans that were too big for the GPU itself."""
    status = ended.state.status
    if status is RunStatus.FINISHED:
        board.note(record_outcome(make_outcome(plan, status, ended.report)))
    elif status is RunStatus.OUT_OF_MEMORY and not board.is_limited:
        board.note(record_outcome(make_outcome(plan, status)))


def _find_error(trials: Sequence[Trial], options: BenchOptions) -> UserError | None:
    """None where at least one plan was measured: the others are rows of the result."""
    if any(trial.measured for trial in trials):
        return None
    failed = next((trial for trial in trials if trial.status is TrialStatus.FAILED), None)
    if failed is None:
        what = "The plan" if len(trials) == 1 else f"Each of the {len(trials)} plans"
        more = 5 if len(trials) < 5 else 2 * len(trials)
        return DoesNotFitError(
            f"{what} ran out of memory.",
            remedy=f"{repeat_bench(options)} --top {more}    (tries others too)",
        )
    error = UserError(failed.problem or "The worker failed.", remedy=failed.remedy or "--json")
    error.exit_code = failed.exit_code or EXIT_BUG
    return error
