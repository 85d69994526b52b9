"""run_job: start the workers of a run on this node, follow them, and start them again.

One launcher per run folder and node holds a lock. The first signal asks the workers to save and
stop, the second ends them. After an out-of-memory error the next smaller plan replaces the one
that failed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tightfit.clusters.follow import RunFollower
from tightfit.clusters.local.elastic import is_final
from tightfit.clusters.local.outcome import (
    infer_outcome,
    make_outcome,
    read_reported,
    read_state,
    take_snapshot,
)
from tightfit.clusters.local.workers import (
    ask_to_stop,
    end_all,
    end_leftovers,
    start_worker,
    worker_command,
    worker_environment,
)
from tightfit.clusters.protocol import RunObserver
from tightfit.clusters.rendezvous import Rendezvous
from tightfit.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    DoesNotFitError,
    SetupError,
    UsageError,
)
from tightfit.core.files import write_atomic
from tightfit.core.locks import take_lock
from tightfit.core.units import render_bytes
from tightfit.core.with_parent import bind_command
from tightfit.planning.fallback import list_fallbacks
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import PLAN_CHANGE, EventRecord, append_record
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus


@contextmanager
def lock_run(
    run: RunFolder, rendezvous: Rendezvous | None = None, *, wait_seconds: float = 0.0
) -> Iterator[None]:
    """Hold the run for as long as the block lasts; the kernel lets go if we are killed.

    `wait_seconds`: where the holder may be a node that died, and the file server has yet to
    notice.
    """
    path = lock_path(run, rendezvous)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SetupError(
            f"Cannot write in {run.path}: {error.strerror or error}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from error
    try:
        # Without locks, as on many a Lustre, nothing guards the run.
        if not take_lock(handle, wait_seconds=wait_seconds, is_required=False):
            raise _already_running(run, _read_holder(handle))
        _write_holder(handle)
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def lock_path(run: RunFolder, rendezvous: Rendezvous | None) -> Path:
    """Nodes that share a folder have a lock each."""
    if rendezvous is None:
        return run.path / "launcher.lock"
    rank = rendezvous.node_rank
    return run.path / f"launcher-{socket.gethostname() if rank is None else rank}.lock"


def find_launcher(run: RunFolder) -> int | None:
    """The process on this machine that is running the folder's plan."""
    try:
        handle = os.open(lock_path(run, None), os.O_RDWR)
    except OSError:
        return None
    try:
        holder = None if take_lock(handle, is_required=False) else _read_holder(handle)
    finally:
        os.close(handle)
    return holder[0] if holder is not None and holder[1] == socket.gethostname() else None


def _write_holder(handle: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)


def _read_holder(handle: int) -> tuple[int, str] | None:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _already_running(run: RunFolder, holder: tuple[int, str] | None) -> UsageError:
    who = "Another `tightfit train`"
    remedy = "wait for it, or choose another folder: --output FOLDER"
    if holder is not None:
        pid, host = holder
        who += f" (process {pid} on {host})"
        remedy = f"watch it with: tail -f {shlex.quote(str(run.metrics_path))}"
        if host == socket.gethostname():
            remedy += f"    (kill {pid} makes it save and stop)"
    return UsageError(f"{who} is running in {run.path}.", remedy=remedy)


# Signals to the launcher: the first asks the workers to save and stop, the second ends them.

SAME_SECONDS = 1.0
"""Two of a kind this close are one wish: `timeout` and batch systems signal a process twice."""
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ENDING = (signal.SIGINT, signal.SIGTERM)
"""SIGUSR1 warns of an end to come, so that it never shortens the saving."""


class StopRequest:
    """What was asked for from outside so far."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_urgent = False
        self._last = dict.fromkeys(_CAUGHT, 0.0)

    def hear(self, signum: int, _frame: FrameType | None = None) -> None:
        kind, now = signal.Signals(signum), time.monotonic()
        if self.first is None:
            self.first = kind
        elif kind in _ENDING and self._last[kind] and now - self._last[kind] > SAME_SECONDS:
            self.is_urgent = True
        elif kind is signal.SIGINT and not self._last[kind]:
            self.is_urgent = True  # Ctrl-C from somebody who will not wait for the first wish
        self._last[kind] = now

    @property
    def passed_on(self) -> signal.Signals:
        """What the workers are sent: they know SIGTERM and SIGUSR1."""
        return signal.SIGUSR1 if self.first is signal.SIGUSR1 else signal.SIGTERM

    def listen(self) -> None:
        """Take the signals over, also after a start of workers has set one aside."""
        if threading.current_thread() is not threading.main_thread():
            return
        for kind in _CAUGHT:
            # nohup ignores SIGHUP; it stays so.
            if not (kind is signal.SIGHUP and signal.getsignal(kind) is signal.SIG_IGN):
                signal.signal(kind, self.hear)


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Signals become wishes inside the block, and are as before after it."""
    stop = StopRequest()
    is_main = threading.current_thread() is threading.main_thread()
    before = {kind: signal.getsignal(kind) for kind in _CAUGHT} if is_main else {}
    stop.listen()
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler if handler is not None else signal.SIG_DFL)


# After an out-of-memory: the next plan takes the place of the one that failed.

WAIT_SECONDS = 120.0
"""For another node to write the plan that both come to."""

ListFallbacks = Callable[[Plan], list[Plan]]


def take_next_plan(run: RunFolder, failed: Plan, list_fallbacks: ListFallbacks) -> Plan:
    """Write the next plan; the old one stays as plan.1.json, plan.2.json, ...

    Every node of a job comes here. Whoever keeps the old plan first writes the
    new one; the others wait for it.
    """
    found = list_fallbacks(failed)
    state = read_state(run)
    step = state.step if state else 0
    if not found:
        raise _nothing_left(failed, step)
    if not _keep(run, failed):
        return _wait_for_change(run, failed, found[0])
    run.write_plan(found[0])
    text = f"{PLAN_CHANGE}{failed.summary}; going on with {found[0].summary}"
    append_record(run.metrics_path, EventRecord(step=step, text=text))
    run.write_state(make_outcome(run, RunStatus.PREPARED, exit_code=0))
    return found[0]


def count_failed_plans(run: RunFolder) -> int:
    """Plans that have been left behind."""
    return len(_list_kept(run.path))


def _list_kept(folder: Path) -> list[Path]:
    return [path for path in folder.glob("plan.*.json") if path.name.split(".")[1].isdecimal()]


def _keep(run: RunFolder, failed: Plan) -> bool:
    """Whether this node is the one that keeps the old plan, and so writes the new one."""
    number = count_failed_plans(run) + 1
    if run.read_plan() != failed:
        return False  # another node was quicker
    path = run.path / f"plan.{number}.json"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    write_atomic(path, failed.model_dump_json(indent=2) + "\n")
    return True


def _wait_for_change(run: RunFolder, failed: Plan, expected: Plan) -> Plan:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        found = run.read_plan()
        if found != failed:
            return found
        time.sleep(0.5)
    run.write_plan(expected)  # its writer died in between; all nodes come to the same plan
    return expected


def _nothing_left(failed: Plan, step: int) -> DoesNotFitError:
    node = failed.hardware.node
    capacity = failed.estimate.gpu.capacity_bytes or node.gpu.memory_bytes
    return DoesNotFitError(
        f"Out of memory at step {step}, and no smaller plan is left on {node.gpu.name} "
        f"({render_bytes(capacity)}).",
        remedy=f"a shorter --seq-len than {failed.strategy.seq_len}, or --method qlora",
    )


# run_job: start the workers of a run on this node, follow them, and start them again.

POLL_SECONDS = 0.2
PAUSE_SECONDS = 5.0
"""Between starts after a node was lost, so that a broken network is not hammered."""


@dataclass(slots=True, kw_only=True)
class _Job:
    run: RunFolder
    watch: RunObserver
    stop: StopRequest
    rendezvous: Rendezvous | None
    command: Sequence[str] | None
    is_trial: bool
    news: RunFollower = field(init=False)

    def __post_init__(self) -> None:
        self.news = RunFollower(self.run, self.watch)

    @property
    def mark(self) -> str:
        return str(lock_path(self.run, self.rendezvous))


def run_job(
    run: RunFolder,
    *,
    watch: RunObserver,
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
    with lock_run(run, rendezvous, wait_seconds=lock_wait_seconds), catch_signals() as stop:
        job = _Job(
            run=run,
            watch=watch,
            stop=stop,
            rendezvous=rendezvous,
            command=command,
            is_trial=is_trial,
        )
        num_left = end_leftovers(job.mark)
        if num_left:
            watch.say("workers of an earlier start were still here; they were made to stop")
        state = _run_trial(job) if is_trial else _run_plans(job)
        if read_state(run) != state:
            with suppress(SetupError):  # the outcome itself matters more
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
            return _with_interrupt_code(state, job.stop)
        try:
            plan = take_next_plan(job.run, plan, list_fallbacks)
        except DoesNotFitError as error:
            return make_outcome(
                job.run,
                RunStatus.FAILED,
                exit_code=error.exit_code,
                problem=error.problem,
                remedy=error.remedy,
            )
        job.news.report()
        if job.stop.first is not None:
            return _with_interrupt_code(
                make_outcome(job.run, RunStatus.STOPPED, exit_code=EXIT_REQUEUE), job.stop
            )
        state = None


def _run_trial(job: _Job) -> RunState:
    state = _run_until_final(job, job.run.read_plan())
    if job.stop.first is not None and state.status is not RunStatus.FINISHED:
        state = make_outcome(job.run, RunStatus.STOPPED, exit_code=EXIT_REQUEUE)
    return _with_interrupt_code(state, job.stop)


def _with_interrupt_code(state: RunState, stop: StopRequest) -> RunState:
    """Ctrl-C has its own code, by which shells know it."""
    is_interrupt = stop.first is not None and stop.first.name == "SIGINT"
    if state.status is RunStatus.STOPPED and is_interrupt:
        return state.model_copy(update={"exit_code": EXIT_INTERRUPTED})
    return state


def _run_until_final(job: _Job, plan: Plan) -> RunState:
    """One plan; on several nodes, started again after a node was lost."""
    num_starts_left = job.rendezvous.max_restarts if job.rendezvous else 0
    while True:
        before = take_snapshot(job.run)
        exit_code = _run_once(job, plan)
        reported = read_reported(job.run, before)
        asked = job.stop.passed_on if job.stop.first is not None else None
        is_over = not num_starts_left or asked is not None
        if reported is not None and (is_over or is_final(reported)):
            return reported
        if is_over:
            return infer_outcome(job.run, before, exit_code=exit_code, asked=asked)
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
    job.stop.listen()
    try:
        return _follow(job, process)
    except BaseException:  # an error of ours must not leave workers behind
        end_all(process.pid)
        process.wait()
        raise


def _follow(job: _Job, process: subprocess.Popen[bytes]) -> int:
    is_asked = is_ended = False
    while True:
        exit_code = process.poll()
        job.news.report()
        if exit_code is not None:
            return exit_code
        if job.stop.first is not None and job.is_trial:
            end_all(process.pid)
        elif job.stop.first is not None and not is_asked:
            is_asked = True
            job.watch.say("asked to stop: saving first (once more to stop at once)")
            ask_to_stop(process, job.stop.passed_on)
        if job.stop.is_urgent and not is_ended:
            is_ended = True
            job.watch.say("stopping at once; what came after the last checkpoint is lost")
            end_all(process.pid)
        time.sleep(POLL_SECONDS)


def _pause(job: _Job) -> None:
    end = time.monotonic() + PAUSE_SECONDS
    while time.monotonic() < end and job.stop.first is None:
        job.watch.tick()
        time.sleep(POLL_SECONDS)
