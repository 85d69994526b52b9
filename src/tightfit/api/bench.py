"""`bench`: run plans for a few steps each and compare prediction with measurement."""

from __future__ import annotations

import json
import math
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
from tightfit.api.options.training import DEFAULT_LEVERS, BenchOptions
from tightfit.api.plan import search_plans
from tightfit.api.training.hardware import find_hardware, limiting, read_limit
from tightfit.api.training.job import encode_for, encoded_len, read_spec
from tightfit.api.training.recipe import (
    make_request,
    profile_sources,
    read_new_tokens,
    read_run_recipe,
    read_saved_plans,
    refuse_given,
    refuse_other_trainer,
    training_sources,
)
from tightfit.api.training.settings import (
    NOT_SEARCHED,
    list_plan_options,
    read_settings,
    show_value,
)
from tightfit.api.training.tracing import NUM_TRACED, trace_search
from tightfit.clusters.local.launcher import (
    TrialResult,
    catch_signals,
    open_trial_folder,
    run_trial,
)
from tightfit.clusters.protocol import RunObserver, SilentObserver
from tightfit.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    DoesNotFitError,
    NotFoundError,
    SetupError,
    UserError,
)
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.objectives import Objective
from tightfit.core.options import list_given, repeat_options
from tightfit.core.packages import require_packages
from tightfit.core.profiles import DataProfile
from tightfit.core.progress import Progress
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.settings import Method, Schedule
from tightfit.core.strategy import Strategy, Training
from tightfit.core.text import count_of
from tightfit.data.new_tokens import with_new_tokens
from tightfit.data.profile import profile_from_store
from tightfit.data.token_store import TokenStore, count_rows, draw_lengths, write_synthetic
from tightfit.hardware.types import Cluster
from tightfit.models.catalogue import read_source_config
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
from tightfit.runs.report import find_run
from tightfit.runs.run_folder import RunStatus
from tightfit.runs.store import make_outcome, record_outcome
from tightfit.runtime.resolve import resolve_model

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
    notes: list[str]
    trials: list[Trial] = field(default_factory=list)
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
    """Receives every plan as it is measured."""

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
        return nullcontext(SilentObserver())

    def end_trial(self, trial: Trial) -> None: ...


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
    limit = read_limit(options, os.environ)
    require_packages("Measuring", "torch", "transformers", "peft")
    with open_trial_folder() as home:
        job = read_bench_job(options, home)
        board = _Board(
            options=options,
            job=job,
            is_limited=limit is not None,
            observer=observer,
            notes=_list_notes(options, job),
        )
        end = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
        with limiting(limit), catch_signals() as stop:
            for rank, plan in enumerate(job.plans, start=1):
                if stop.first is not None:
                    is_ctrl_c = stop.first is signal.SIGINT
                    board.exit_code = EXIT_INTERRUPTED if is_ctrl_c else EXIT_REQUEUE
                elif board.trials and time.monotonic() > end:
                    board.note(f"--minutes {options.minutes:g} were over before plan {rank}")
                    break
                else:
                    _try_one(board, home, rank, plan)
                if board.exit_code:
                    board.note(f"stopped as asked at plan {rank} of {len(job.plans)}")
                    break
    found = board.make_bench()
    return BenchResult(
        bench=found,
        exit_code=board.exit_code,
        error=None if board.exit_code else _find_error(found.trials, options),
        command=repeat_bench(options),
    )


def _expand_saved_plan(options: BenchOptions) -> BenchOptions:
    """The plan is estimated anew for this machine: a prediction for another says nothing here."""
    run = find_run(options.job)
    saved = None if run is not None else read_saved_plans(options.job)
    if run is not None:
        plan = run.read_plan()
    elif saved is not None:
        plan = saved.plans[0]
        refuse_other_trainer(plan, options.job)
    else:
        return options
    refuse_given(
        options,
        (
            *("method", "objective", "seq_len", "effective_batch", "settings", "top"),
            "all_levers",
        ),
        what="holds one plan",
        remedy=f"tightfit bench {shlex.quote(plan.model.name)} with the same options    (plans it "
        "anew)",
    )
    planned = plan.training
    data, template = options.data, options.template
    if planned is not None:
        paths = (Path(part.path) for part in planned.data if part.split == "train")
        data = data or next(paths, None)
        template = template or planned.template
    words, plainest = list_plan_options(plan.strategy), Strategy()
    # What a plan's words leave out, as far as it is not what a job has anyway.
    unusual = [
        f"{name}={show_value(getattr(plan.strategy, name))}"
        for name in NOT_SEARCHED
        if name not in ("method", "objective", "seq_len")  # which have options of their own
        and getattr(plan.strategy, name) != getattr(plainest, name)
    ]
    return replace(
        options,
        job=plan.model.name if planned is None else planned.model_path,
        data=data,
        template=template,
        method=words[1],
        objective=plan.strategy.objective.value,
        seq_len=encoded_len(plan),
        effective_batch=plan.effective_batch,
        settings=[*words[3::2], *unusual],
        random_weights=options.random_weights or (planned is not None and planned.random_weights),
    )


def repeat_bench(options: BenchOptions) -> str:
    """The command again as far as it names the job, to be continued with a plan's words."""
    names = (
        *("data", "tools", "on", "objective", "seq_len", "effective_batch", "template"),
        "memory_limit",
    )
    given = list_given(options, (*names, "random_weights", "synthetic"))
    given["--set"] = [
        f"{name}={show_value(value)}"
        for name, value in read_settings(options.settings).items()
        if name in NOT_SEARCHED and name != "method"
    ]
    return shlex.join(["tightfit", "bench", options.job, *repeat_options(given)])


def read_bench_job(options: BenchOptions, home: Path) -> BenchJob:
    """Find or draw model and data, and search. `home` is a folder for what is made up."""
    wanted = read_run_recipe(options, needs_data=False)
    recipe = wanted.recipe
    if options.random_weights:
        recipe = recipe.model_copy(update={"random_weights": True})
    cluster = find_hardware(options, recipe.on, verb="bench")
    folder = _find_model(recipe, home)
    request = make_request(
        recipe, read_spec(recipe.model, folder), wanted.fixed_strategy(), model=folder
    )
    # The learning side of a run that is to leave nothing behind.
    update = {
        "learning_rate": LEARNING_RATE,
        "schedule": Schedule.CONSTANT,
        "max_steps": options.warm_up + options.steps,
        "keep_checkpoints": 0,
        "keep_result": False,
        "log_to": (),
    }
    training = {
        method: make_training(recipe, method=method, model_path=folder).model_copy(update=update)
        for method in (Method.FULL, Method.LORA)
    }
    rows = _make_rows(options, recipe, request, training[Method.LORA], cluster, home)
    request = replace(
        request, seq_len=request.planned_seq_len, profile=rows.profile, training=training
    )
    count = options.top or (DEFAULT_LEVERS if options.all_levers else 1)
    result = search_plans(
        request,
        recipe,
        cluster,
        options,
        num_plans=max(NUM_PLANS, count),
        is_exhaustive=options.all_levers,
    )
    num_traced = min(count, NUM_TRACED)
    plans = trace_search(result, num_traced=num_traced, progress=options.progress).result.plans
    return BenchJob(
        plans=plans[:count],
        rows=rows,
        cluster=cluster,
        has_random_weights=bool(recipe.random_weights),
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


def _make_rows(
    options: BenchOptions,
    recipe: Recipe,
    request: JobRequest,
    training: Training,
    cluster: Cluster,
    home: Path,
) -> Rows:
    """The data's own rows where they can be encoded, else made-up ones of the same lengths."""
    sources = training_sources(recipe)
    folder, seq_len = Path(training.model_path), request.planned_seq_len
    objective = recipe.objective or Objective.SFT
    example = objective.record.example
    if sources and not options.synthetic and (folder / "tokenizer.json").is_file():
        encoded = encode_for(
            training,
            objective=objective,
            model_folder=with_new_tokens(folder, read_new_tokens(dict(request.fixed))),
            seq_len=seq_len,
            progress=options.progress,
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
            sources,
            seq_len=seq_len,
            model=recipe.model,
            example=example,
            progress=options.progress,
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
        example=example,
    )
    if guessed is None:
        return Rows(store=store, profile=None, words=f"random tokens, rows of {seq_len:,}")
    profile = profile_from_store(store)
    words = f"random tokens, rows as long as the data's ({profile.mean_tokens:,.0f} on average)"
    return Rows(store=store, profile=profile, words=words)


def _list_notes(options: BenchOptions, job: BenchJob) -> list[str]:
    """What the figures depend on."""
    notes = []
    gpu = job.plans[0].hardware.node.gpu
    if gpu.measured is None:
        device = " --device cpu" if gpu.is_cpu else ""
        notes.append(
            f"{gpu.name} is not calibrated, so times are predicted from figures on paper: "
            f"tightfit calibrate{device}"
        )
    notes += dict.fromkeys(job.cluster.warnings)
    if options.top is not None and len(job.plans) < options.top:
        more = "" if options.all_levers else "; --all-levers tries more settings"
        found = count_of(len(job.plans), "plan")
        notes.append(f"--top {options.top}: the planner has {found}{more}")
    return notes


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
    # As `train` does: plans that finished, and plans that were too big for the GPU itself.
    status = ended.state.status
    if status is RunStatus.FINISHED:
        board.note(record_outcome(make_outcome(plan, status, ended.report)))
    elif status is RunStatus.OUT_OF_MEMORY and not board.is_limited:
        board.note(record_outcome(make_outcome(plan, status)))
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
    # The worker's own remedy, unless it names checkpoints and files that a trial does not keep.
    remedy = ended.state.remedy
    if ended.state.exit_code in (None, UserError.exit_code, EXIT_BUG) or not remedy:
        remedy = "the same command with --json    (`log` has the worker's last lines)"
    error = {
        "problem": ended.state.problem or "The worker failed.",
        "remedy": remedy,
        "exit_code": ended.state.exit_code,
        "log": ended.log,
    }
    return row.model_copy(update=error)


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
