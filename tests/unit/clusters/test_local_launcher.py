"""run_job on real processes: ends, deaths, signals, smaller plans, locks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import psutil
import pytest

import local_cases
from local_cases import Notes, make_plan, make_run, stand_in_command
from tightfit.clusters.local import launcher, outcome
from tightfit.clusters.local.launcher import lock_run
from tightfit.clusters.local.workers import find_leftovers
from tightfit.core.errors import UsageError
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import read_records
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

HERE = Path(local_cases.__file__).parent


def run_it(run: RunFolder, notes: Notes | None = None) -> RunState:
    return launcher.run_job(run, observer=notes or Notes(), command=stand_in_command(run))


def smaller(plan: Plan, micro_batch: int) -> Plan:
    strategy = plan.strategy.model_copy(update={"micro_batch": micro_batch})
    return plan.model_copy(update={"strategy": strategy})


def test_a_run_that_finishes_is_told_step_by_step(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "run"), Notes()
    state = run_it(run, notes)

    assert (state.status, state.step, state.exit_code) == (RunStatus.FINISHED, 6, 0)
    assert notes.steps == [1, 2, 3, 4, 5, 6]
    assert notes.lines == ["stand-in starts at step 0"]
    assert "stand-in starts" in run.log_path.read_text()


def test_a_killed_worker_is_named_and_the_same_command_resumes(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "run", at={"4": "once:die"}), Notes()
    state = run_it(run)

    assert (state.status, state.step, state.exit_code) == (RunStatus.FAILED, 3, 1)
    assert "SIGKILL" in (state.problem or "")
    assert "step 3 of 6" in (state.problem or "")
    assert run.read_state() == state
    assert run_it(run, notes).status is RunStatus.FINISHED
    assert notes.steps == [3, 4, 5, 6]
    assert [r.step for r in read_records(run.metrics_path) if r.kind == "step"] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_the_kernels_killing_for_memory_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 3\noom_kill 3\n")
    monkeypatch.setattr(outcome, "_OOM_COUNTERS", (counter,))
    before = outcome.take_snapshot(make_run(tmp_path / "run"))
    counter.write_text("oom 4\noom_kill 4\n")
    run = RunFolder(path=tmp_path / "run")
    state = outcome.infer_outcome(run, before, exit_code=-9, asked=None)

    assert (state.status, state.exit_code) == (RunStatus.FAILED, 6)
    assert "host memory" in (state.problem or "")


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("bug", 70, "ValueError: the stand-in is broken"),
        ("import", 6, "needs the package peft"),
        ("abort", 70, "SIGABRT"),
        ("refused", 6, "host memory at step 1 of 6"),
        ("nan", 4, "loss is nan"),
    ],
)
def test_other_deaths(tmp_path: Path, word: str, code: int, said: str) -> None:
    state = run_it(make_run(tmp_path / "run", at={"2": word}))

    assert (state.status, state.exit_code) == (RunStatus.FAILED, code)
    assert said in (state.problem or "")
    assert state.remedy


def test_old_words_are_not_taken_for_the_end_of_this_start(tmp_path: Path) -> None:
    """A worker that dies before its first word must not inherit the last run's `finished`."""
    run = make_run(tmp_path / "run")
    run_it(run)
    command = [sys.executable, "-c", "import sys; sys.exit(9)"]
    state = launcher.run_job(run, observer=Notes(), command=command)

    assert state.status is RunStatus.FAILED
    assert "exit code 9" in (state.problem or "")


def test_out_of_memory_goes_on_with_smaller_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = make_run(tmp_path / "run", at={"3": "once:oom"}), Notes()
    first = run.read_plan()
    second = smaller(first, first.strategy.micro_batch + 7)
    monkeypatch.setattr(launcher, "list_fallbacks", lambda _plan: [second])
    state = run_it(run, notes)

    assert state.status is RunStatus.FINISHED
    assert run.read_plan() == second
    assert Plan.model_validate_json((run.path / "plan.1.json").read_bytes()) == first
    assert notes.steps == [1, 2, 3, 4, 5, 6]
    (event,) = [r for r in notes.records if r.kind == "event" and "out of memory" in r.text]
    assert event.step == 2
    assert f"micro-batch {second.strategy.micro_batch}" in event.text


def test_out_of_memory_with_nothing_smaller_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", at={"3": "oom"})
    plan = run.read_plan()
    ladder = [smaller(plan, plan.strategy.micro_batch + n) for n in (1, 2)]

    def next_of(failed: Plan) -> list[Plan]:
        return ladder[ladder.index(failed) + 1 :] if failed in ladder else ladder

    monkeypatch.setattr(launcher, "list_fallbacks", next_of)
    state = run_it(run)

    assert (state.status, state.exit_code) == (RunStatus.FAILED, 5)
    assert "no smaller plan" in (state.problem or "")
    assert sorted(path.name for path in run.path.glob("plan.*.json")) == [
        "plan.1.json", "plan.2.json",
    ]  # fmt: skip


def test_a_launcher_killed_after_an_out_of_memory_takes_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    state = RunState(status=RunStatus.OUT_OF_MEMORY, step=2, num_steps=6, updated_at="then")
    run.write_state(state)
    second = smaller(run.read_plan(), run.read_plan().strategy.micro_batch + 1)
    monkeypatch.setattr(launcher, "list_fallbacks", lambda _plan: [second])

    assert run_it(run).status is RunStatus.FINISHED
    assert run.read_plan() == second


def ignore(_signum: int, _frame: FrameType | None) -> None:
    """What a signal meets that comes when the launcher is over: it must not end pytest."""


@contextmanager
def sending(kind: signal.Signals, *times: Callable[[], bool]) -> Iterator[None]:
    """Signal this process at each of `times`, while the block lasts and the launcher listens."""
    before, is_over = signal.signal(kind, ignore), threading.Event()

    def send() -> None:
        for is_time in times:
            # A start of workers sets SIGUSR1 aside for a moment.
            while not is_time() or signal.getsignal(kind) in (ignore, signal.SIG_IGN):
                if is_over.wait(0.02):
                    return
            os.kill(os.getpid(), kind)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        signal.signal(kind, before)


def has_stepped(run: RunFolder) -> bool:
    return run.metrics_path.exists() and bool(read_records(run.metrics_path))


def was_heard(notes: Notes, *, seconds: float = 0.0) -> bool:
    """Whether the launcher has taken the first wish in, and so long ago."""
    is_heard = any("saving first" in text for text in notes.said)
    time.sleep(seconds if is_heard else 0)
    return is_heard


@pytest.mark.parametrize(
    ("kind", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_the_first_signal_saves_and_stops(tmp_path: Path, kind: signal.Signals, code: int) -> None:
    run, notes = make_run(tmp_path / "run", num_steps=5000, seconds_per_step=0.05), Notes()
    with sending(kind, lambda: has_stepped(run)):
        state = run_it(run, notes)
        assert signal.getsignal(kind) is ignore, "as it was before"

    assert (state.status, state.exit_code) == (RunStatus.STOPPED, code)
    assert 0 < state.step < 5000
    assert int((run.path / "saved_step").read_text()) == state.step
    assert was_heard(notes)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    behaviour = {"num_steps": 5000, "seconds_per_step": 0.05, "hears": False}
    run, notes = make_run(tmp_path / "run", **behaviour), Notes()
    started = time.monotonic()
    again = partial(was_heard, notes, seconds=1.2)
    with sending(signal.SIGINT, lambda: has_stepped(run), again):
        state = run_it(run, notes)

    assert time.monotonic() - started < 120  # its steps take twice as long
    assert state.exit_code in (1, 130)
    assert find_leftovers(str(run.path / "launcher.lock")) == []


def test_two_signals_at_once_are_one_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that pauses may let the launcher hear them seconds apart.
    monkeypatch.setattr(launcher, "SAME_SECONDS", 60 * launcher.SAME_SECONDS)
    # Steps so long that the second comes before the worker has saved.
    run, notes = make_run(tmp_path / "run", num_steps=500, seconds_per_step=1.0), Notes()
    with sending(signal.SIGTERM, lambda: has_stepped(run), partial(was_heard, notes)):
        state = run_it(run, notes)

    assert state.status is RunStatus.STOPPED
    assert (run.path / "saved_step").exists()


def test_a_stop_before_the_worker_listens_is_a_stop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with sending(signal.SIGTERM, run.log_path.exists):  # it is opened for a worker that starts
        state = launcher.run_job(run, observer=Notes(), command=command)

    assert (state.status, state.exit_code) == (RunStatus.STOPPED, 75)


def test_one_launcher_per_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with lock_run(run), pytest.raises(UsageError) as caught:
        run_it(run)

    assert f"process {os.getpid()}" in caught.value.problem
    assert run_it(run).status is RunStatus.FINISHED


LAUNCHER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from local_cases import Notes, stand_in_command
from tightfit.clusters.local.launcher import run_job
from tightfit.runs.run_folder import RunFolder
run = RunFolder(path=Path(sys.argv[1]))
sys.exit(run_job(run, observer=Notes(), command=stand_in_command(run)).exit_code)
"""


def test_a_killed_launcher_leaves_no_second_worker(tmp_path: Path) -> None:
    """kill -9 of the launcher, then the same command: its worker saves, ends, and is resumed."""
    # Slow, so that it is still at work when it is looked for; who resumes it need not be.
    run, notes = make_run(tmp_path / "run", num_steps=120, seconds_per_step=1.0), Notes()
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run.path), str(HERE)])
    while not read_records(run.metrics_path):
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    (orphan,) = find_leftovers(str(run.path / "launcher.lock"))
    make_run(run.path, num_steps=120, seconds_per_step=0.01)
    state = run_it(run, notes)

    assert state.status is RunStatus.FINISHED
    assert not psutil.pid_exists(orphan.pid)
    assert any("earlier start" in text for text in notes.said)
    done = [r.step for r in read_records(run.metrics_path) if r.kind == "step"]
    assert done == list(range(1, 121))


def test_a_live_launcher_is_named_from_another_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=4000, seconds_per_step=0.05)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run.path), str(HERE)])
    while not read_records(run.metrics_path):
        time.sleep(0.05)
    with pytest.raises(UsageError, match=f"process {launcher.pid} on"):
        run_it(run)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=120) == 75


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    from tightfit.core.errors import NotFoundError

    with pytest.raises(NotFoundError):
        launcher.run_job(RunFolder(path=tmp_path), observer=Notes())


def test_the_plan_of_the_folder_is_what_is_started(tmp_path: Path) -> None:
    """Without a stand-in the command is the worker's own; here it fails for want of tokens."""
    run = make_run(tmp_path / "run")
    run.write_plan(make_plan())
    state = launcher.run_job(run, observer=Notes())

    assert state.status is RunStatus.FAILED
    assert json.loads(run.state_path.read_text())["status"] == "failed"
