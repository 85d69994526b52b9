"""run_job: start the workers of a run on this node, follow them, and start them again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from tightfit.core.errors import DoesNotFitError, EnvironmentFaultError
from tightfit.core.with_parent import bind_command
from tightfit.launch.command import worker_command, worker_environment
from tightfit.launch.elastic import is_final
from tightfit.launch.exits import EXIT_INTERRUPTED, EXIT_REQUEUE
from tightfit.launch.follow import Follower, LineFollower
from tightfit.launch.lock import hold_lock, lock_path
from tightfit.launch.next_plan import count_failed_plans, take_next_plan
from tightfit.launch.outcome import conclude, conclude_as, look_before, read_state, read_told
from tightfit.launch.processes import ask_to_stop, end_all, end_leftovers, start_worker
from tightfit.launch.rendezvous import Rendezvous
from tightfit.launch.signals import StopWish, hear_wishes
from tightfit.ledger.metrics import Record
from tightfit.ledger.run_folder import RunFolder, RunState, RunStatus
from tightfit.planning.fallback import list_fallbacks
from tightfit.planning.plan import Plan

POLL_SECONDS = 0.2
PAUSE_SECONDS = 5.0
"""Between starts after a node was lost, so that a broken network is not hammered."""


class Watch(Protocol):
    """Who is told what happens."""

    def record(self, record: Record) -> None:
        """A step, an evaluation or an event, as the worker wrote it."""

    def line(self, line: str) -> None:
        """A line of the workers' log."""

    def say(self, text: str) -> None:
        """A word of the launcher's own."""

    def tick(self) -> None:
        """Called a few times a second, whatever happens."""


@dataclass(slots=True, kw_only=True)
class _Job:
    run: RunFolder
    watch: Watch
    wish: StopWish
    rendezvous: Rendezvous | None
    command: Sequence[str] | None
    is_trial: bool
    records: Follower = field(init=False)
    lines: LineFollower = field(init=False)

    def __post_init__(self) -> None:
        self.records = Follower(self.run.metrics_path, skip_existing=True)
        self.lines = LineFollower(self.run.log_path, skip_existing=True)

    @property
    def mark(self) -> str:
        return str(lock_path(self.run, self.rendezvous))


def run_job(
    run: RunFolder,
    *,
    watch: Watch,
    rendezvous: Rendezvous | None = None,
    command: Sequence[str] | None = None,
    lock_wait_seconds: float = 0.0,
    is_trial: bool = False,
) -> RunState:
    """Run the folder's plan to an end, through as many smaller plans as it takes.

    Resuming is the worker's own doing, so a run that was stopped or killed is
    simply run again. `command` stands in for the worker in tests. A trial is one
    plan, once: too big is its answer, and a wish to stop ends it without saving.
    """
    with hold_lock(run, rendezvous, wait_seconds=lock_wait_seconds), hear_wishes() as wish:
        job = _Job(
            run=run,
            watch=watch,
            wish=wish,
            rendezvous=rendezvous,
            command=command,
            is_trial=is_trial,
        )
        num_left = end_leftovers(job.mark)
        if num_left:
            watch.say("workers of an earlier start were still here; they were made to stop")
        state = _run_trial(job) if is_trial else _run_plans(job)
        if read_state(run) != state:
            with suppress(EnvironmentFaultError):  # the outcome itself matters more
                run.write_state(state)
    return state


def _run_plans(job: _Job) -> RunState:
    plan = job.run.read_plan()
    before = read_state(job.run)
    state = before if before and before.status is RunStatus.OUT_OF_MEMORY else None
    while True:
        if state is None:
            state = _run_until_final(job, plan)
        if state.status is not RunStatus.OUT_OF_MEMORY:
            return _as_asked(state, job.wish)
        try:
            plan = take_next_plan(job.run, plan, list_fallbacks)
        except DoesNotFitError as fault:
            return conclude_as(
                job.run,
                RunStatus.FAILED,
                exit_code=fault.exit_code,
                problem=fault.problem,
                remedy=fault.remedy,
            )
        _tell_news(job)
        if job.wish.first is not None:
            return _as_asked(
                conclude_as(job.run, RunStatus.STOPPED, exit_code=EXIT_REQUEUE), job.wish
            )
        state = None


def _run_trial(job: _Job) -> RunState:
    state = _run_until_final(job, job.run.read_plan())
    if job.wish.first is not None and state.status is not RunStatus.FINISHED:
        state = conclude_as(job.run, RunStatus.STOPPED, exit_code=EXIT_REQUEUE)
    return _as_asked(state, job.wish)


def _as_asked(state: RunState, wish: StopWish) -> RunState:
    """Ctrl-C has its own code, by which shells know it."""
    is_interrupt = wish.first is not None and wish.first.name == "SIGINT"
    if state.status is RunStatus.STOPPED and is_interrupt:
        return state.model_copy(update={"exit_code": EXIT_INTERRUPTED})
    return state


def _run_until_final(job: _Job, plan: Plan) -> RunState:
    """One plan; on several nodes, started again after a node was lost."""
    num_starts_left = job.rendezvous.max_restarts if job.rendezvous else 0
    while True:
        before = look_before(job.run)
        exit_code = _run_once(job, plan)
        told = read_told(job.run, before)
        asked = job.wish.passed_on if job.wish.first is not None else None
        is_over = not num_starts_left or asked is not None
        if told is not None and (is_over or is_final(told)):
            return told
        if is_over:
            return conclude(job.run, before, exit_code=exit_code, asked=asked)
        num_starts_left -= 1
        job.watch.say(f"torchrun ended with {exit_code}; starting it again")
        _pause(job)


def _run_once(job: _Job, plan: Plan) -> int:
    """Start, follow and pass signals on, until the workers are gone."""
    command = job.command or worker_command(
        plan, job.run.path, job.rendezvous, attempt=count_failed_plans(job.run)
    )
    environment = worker_environment(
        plan,
        job.rendezvous,
        mark=job.mark,
        num_cores=len(os.sched_getaffinity(0)),
        inherited=os.environ,
    )
    if job.is_trial:  # nobody goes on with it
        command = bind_command(command)
    process = start_worker(command, job.run, environment)
    job.wish.listen()
    try:
        return _follow(job, process)
    except BaseException:  # a fault of ours must not leave workers behind
        end_all(process.pid)
        process.wait()
        raise


def _follow(job: _Job, process: subprocess.Popen[bytes]) -> int:
    is_asked = is_ended = False
    while True:
        exit_code = process.poll()
        _tell_news(job)
        if exit_code is not None:
            return exit_code
        if job.wish.first is not None and job.is_trial:
            end_all(process.pid)
        elif job.wish.first is not None and not is_asked:
            is_asked = True
            job.watch.say("asked to stop: saving first (once more to stop at once)")
            ask_to_stop(process, job.wish.passed_on)
        if job.wish.is_urgent and not is_ended:
            is_ended = True
            job.watch.say("stopping at once; what came after the last checkpoint is lost")
            end_all(process.pid)
        time.sleep(POLL_SECONDS)


def _tell_news(job: _Job) -> None:
    for line in job.lines.read():
        job.watch.line(line)
    for record in job.records.read():
        job.watch.record(record)
    job.watch.tick()


def _pause(job: _Job) -> None:
    end = time.monotonic() + PAUSE_SECONDS
    while time.monotonic() < end and job.wish.first is None:
        job.watch.tick()
        time.sleep(POLL_SECONDS)
