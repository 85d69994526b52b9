"""What rank 0 writes down as the run goes: records, state, trackers. Other ranks write nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import datetime, timezone

from tightfit.ledger.metrics import (
    EvalRecord,
    EventRecord,
    Record,
    StepRecord,
    append_record,
    forget_after,
    read_records,
)
from tightfit.ledger.run_folder import RunFolder, RunState, RunStatus
from tightfit.planning.plan import Plan
from tightfit.train.place import Place
from tightfit.train.trackers import Tracker, name_values, open_trackers


class Diary:
    """Keeps metrics.jsonl and state.json true."""

    def __init__(self, run: RunFolder, plan: Plan, place: Place) -> None:
        self._run = run
        self._plan = plan
        self._is_writing = place.is_first
        self._trackers: list[Tracker] = []
        self._num_steps = 0

    def open(self, *, step: int, num_steps: int, damaged: Sequence[str] = ()) -> None:
        """Start, or start again after `step` steps: what was written beyond them is forgotten.

        `damaged` are newer checkpoints, which could not be used.
        """
        self._num_steps = num_steps
        if not self._is_writing:
            return
        forget_after(self._run.metrics_path, step)
        names = self._plan.training.log_to if self._plan.training else ()
        self._trackers = open_trackers(names, self._run, self._plan)
        self.set_state(RunStatus.RUNNING, step)
        if step:
            passed_over = f"; damaged, and not used: {', '.join(damaged)}" if damaged else ""
            self.write(EventRecord(step=step, text=f"resumed after step {step}{passed_over}"))

    def write(self, record: Record) -> None:
        if not self._is_writing:
            return
        append_record(self._run.metrics_path, record)
        values = name_values(record)
        for tracker in self._trackers if values else ():
            tracker.log(values, record.step)

    def read_losses(self, step: int) -> list[float]:
        """Of the steps up to `step`; on any rank, as the folder is shared."""
        records = read_records(self._run.metrics_path)
        return [r.loss for r in records if isinstance(r, StepRecord) and r.step <= step]

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation after `step` steps is written down; False on other ranks."""
        return self._is_writing and any(
            isinstance(record, EvalRecord) and record.step == step
            for record in read_records(self._run.metrics_path)
        )

    def set_state(self, status: RunStatus, step: int, *, exit_code: int | None = None) -> None:
        if self._is_writing:
            self._run.write_state(
                RunState(
                    status=status,
                    step=step,
                    num_steps=self._num_steps,
                    exit_code=exit_code,
                    pid=os.getpid(),
                    host=socket.gethostname(),
                    updated_at=now(),
                )
            )

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
