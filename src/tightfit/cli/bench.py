"""`tightfit bench`: run plans for a few steps each, and hold what they do against the plan."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import typer

from tightfit.cli.bench_job import BenchJob, as_train_flags, read_bench_job
from tightfit.cli.bench_saved import unfold_saved
from tightfit.cli.bench_words import list_words, repeat_job
from tightfit.cli.describe import count_of, describe_how, describe_levers
from tightfit.cli.exit_codes import EXIT_BUG, EXIT_INTERRUPTED, EXIT_REQUEUE
from tightfit.cli.faults import report_fault
from tightfit.cli.flags.bench import BenchFlags
from tightfit.cli.require import require_packages
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce, write_err
from tightfit.cli.training.display import open_display
from tightfit.cli.training.hardware import limiting, read_limit
from tightfit.cli.training.progress import Progress
from tightfit.core.errors import DoesNotFitError, EnvironmentFaultError, UserError
from tightfit.core.files import check_writable, write_atomic
from tightfit.launch.signals import StopWish, hear_wishes
from tightfit.launch.trial import TrialEnd, open_home, run_trial
from tightfit.ledger.run_folder import RunStatus
from tightfit.ledger.store import make_outcome, record_outcome
from tightfit.ledger.trial import (
    Bench,
    Trial,
    TrialStatus,
    compare_trial,
    measure_steps,
    rate_first,
    sort_trials,
)
from tightfit.ledger.words import render_short_seconds
from tightfit.planning.plan import Plan

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
    flags = unfold_saved(flags)
    _check_files(flags)
    limit = read_limit(as_train_flags(flags), os.environ)
    require_packages("Measuring", "torch", "transformers", "peft")
    with open_home() as home:
        job = read_bench_job(flags, home)
        board = Board(flags=flags, job=job, is_limited=limit is not None)
        _note_surroundings(board)
        with limiting(limit), hear_wishes() as wish:
            _try_all(board, home, wish)
    _tell(board)


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


def _try_all(board: Board, home: Path, wish: StopWish) -> None:
    flags, plans = board.flags, board.job.plans
    end = None if flags.minutes is None else time.monotonic() + 60 * flags.minutes
    for rank, plan in enumerate(plans, start=1):
        if wish.first is not None:
            board.exit_code = EXIT_INTERRUPTED if wish.first is signal.SIGINT else EXIT_REQUEUE
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
    _remember(board, plan, ended)
    if flags.out is not None:
        with suppress(EnvironmentFaultError):  # told at the end, when the figures have been shown
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


def _judge(board: Board, rank: int, plan: Plan, ended: TrialEnd) -> Trial:
    """The trial's row: figures, or why there are none."""
    how = describe_how(plan.strategy, is_cpu=plan.hardware.node.gpu.is_cpu)
    row = Trial(
        rank=rank,
        description=f"{how}, {describe_levers(plan.strategy)}",
        strategy=plan.strategy,
        words=list_words(plan.strategy),
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


def _choose_remedy(ended: TrialEnd) -> str:
    """The worker's own, unless it speaks of checkpoints and files that a trial does not keep."""
    if ended.state.exit_code in (None, UserError.exit_code, EXIT_BUG) or not ended.state.remedy:
        return "the same command with --json    (`log` has the worker's last lines)"
    return ended.state.remedy


def _remember(board: Board, plan: Plan, ended: TrialEnd) -> None:
    """As `train` does: plans that ran through, and plans that were too big for the card itself."""
    status = ended.state.status
    if status is RunStatus.FINISHED:
        board.note(record_outcome(make_outcome(plan, status, ended.report)))
    elif status is RunStatus.OUT_OF_MEMORY and not board.is_limited:
        board.note(record_outcome(make_outcome(plan, status)))


def _tell(board: Board) -> None:
    """Figures first, wherever they were asked for; then the fault, where there is nothing else."""
    flags, found = board.flags, board.make_bench()
    fault = None if board.exit_code else _find_fault(found.trials, flags)
    told = {}
    if fault is not None:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
    if flags.as_json:
        show_json({**found.model_dump(mode="json"), **told})
    else:
        from tightfit.cli.render.bench import show_bench

        show_bench(found, command=repeat_job(flags))
    _write_files(flags, found)
    if fault is not None:
        raise typer.Exit(report_fault(fault, as_json=False))
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


def _find_fault(trials: Sequence[Trial], flags: BenchFlags) -> UserError | None:
    """None where at least one plan was measured: the others are rows of the answer."""
    if any(trial.measured for trial in trials):
        return None
    failed = next((trial for trial in trials if trial.status is TrialStatus.FAILED), None)
    if failed is None:
        what = "The plan" if len(trials) == 1 else f"Each of the {len(trials)} plans"
        more = 5 if len(trials) < 5 else 2 * len(trials)
        return DoesNotFitError(
            f"{what} ran out of memory.",
            remedy=f"{repeat_job(flags)} --top {more}    (tries others too)",
        )
    fault = UserError(failed.problem or "The worker failed.", remedy=failed.remedy or "--json")
    fault.exit_code = failed.exit_code or EXIT_BUG
    return fault
