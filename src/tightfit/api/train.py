"""`train`: plan, prepare the run folder, train, report."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import TrainOptions
from tightfit.api.training.hardware import (
    find_hardware,
    limiting,
    read_limit,
    read_rendezvous,
)
from tightfit.api.training.job import plan_job, reuse_plan
from tightfit.api.training.recipe import RunRecipe, read_training_job
from tightfit.api.training.run_folder import (
    LOCK_WAIT_SECONDS,
    RunLocation,
    RunStage,
    find_run_location,
    is_finished,
    move_aside,
    name_folder,
    one_node_at_a_time,
    open_planned,
    write_folder,
)
from tightfit.clusters.local.launcher import run_job
from tightfit.clusters.protocol import RunObserver, SilentObserver
from tightfit.clusters.requirements import check_space, estimate_run_bytes
from tightfit.core.errors import EXIT_BUG, UserError
from tightfit.core.files import remove_abandoned
from tightfit.core.progress import Progress
from tightfit.core.reading import read_bytes
from tightfit.planning.describe import name_method
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import Record, StepRecord
from tightfit.runs.report import RunReport
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run folder with the plan that will run; with `dry_run` the folder is not made."""

    run: RunFolder
    plan: Plan
    free_bytes: int
    """On the disk of the run folder."""
    needed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """A run that has ended, finished before, or with `dry_run` was not started."""

    run: RunFolder
    artefact: Path | None = None
    """The folder with the trained adapter or model."""
    report: RunReport | None = None
    exit_code: int = 0
    """75: stopped by a signal and saved; the same call resumes."""
    notes: tuple[str, ...] = ()
    plan: Plan | None = None
    """What would run, with `dry_run`."""
    error: UserError | None = None
    """Why the run failed."""


@accepts_keywords(TrainOptions)
def train(options: TrainOptions) -> TrainResult:
    """Plan and train, or resume. Raises the run's error where it failed."""
    opened = open_run(options)
    if isinstance(opened, TrainResult):
        return opened
    if options.dry_run:
        return TrainResult(run=opened.run, plan=opened.plan)
    result = start_run(opened, options, _ProgressObserver(opened.run, options.progress))
    if result.error is not None:
        raise result.error
    return result


def open_run(options: TrainOptions) -> OpenRun | TrainResult:
    """Make or reopen the run that the options name; its result where it is finished."""
    read_rendezvous(options)  # errors in the options come before any work
    read_limit(options, os.environ)
    if options.as_planned:
        run, plan = open_planned(options)
        if is_finished(run):
            return _read_finished(run, options)
    else:
        wanted, saved = read_training_job(options)
        with one_node_at_a_time(wanted, options):
            location = find_run_location(wanted, options)
            if location.stage is RunStage.FINISHED and not options.dry_run:
                return _read_finished(location.run, options)
            run, plan = _prepare(wanted, saved, location, options)
    return OpenRun(
        run=run,
        plan=plan,
        free_bytes=check_space(run.path, plan),
        needed_bytes=estimate_run_bytes(plan),
    )


def start_run(opened: OpenRun, options: TrainOptions, observer: RunObserver) -> TrainResult:
    """Train to the end, then write the report and store the outcome."""
    run, limit = opened.run, read_limit(options, os.environ)
    num_kept = len(list_kept_plans(run))
    with limiting(limit):
        state = run_job(
            run,
            observer=observer,
            rendezvous=read_rendezvous(options),
            lock_wait_seconds=LOCK_WAIT_SECONDS if options.as_planned else 0.0,
        )
        report, notes = _conclude(run, state, options, num_kept, is_limited=limit is not None)
    code = state.exit_code if state.exit_code is not None else EXIT_BUG
    error = None
    if state.status is RunStatus.FAILED:
        error = UserError(
            state.problem or f"The run in {run.path} failed.",
            remedy=state.remedy or f"less {shlex.quote(str(run.log_path))}",
        )
        error.exit_code = code
    return TrainResult(
        run=run,
        artefact=find_artefact(run),
        report=report,
        exit_code=code,
        notes=tuple(notes),
        error=error,
    )


def read_num_steps(run: RunFolder) -> int:
    """Steps of the whole run; 0 until the worker has counted them."""
    try:
        return run.read_state().num_steps
    except UserError:
        return 0


def _read_finished(run: RunFolder, options: TrainOptions) -> TrainResult:
    from tightfit.runs.report import read_report

    notes = ["finished before; nothing was done"]
    if not run.html_path.exists() and not options.dry_run:
        # Whoever had started it was killed between its last step and its report.
        remove_abandoned(Path(tempfile.gettempdir()))
        is_limited = read_limit(options, os.environ) is not None
        kept = len(list_kept_plans(run))
        notes += _conclude(run, run.read_state(), options, kept, is_limited=is_limited)[1]
    return TrainResult(
        run=run, artefact=find_artefact(run), report=read_report(run), notes=tuple(notes)
    )


def _prepare(
    wanted: RunRecipe, saved: Plan | None, location: RunLocation, options: TrainOptions
) -> tuple[RunFolder, Plan]:
    """Plan, check the disk, and make or reopen the folder."""
    begun = location.run.read_plan() if location.stage is RunStage.BEGUN else None
    # Every node reads the data: with several, it lies in the folder that they share.
    cache = None
    if location.folder is not None and options.nodes > 1:
        cache = location.folder.absolute()
    if begun is not None and not _has_moved(wanted, options, begun):
        planned = replace(reuse_plan(begun, wanted, options, cache=cache), plan=begun)
    elif begun is None and saved is not None:
        planned = reuse_plan(saved, wanted, options, cache=cache)
    else:
        planned = plan_job(wanted, options, cache=cache, begun=begun)
    folder = location.folder or name_folder(wanted, name_method(planned.plan.strategy))
    run = RunFolder(path=folder.absolute())
    check_space(run.path, planned.plan)
    if not options.dry_run:
        if options.fresh and run.is_run():
            _log.info("the old run is kept in %s", move_aside(run.path))
        write_folder(run, wanted, planned, begun)
    return run, planned.plan


def _has_moved(wanted: RunRecipe, options: TrainOptions, begun: Plan) -> bool:
    """Whether the run is to continue on other hardware than its plan was made for."""
    if wanted.recipe.on is None and options.nodes == begun.strategy.num_nodes:
        return False
    before = begun.hardware
    return not any(
        group.node.gpu.name == before.node.gpu.name
        and group.node.num_gpus == before.node.num_gpus
        and group.num_nodes == begun.strategy.num_nodes
        and group.name == before.group
        for group in find_hardware(options, wanted.recipe.on).groups
    )


def _conclude(
    run: RunFolder, state: RunState, options: TrainOptions, num_before: int, *, is_limited: bool
) -> tuple[RunReport, list[str]]:
    """Store the outcome, then write the report: by the page one can tell that both are there."""
    from tightfit.runs.report import make_report, write_report
    from tightfit.runs.report_html import write_html

    report, notes = make_report(run), []
    if options.node_rank in (None, "0"):  # of several nodes, the first stores the outcome
        notes += _store_outcome(run, state, report, num_before, is_limited=is_limited)
    try:  # the page is a convenience: a run is not lost where it cannot be drawn
        write_report(run, report)
        write_html(run)
    except UserError as error:
        notes.append(f"No report was written: {error.problem}")
    return report, notes


def _store_outcome(
    run: RunFolder, state: RunState, report: RunReport, num_before: int, *, is_limited: bool
) -> list[str]:
    """One row for each plan that was given up, and one for the last.

    Under a memory limit, running out of memory says nothing about the GPU.
    """
    from tightfit.runs.store import make_outcome, record_outcome

    notes: list[str | None] = []
    if not is_limited:
        for failed in list_kept_plans(run)[num_before:]:
            notes.append(record_outcome(make_outcome(failed, RunStatus.OUT_OF_MEMORY)))
    if state.status is RunStatus.FINISHED:
        found = make_outcome(run.read_plan(), state.status, report)
        # Dated by the run, so that the very same row is made again where this was cut short.
        found = found.model_copy(update={"date": state.updated_at})
        notes.append(record_outcome(found, once=True))
    return list(dict.fromkeys(sentence for sentence in notes if sentence is not None))


def list_kept_plans(run: RunFolder) -> list[Plan]:
    """Plans given up, oldest first; one that cannot be read is passed over."""
    numbers = [path.name.split(".")[1] for path in run.path.glob("plan.*.json")]
    found = []
    for number in sorted(int(word) for word in numbers if word.isdecimal()):
        try:
            found.append(Plan.model_validate_json(read_bytes(run.path / f"plan.{number}.json")))
        except (OSError, ValueError):
            continue
    return found


def find_artefact(run: RunFolder) -> Path | None:
    return next((path for path in (run.adapter_path, run.model_path) if path.is_dir()), None)


class _ProgressObserver(SilentObserver):
    """Steps as calls of `progress`; what the launcher says as log messages."""

    def __init__(self, run: RunFolder, progress: Progress | None) -> None:
        self._run = run
        self._progress = progress

    def record(self, record: Record) -> None:
        if self._progress is not None and isinstance(record, StepRecord):
            self._progress("training", record.step, max(record.step, read_num_steps(self._run)))

    def say(self, text: str) -> None:
        _log.info("%s", text)
