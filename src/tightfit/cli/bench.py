"""`tightfit bench`: run plans for a few steps each and compare prediction with measurement."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import typer
from rich.console import RenderableType

from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import BenchFlags
from tightfit.cli.terminal.output import announce, show_json, write_err
from tightfit.cli.terminal.run_display import Progress, open_display
from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.cli.training.bench import BenchJob, as_train_flags, expand_saved_plan, read_bench_job
from tightfit.cli.training.command_line import list_plan_options, repeat_bench
from tightfit.cli.training.hardware import limiting, read_limit
from tightfit.clusters.local.launcher import StopRequest, catch_signals
from tightfit.clusters.local.trial import TrialResult, open_trial_folder, run_trial
from tightfit.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    DoesNotFitError,
    SetupError,
    UserError,
)
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.packages import require_packages
from tightfit.core.text import count_of
from tightfit.planning.describe import describe_how, describe_levers
from tightfit.planning.plan import Plan
from tightfit.runs.bench import (
    Bench,
    Trial,
    TrialStatus,
    compare_trial,
    measure_steps,
    rate_first,
    sort_trials,
)
from tightfit.runs.report import Comparison, Unit
from tightfit.runs.report_words import UNKNOWN, render_error, render_quantity, render_short_seconds
from tightfit.runs.run_folder import RunStatus
from tightfit.runs.store import make_outcome, record_outcome

# What `tightfit bench` prints: one plan part by part, or several side by side.

_TIME = "time per step"
_MEMORY = ("GPU memory, reserved", "process memory")


def show_bench(found: Bench, *, command: str) -> None:
    """`command` names the job; with a trial's words it measures that plan again."""
    is_answer = any(trial.measured for trial in found.trials) or len(found.trials) > 1
    show(_render(found, command) if is_answer else render_notes("Notes", found.notes))


def _render(found: Bench, command: str) -> Iterator[RenderableType]:
    yield heading(f"{found.model} on {found.hardware}")
    weights = ", random weights" if found.has_random_weights else ""
    yield plain(
        f"{count_of(found.num_steps, 'step')} after {found.num_warmup_steps:,} to warm up; "
        f"{found.data}{weights}"
    )
    yield ""
    measured = [trial for trial in found.trials if trial.measured is not None]
    if found.num_plans == 1 and measured:
        yield plain(measured[0].description)
        yield ""
        yield _render_one(measured[0])
    elif found.num_plans > 1:
        yield _render_many(found.trials)
        yield from _render_verdict(found)
        yield from _render_words(found.trials, command)
    yield from render_notes("Notes", found.notes)


def _render_one(trial: Trial) -> RenderableType:
    columns = (
        Column(title=""),
        Column(title="predicted", right=True),
        Column(title="measured", right=True),
        Column(title="most steps", right=True),
        Column(title="off by", right=True),
    )
    rows = [
        (
            item.name,
            render_quantity(item.predicted, item.unit),
            render_quantity(item.measured, item.unit),
            _render_spread(trial) if item.name == _TIME else "",
            render_error(item.error_percent),
        )
        for item in trial.compared
    ]
    return make_table(columns, rows)


def _render_many(trials: Sequence[Trial]) -> RenderableType:
    columns = (
        Column(title="", right=True),
        Column(title="plan", keep=False),
        Column(title="rank", right=True),
        Column(title="predicted", right=True),
        Column(title="measured", right=True),
        Column(title="most steps", right=True),
        Column(title="off by", right=True),
        Column(title="tokens/s", right=True),
        Column(title="peak", right=True),
    )
    rows = [_make_row(place, trial) for place, trial in enumerate(trials, start=1)]
    return make_table(columns, rows, is_spaced=True)


def _make_row(place: int, trial: Trial) -> tuple[str, ...]:
    time, memory = _find(trial, (_TIME,)), _find(trial, _MEMORY)
    predicted = render_short_seconds(trial.predicted_seconds_per_step)
    head = (f"{place}", _describe(trial), f"{trial.rank}", predicted)
    if trial.measured is None or time is None:
        return (*head, trial.status.value.replace("-", " "), "", "", "", "")
    return (
        *head,
        render_short_seconds(trial.measured.seconds_per_step.median),
        _render_spread(trial),
        render_error(time.error_percent),
        render_quantity(trial.measured.tokens_per_second, Unit.TOKENS_PER_SECOND),
        UNKNOWN if memory is None else render_quantity(memory.measured, memory.unit),
    )


def _render_words(trials: Sequence[Trial], command: str) -> Iterator[RenderableType]:
    """How to have one plan alone: what all share once, then what each has of its own."""
    pairs = [list(zip(trial.words[::2], trial.words[1::2], strict=True)) for trial in trials]
    shared = [pair for pair in pairs[0] if all(pair in others for others in pairs)]
    yield ""
    yield heading("One of them alone")
    yield plain(f"{command} {_join(shared)}")
    if len(trials) > 1:
        own = [_join([pair for pair in mine if pair not in shared]) for mine in pairs]
        yield from render_notes("and behind it", own, is_numbered=True)


def _join(pairs: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{option} {value}" for option, value in pairs)


def _describe(trial: Trial) -> str:
    is_failed = trial.status is TrialStatus.FAILED
    return f"{trial.description}\n{trial.problem}" if is_failed else trial.description


def _find(trial: Trial, names: Sequence[str]) -> Comparison | None:
    return next((item for item in trial.compared if item.name in names), None)


def _render_spread(trial: Trial) -> str:
    if trial.measured is None:
        return ""
    spread = trial.measured.seconds_per_step
    return f"{render_short_seconds(spread.low)} to {render_short_seconds(spread.high)}"


def _render_verdict(found: Bench) -> Iterator[RenderableType]:
    fastest, ratio = found.trials[0], found.first_over_fastest
    if ratio is None or sum(trial.measured is not None for trial in found.trials) < 2:
        return
    yield ""
    if fastest.rank == 1:
        yield plain("The plan that the planner ranks first is the fastest of them.")
    else:
        yield plain(
            f"The plan ranked first runs at {ratio:.0%} of the fastest one's speed, which is "
            f"ranked {fastest.rank}."
        )


_STATUSES = {
    RunStatus.FINISHED: TrialStatus.MEASURED,
    RunStatus.OUT_OF_MEMORY: TrialStatus.OUT_OF_MEMORY,
}


@dataclass(slots=True, kw_only=True)
class Board:
    """What has been measured so far."""

    flags: BenchFlags
    job: BenchJob
    is_limited: bool
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
            num_warmup_steps=self.flags.warm_up,
            num_steps=self.flags.steps,
            has_random_weights=self.job.has_random_weights,
            is_calibrated=node.gpu.measured is not None,
            num_plans=len(self.job.plans),
            trials=sort_trials(self.trials),
            first_over_fastest=rate_first(self.trials),
            notes=tuple(self.notes),
        )


def bench(flags: BenchFlags) -> None:
    """Plan, try the plans one after another, and tell."""
    flags = expand_saved_plan(flags)
    _check_files(flags)
    limit = read_limit(as_train_flags(flags), os.environ)
    require_packages("Measuring", "torch", "transformers", "peft")
    with open_trial_folder() as home:
        job = read_bench_job(flags, home)
        board = Board(flags=flags, job=job, is_limited=limit is not None)
        _note_surroundings(board)
        with limiting(limit), catch_signals() as stop:
            _try_all(board, home, stop)
    _show_results(board)


def _check_files(flags: BenchFlags) -> None:
    """Faults of the command line come before minutes of work."""
    if flags.chart is not None:
        from tightfit.cli.charts.bench import check_bench_chart

        check_bench_chart(flags.chart)
    if flags.out is not None:
        check_writable(flags.out)


def _note_surroundings(board: Board) -> None:
    gpu = board.job.plans[0].hardware.node.gpu
    if gpu.measured is None:
        device = " --device cpu" if gpu.is_cpu else ""
        board.note(
            f"{gpu.name} is not calibrated, so times are predicted from figures on paper: "
            f"tightfit calibrate{device}"
        )
    for warning in board.job.cluster.warnings:
        board.note(warning)
    asked, found = board.flags.top, len(board.job.plans)
    if asked is not None and found < asked:
        more = "" if board.flags.all_levers else "; --all-levers tells more of them apart"
        board.note(f"--top {asked}: the planner has {count_of(found, 'plan')}{more}")


def _try_all(board: Board, home: Path, stop: StopRequest) -> None:
    flags, plans = board.flags, board.job.plans
    end = None if flags.minutes is None else time.monotonic() + 60 * flags.minutes
    for rank, plan in enumerate(plans, start=1):
        if stop.first is not None:
            board.exit_code = EXIT_INTERRUPTED if stop.first is signal.SIGINT else EXIT_REQUEUE
        elif board.trials and end is not None and time.monotonic() > end:
            board.note(f"--minutes {flags.minutes:g} were over before plan {rank}")
            return
        else:
            _try_one(board, home, rank, plan)
        if board.exit_code:
            board.note(f"stopped as asked at plan {rank} of {len(plans)}")
            return


def _try_one(board: Board, home: Path, rank: int, plan: Plan) -> None:
    flags = board.flags
    if not flags.as_json:
        _announce_plan(board, rank, plan)
    num_steps = flags.warm_up + flags.steps
    progress = Progress(
        num_steps=num_steps, capacity_bytes=max(1, plan.estimate.gpu.capacity_bytes)
    )
    with open_display(
        progress, read_num_steps=lambda: num_steps, is_silent=flags.as_json
    ) as display:
        ended = run_trial(home, plan, board.job.rows.store.folder, display)
    trial = _judge(board, rank, plan, ended)
    if ended.state.status is RunStatus.STOPPED:
        board.exit_code = ended.state.exit_code or EXIT_INTERRUPTED
        if trial.measured is None:
            return
        board.note(f"plan {rank}: {trial.measured.num_steps:,} of {flags.steps:,} steps were taken")
    board.trials.append(trial)
    if not flags.as_json:
        write_err(f"  {_describe_end(trial)}\n")
    _store_outcome(board, plan, ended)
    if flags.out is not None:
        with suppress(SetupError):  # told at the end, when the figures have been shown
            write_atomic(flags.out, board.make_bench().model_dump_json(indent=2) + "\n")


def _announce_plan(board: Board, rank: int, plan: Plan) -> None:
    gpu = plan.hardware.node.gpu
    how = describe_how(plan.strategy, is_cpu=gpu.is_cpu)
    seconds = render_short_seconds(plan.estimate.time.seconds_per_step)
    write_err(
        f"plan {rank} of {len(board.job.plans)}: {how}, {describe_levers(plan.strategy)}; "
        f"predicted {seconds} per step\n"
    )


def _describe_end(trial: Trial) -> str:
    if trial.measured is None:
        return trial.problem or trial.status.value
    seconds = render_short_seconds(trial.measured.seconds_per_step.median)
    return f"measured {seconds} per step over {count_of(trial.measured.num_steps, 'step')}"


def _judge(board: Board, rank: int, plan: Plan, ended: TrialResult) -> Trial:
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
    measured = measure_steps(ended.past.steps, num_warmup=board.flags.warm_up)
    if measured is not None and ended.state.status in (RunStatus.FINISHED, RunStatus.STOPPED):
        share = board.job.rows.trained_fraction
        compared = compare_trial(plan, ended.past.steps, measured, trained_fraction=share)
        figures = {"status": TrialStatus.MEASURED, "measured": measured, "compared": compared}
        return row.model_copy(update=figures)
    if row.status is TrialStatus.OUT_OF_MEMORY:
        return row.model_copy(update={"problem": "It ran out of memory."})
    fault = {
        "problem": ended.state.problem or "The worker failed.",
        "remedy": _choose_remedy(ended),
        "exit_code": ended.state.exit_code,
        "log": ended.log,
    }
    return row.model_copy(update=fault)


def _choose_remedy(ended: TrialResult) -> str:
    """The worker's own, unless it speaks of checkpoints and files that a trial does not keep."""
    if ended.state.exit_code in (None, UserError.exit_code, EXIT_BUG) or not ended.state.remedy:
        return "the same command with --json    (`log` has the worker's last lines)"
    return ended.state.remedy


def _store_outcome(board: Board, plan: Plan, ended: TrialResult) -> None:
    """As `train` does: plans that ran through, and plans that were too big for the card itself."""
    status = ended.state.status
    if status is RunStatus.FINISHED:
        board.note(record_outcome(make_outcome(plan, status, ended.report)))
    elif status is RunStatus.OUT_OF_MEMORY and not board.is_limited:
        board.note(record_outcome(make_outcome(plan, status)))


def _show_results(board: Board) -> None:
    """Figures first, wherever they were asked for; then the fault, where there is nothing else."""
    flags, found = board.flags, board.make_bench()
    fault = None if board.exit_code else _find_error(found.trials, flags)
    told = {}
    if fault is not None:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
    if flags.as_json:
        show_json({**found.model_dump(mode="json"), **told})
    else:
        show_bench(found, command=repeat_bench(flags))
    _write_files(flags, found)
    if fault is not None:
        raise typer.Exit(report_error(fault, as_json=False))
    if board.exit_code:
        raise typer.Exit(board.exit_code)


def _write_files(flags: BenchFlags, found: Bench) -> None:
    if flags.out is not None and found.trials:
        write_atomic(flags.out, found.model_dump_json(indent=2) + "\n")
        announce(flags.out)
    if flags.chart is not None and any(trial.measured for trial in found.trials):
        from tightfit.cli.charts.bench import write_bench_chart

        write_bench_chart(found, flags.chart)
        announce(flags.chart)


def _find_error(trials: Sequence[Trial], flags: BenchFlags) -> UserError | None:
    """None where at least one plan was measured: the others are rows of the answer."""
    if any(trial.measured for trial in trials):
        return None
    failed = next((trial for trial in trials if trial.status is TrialStatus.FAILED), None)
    if failed is None:
        what = "The plan" if len(trials) == 1 else f"Each of the {len(trials)} plans"
        more = 5 if len(trials) < 5 else 2 * len(trials)
        return DoesNotFitError(
            f"{what} ran out of memory.",
            remedy=f"{repeat_bench(flags)} --top {more}    (tries others too)",
        )
    fault = UserError(failed.problem or "The worker failed.", remedy=failed.remedy or "--json")
    fault.exit_code = failed.exit_code or EXIT_BUG
    return fault
