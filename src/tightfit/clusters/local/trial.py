"""A few steps of a plan in a folder that is gone afterwards: what `bench` measures by."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from tightfit.clusters.local.launcher import lock_path, run_job
from tightfit.clusters.local.outcome import read_lines
from tightfit.clusters.local.workers import end_all, find_leftovers
from tightfit.clusters.protocol import RunObserver
from tightfit.core.errors import SetupError
from tightfit.core.locks import open_locked, take_lock
from tightfit.planning.plan import Plan
from tightfit.runs.report import PastRun, RunReport, read_run, report_run
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus, TokenFolders

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
        with _exit_on_sigterm():
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


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """A SIGTERM unwinds as Ctrl-C does, so that the folder is removed then too."""
    kinds = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {kind: signal.getsignal(kind) for kind in kinds}
    for kind, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(kind, leave)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler if handler is not None else signal.SIG_DFL)


def run_trial(home: Path, plan: Plan, tokens: Path, watch: RunObserver) -> TrialResult:
    """Take the plan's steps once, and read what they say before the folder goes."""
    run = RunFolder(path=home / "run")
    try:
        run.path.mkdir()
        run.write_tokens(TokenFolders(train=str(tokens)))
        run.write_state(RunState(status=RunStatus.PREPARED, updated_at=_now()))
        run.write_plan(plan)
        state = run_job(run, watch=watch, is_trial=True)
        past = read_run(run)
        log = read_lines(run.log_path, start=0)[-LOG_LINES:]
        return TrialResult(
            state=_without_path(state, run), past=past, report=report_run(past), log=tuple(log)
        )
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def _without_path(state: RunState, run: RunFolder) -> RunState:
    """Messages that send the reader to the log, which is in the answer instead."""
    reported = {"problem": state.problem, "remedy": state.remedy}
    return state.model_copy(
        update={
            name: None if text is None else text.replace(str(run.log_path), "`log` of --json")
            for name, text in reported.items()
        }
    )


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
                    _end_workers(RunFolder(path=home / "run"))
                    shutil.rmtree(home, ignore_errors=True)
        finally:
            os.close(handle)


def _end_workers(run: RunFolder) -> None:
    for process in find_leftovers(str(lock_path(run, None))):
        end_all(process.pid)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
