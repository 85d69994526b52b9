"""PastRun: all that a run folder says, read once, whether the run is whole, half done or broken."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import psutil

from tightfit.core.errors import NotFoundError, UserError
from tightfit.ledger.environment import Environment, read_environment
from tightfit.ledger.metrics import (
    PLAN_CHANGE,
    EvalRecord,
    EventRecord,
    Record,
    StepRecord,
    read_records,
)
from tightfit.ledger.run_folder import RunFolder, RunState, RunStatus
from tightfit.planning.plan import Plan

CLOCK_SLACK_SECONDS = 5.0
"""A process that began this long after the state was written is another one with the same id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One run as it stands."""

    folder: RunFolder
    plan: Plan
    state: RunState
    environment: Environment | None
    steps: tuple[StepRecord, ...]
    """By step, each once: the last line wins where a resumed run did it again."""
    evals: tuple[EvalRecord, ...]
    events: tuple[EventRecord, ...]
    current_steps: tuple[StepRecord, ...]
    """Those under the plan that is in force now; all of them if it has none yet."""

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def plan_changes(self) -> tuple[EventRecord, ...]:
        return tuple(event for event in self.events if is_plan_change(event))


def read_run(run: RunFolder) -> PastRun:
    """Everything in the folder; only a plan must be there."""
    if not run.is_run():
        raise NotFoundError(
            f"{run.path} is no run folder: it has no plan.json.",
            remedy="tightfit runs    (lists the runs there are)",
        )
    plan = run.read_plan()
    records = read_records(run.metrics_path)
    changes = [place for place, record in enumerate(records) if is_plan_change(record)]
    steps = _last_of_each(records)
    evals = {record.step: record for record in records if isinstance(record, EvalRecord)}
    return PastRun(
        folder=run,
        plan=plan,
        state=probe_state(run),
        environment=read_environment(run),
        steps=steps,
        evals=tuple(evals[step] for step in sorted(evals)),
        events=tuple(record for record in records if isinstance(record, EventRecord)),
        current_steps=_last_of_each(records[changes[-1] :]) or steps if changes else steps,
    )


def is_plan_change(record: Record) -> bool:
    return isinstance(record, EventRecord) and record.text.startswith(PLAN_CHANGE)


def _last_of_each(records: Sequence[Record]) -> tuple[StepRecord, ...]:
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    return tuple(steps[step] for step in sorted(steps))


def probe_state(run: RunFolder) -> RunState:
    """What the run last said, and `died` where it says `running` and its process is gone."""
    try:
        state = run.read_state()
    except NotFoundError:
        return RunState(status=RunStatus.PREPARED, updated_at=_changed_at(run.plan_path))
    except UserError as fault:
        return RunState(
            status=RunStatus.FAILED,
            problem=fault.problem,
            remedy=fault.remedy,
            updated_at=_changed_at(run.state_path),
        )
    if state.status is not RunStatus.RUNNING or not _is_gone(run, state):
        return state
    return state.model_copy(
        update={
            "status": RunStatus.DIED,
            "problem": state.problem or f"Its process {state.pid} is gone.",
            "remedy": state.remedy or "start it again with the same command: it resumes",
        }
    )


def _is_gone(run: RunFolder, state: RunState) -> bool:
    """Only of a process on this host can that be said."""
    host = state.host
    if host is None:
        environment = read_environment(run)
        host = environment.hostname if environment is not None else None
    if state.pid is None or host != socket.gethostname():
        return False
    try:
        process = psutil.Process(state.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        began = process.create_time()
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
    written = parse_time(state.updated_at)
    return written is not None and began > written.timestamp() + CLOCK_SLACK_SECONDS


def parse_time(text: str) -> datetime | None:
    """ISO 8601, also with the `Z` that Python before 3.11 does not read; UTC where none is said."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def _changed_at(path: Path) -> str:
    try:
        seconds = path.stat().st_mtime
    except OSError:
        seconds = 0.0
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
