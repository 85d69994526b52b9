"""run_job: start the workers of a run on this node, follow them, and start them again.

One launcher per run folder and node holds a lock. The first signal asks the workers to save and
stop, the second ends them. After an out-of-memory error the next smaller plan replaces the one
that failed.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from tightfit.clusters.follow import RunFollower
from tightfit.clusters.local.outcome import (
    infer_outcome,
    make_outcome,
    read_lines,
    read_reported,
    read_state,
    take_snapshot,
)
from tightfit.clusters.local.workers import (
    ask_to_stop,
    end_all,
    end_leftovers,
    find_leftovers,
    is_final,
    start_worker,
    worker_command,
    worker_environment,
)
from tightfit.clusters.nodes import Rendezvous
from tightfit.clusters.protocol import RunObserver
from tightfit.core.child_process import bind_command
from tightfit.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    DoesNotFitError,
    SetupError,
    UsageError,
)
from tightfit.core.files import (
    describe_write_error,
    open_locked,
    read_holder,
    take_lock,
    temporary_folder,
    write_atomic,
    write_holder,
)
from tightfit.core.units import render_bytes
from tightfit.planning.fallback import list_fallbacks
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import PLAN_CHANGE, EventRecord, append_record
from tightfit.runs.report import PastRun, RunReport, read_run, report_run
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus, TokenFolders


@contextmanager
def lock_run(
    run: RunFolder, rendezvous: Rendezvous | None = None, *, wait_seconds: float = 0.0
) -> Iterator[None]:
    """Hold the run's lock inside the block; the kernel releases it if we are killed.

    `wait_seconds`: where the holder may be a node that died, and the file server has yet to
    notice.
    """
    path = lock_path(run, rendezvous)
    try:
        # Without locks, as on many a Lustre, nothing guards the run.
        handle = open_locked(path, wait_seconds=wait_seconds, is_required=False)
    except OSError as error:
        raise SetupError(
            f"Cannot write in {run.path}: {describe_write_error(error, path)}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from error
    if handle is None:
        raise _already_running(run, read_holder(path))
    try:
        write_holder(handle)
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def lock_path(run: RunFolder, rendezvous: Rendezvous | None) -> Path:
    """Nodes that share a folder have a lock each."""
    if rendezvous is None:
        return run.lock_path
    rank = rendezvous.node_rank
    return run.path / f"launcher-{socket.gethostname() if rank is None else rank}.lock"


def find_launcher(run: RunFolder) -> int | None:
    """The process on this machine that is running the folder's plan; refused on another one."""
    path = lock_path(run, None)
    try:
        handle = open_locked(path, is_required=False) if path.exists() else None
    except OSError:
        return None
    if handle is not None:
        os.close(handle)
        return None
    holder = read_holder(path)
    if holder is None or holder[1] != socket.gethostname():
        raise _already_running(run, holder)
    return holder[0]


def _already_running(run: RunFolder, holder: tuple[int, str] | None) -> UsageError:
    who = "Another `tightfit train`"
    remedy = "wait for it, or choose another folder: --output FOLDER"
    if holder is not None:
        pid, host = holder
        who += f" (process {pid} on {host})"
        remedy = f"follow it with: tail -f {shlex.quote(str(run.metrics_path))}"
        if host == socket.gethostname():
            remedy += f"    (kill {pid} makes it save and stop)"
    return UsageError(f"{who} is running in {run.path}.", remedy=remedy)


# Signals to the launcher: the first asks the workers to save and stop, the second ends them.

SAME_SECONDS = 1.0
"""Two of a kind this close count as one: `timeout` and batch systems signal a process twice."""
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ENDING = (signal.SIGINT, signal.SIGTERM)
"""SIGUSR1 warns of an end to come, so that it never shortens the saving."""


class StopRequest:
    """The signals that were received so far."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_urgent = False
        self._last = dict.fromkeys(_CAUGHT, 0.0)

    def receive(self, signum: int, _frame: FrameType | None = None) -> None:
        kind, now = signal.Signals(signum), time.monotonic()
        if self.first is None:
            self.first = kind
        elif kind in _ENDING and self._last[kind] and now - self._last[kind] > SAME_SECONDS:
            self.is_urgent = True
        elif kind is signal.SIGINT and not self._last[kind]:
            self.is_urgent = True  # Ctrl-C from somebody who will not wait for the first signal
        self._last[kind] = now

    @property
    def passed_on(self) -> signal.Signals:
        """What the workers are sent: they know SIGTERM and SIGUSR1."""
        return signal.SIGUSR1 if self.first is signal.SIGUSR1 else signal.SIGTERM

    def listen(self) -> None:
        """Take the signals over, also after a start of workers has set one aside."""
        set_handler(_CAUGHT, self.receive)


Handler = Callable[[int, FrameType | None], None]


def set_handler(kinds: Sequence[signal.Signals], handler: Handler) -> None:
    """For the main thread; SIGHUP stays ignored where nohup set it so."""
    if threading.current_thread() is threading.main_thread():
        for kind in kinds:
            if not (kind is signal.SIGHUP and signal.getsignal(kind) is signal.SIG_IGN):
                signal.signal(kind, handler)


@contextmanager
def handle_signals(kinds: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """The handler inside the block; the earlier ones return after it."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {kind: signal.getsignal(kind) for kind in kinds} if is_main else {}
    set_handler(kinds, handler)
    try:
        yield
    finally:
        for kind, earlier in before.items():
            signal.signal(kind, earlier if earlier is not None else signal.SIG_DFL)


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Signals become stop requests inside the block."""
    stop = StopRequest()
    with handle_signals(_CAUGHT, stop.receive):
        yield stop


# After an out-of-memory error the next plan replaces the one that failed.

WAIT_SECONDS = 120.0
"""For another node to write the plan that both arrive at."""
ListFallbacks = Callable[[Plan], list[Plan]]


def take_next_plan(run: RunFolder, failed: Plan, list_fallbacks: ListFallbacks) -> Plan:
    """Write the next plan; the old one stays as plan.1.json, plan.2.json, ...

    Every node of a job comes here. Whichever keeps the old plan first writes the new one; the
    others wait for it.
    """
    found = list_fallbacks(failed)
    state = read_state(run)
    step = state.step if state else 0
    if not found:
        node = failed.hardware.node
        capacity = failed.estimate.gpu.capacity_bytes or node.gpu.memory_bytes
        raise DoesNotFitError(
            f"Out of memory at step {step}, and no smaller plan is left on {node.gpu.name} "
            f"({render_bytes(capacity)}).",
            remedy=f"a shorter --seq-len than {failed.strategy.seq_len}, or --method qlora",
        )
    if not _keep(run, failed):
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            changed = run.read_plan()
            if changed != failed:
                return changed
            time.sleep(0.5)
        run.write_plan(found[0])  # its writer died in between; all nodes arrive at the same plan
        return found[0]
    run.write_plan(found[0])
    text = f"{PLAN_CHANGE}{failed.summary}; going on with {found[0].summary}"
    append_record(run.metrics_path, EventRecord(step=step, text=text))
    run.write_state(make_outcome(run, RunStatus.PREPARED, exit_code=0))
    return found[0]


def count_failed_plans(run: RunFolder) -> int:
    """Plans that were replaced."""
    names = [path.name.split(".") for path in run.path.glob("plan.*.json")]
    return sum(name[1].isdecimal() for name in names)


def _keep(run: RunFolder, failed: Plan) -> bool:
    """Whether this node is the one that keeps the old plan, and so writes the new one."""
    path = run.path / f"plan.{count_failed_plans(run) + 1}.json"
    if run.read_plan() != failed:
        return False  # another node was quicker
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    write_atomic(path, failed.model_dump_json(indent=2) + "\n")
    return True


# run_job: start the workers of a run on this node, follow them, and start them again.

POLL_SECONDS = 0.2
PAUSE_SECONDS = 5.0
"""Between starts after a node was lost, so that a broken network is not hammered."""


@dataclass(slots=True, kw_only=True)
class _Job:
    run: RunFolder
    observer: RunObserver
    news: RunFollower
    stop: StopRequest
    rendezvous: Rendezvous | None
    command: Sequence[str] | None
    is_trial: bool

    @property
    def mark(self) -> str:
        return str(lock_path(self.run, self.rendezvous))


def run_job(
    run: RunFolder,
    *,
    observer: RunObserver,
    rendezvous: Rendezvous | None = None,
    command: Sequence[str] | None = None,
    lock_wait_seconds: float = 0.0,
    is_trial: bool = False,
) -> RunState:
    """Run the folder's plan to an end, through as many smaller plans as it takes.

    The worker itself resumes, so a run that was stopped or killed is simply run again. `command`
    replaces the worker in tests. A trial is one plan, once: too big is its answer, and a request
    to stop ends it without saving.
    """
    with lock_run(run, rendezvous, wait_seconds=lock_wait_seconds), catch_signals() as stop:
        job = _Job(
            run=run,
            observer=observer,
            news=RunFollower(run, observer),
            stop=stop,
            rendezvous=rendezvous,
            command=command,
            is_trial=is_trial,
        )
        if end_leftovers(job.mark):
            observer.say("workers of an earlier start were still here; they were made to stop")
        state = _run_until_final(job, run.read_plan()) if is_trial else _run_plans(job)
        if is_trial and stop.first is not None and state.status is not RunStatus.FINISHED:
            state = make_outcome(run, RunStatus.STOPPED, exit_code=EXIT_REQUEUE)
        if state.status is RunStatus.STOPPED and stop.first is signal.SIGINT:
            # Ctrl-C has its own code, by which shells know it.
            state = state.model_copy(update={"exit_code": EXIT_INTERRUPTED})
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
            return state
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
            return make_outcome(job.run, RunStatus.STOPPED, exit_code=EXIT_REQUEUE)
        state = None


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
        job.observer.say(f"torchrun ended with {exit_code}; starting it again")
        end = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < end and job.stop.first is None:
            job.observer.tick()
            time.sleep(POLL_SECONDS)


def _run_once(job: _Job, plan: Plan) -> int:
    """Start, follow and pass signals on, until the workers are gone."""
    is_torchrun = plan.strategy.world_size > 1 or job.rendezvous is not None
    with temporary_folder() if is_torchrun else nullcontext() as logs:
        attempt = count_failed_plans(job.run)
        command = job.command or worker_command(
            plan, job.run.path, job.rendezvous, attempt=attempt, logs=logs
        )
        return _start_and_follow(job, plan, command)


def _start_and_follow(job: _Job, plan: Plan, command: Sequence[str]) -> int:
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
            job.observer.say("asked to stop: saving first (once more to stop at once)")
            ask_to_stop(process, job.stop.passed_on)
        if job.stop.is_urgent and not is_ended:
            is_ended = True
            job.observer.say("stopping at once; what came after the last checkpoint is lost")
            end_all(process.pid)
        time.sleep(POLL_SECONDS)


# A few steps of a plan in a folder that is gone afterwards: what `bench` measures by.

TRIAL_PREFIX = "tightfit-bench-"
TRIAL_LOCK = "bench.lock"
SETTLED_SECONDS = 60.0
"""A younger folder may be one that is being made."""
LOG_LINES = 30
NEEDS_SPACE = "export TMPDIR=/a/folder/with/space"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What is left of a trial when its folder is gone."""

    state: RunState
    past: PastRun
    report: RunReport
    log: tuple[str, ...]
    """The workers' last lines."""


@contextmanager
def open_trial_folder() -> Iterator[Path]:
    """A folder for trials, removed at the end; those of killed launchers are cleared first."""
    _clear_abandoned(Path(tempfile.gettempdir()))
    try:
        home = Path(tempfile.mkdtemp(prefix=TRIAL_PREFIX))
    except OSError as error:
        raise SetupError(
            f"Cannot make a temporary folder: {error.strerror or error}.",
            remedy=NEEDS_SPACE,
        ) from error
    handle = open_locked(home / TRIAL_LOCK, is_required=False, mode=0o600)
    try:
        with handle_signals((signal.SIGTERM, signal.SIGHUP), _leave):
            yield home
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SetupError(
            f"The temporary folder {home.parent} is full.", remedy=NEEDS_SPACE
        ) from error
    finally:
        shutil.rmtree(home, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _leave(signum: int, _frame: FrameType | None) -> None:
    """A SIGTERM unwinds as Ctrl-C does, so that the folder is removed then too."""
    raise SystemExit(128 + signum)


def run_trial(home: Path, plan: Plan, tokens: Path, observer: RunObserver) -> TrialResult:
    """Take the plan's steps once, and read what they say before the folder goes."""
    run = RunFolder(path=home / "run")
    try:
        run.path.mkdir()
        run.write_tokens(TokenFolders(train=str(tokens)))
        run.write_state(
            RunState(status=RunStatus.PREPARED, updated_at=datetime.now(timezone.utc).isoformat())
        )
        run.write_plan(plan)
        state = run_job(run, observer=observer, is_trial=True)
        past = read_run(run)
        log = read_lines(run.log_path, start=0)[-LOG_LINES:]
        # Messages that send the reader to the log, which is in the answer instead.
        texts = {
            name: text and text.replace(str(run.log_path), "`log` of --json")
            for name, text in (("problem", state.problem), ("remedy", state.remedy))
        }
        return TrialResult(
            state=state.model_copy(update=texts),
            past=past,
            report=report_run(past),
            log=tuple(log),
        )
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def _clear_abandoned(parent: Path) -> None:
    """Folders whose launcher was killed, with the workers that it could not end.

    Only where a launcher left its lock: another folder may bear such a name, or a link lead to it.
    """
    for home in parent.glob(f"{TRIAL_PREFIX}*"):
        try:
            found = home.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < SETTLED_SECONDS:
                continue
            handle = os.open(home / TRIAL_LOCK, os.O_RDWR)
        except OSError:
            continue
        try:
            with suppress(OSError):
                if take_lock(handle):
                    mark = str(lock_path(RunFolder(path=home / "run"), None))
                    for process in find_leftovers(mark):
                        end_all(process.pid)
                    shutil.rmtree(home, ignore_errors=True)
        finally:
            os.close(handle)
