"""How a run ended: the state that its workers wrote, or what their exit code and log show."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tightfit.core.errors import EXIT_BUG, EXIT_OUT_OF_MEMORY, EXIT_REQUEUE, SetupError, UserError
from tightfit.core.reading import open_regular
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

_RANK_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")
_EXCEPTION_LINE = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Interrupt))(?:: (.*))?$")
_MISSING = re.compile(r"No module named '?([\w.]+)")
_OWN_PACKAGE = "tightfit"
NUM_LAST_LINES = 80
_USER_CODES = range(UserError.exit_code, SetupError.exit_code + 1)
_OPENBLAS_OUT_OF_MEMORY = "OpenBLAS error: Memory allocation still failed"
"""What multiplies on ARM processors ends the process with these words, where others raise."""
_NO_SPACE_BYTES = 1 << 16
"""Below this not even the state fits."""
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Both count the kernel's out-of-memory kills and are readable by everyone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The run before its workers started, to tell their reports from older ones."""

    state_mark: tuple[int, int] | None
    log_size: int
    num_oom_kills: int


def take_snapshot(run: RunFolder) -> RunSnapshot:
    size = run.log_path.stat().st_size if run.log_path.is_file() else 0
    return RunSnapshot(
        state_mark=_mark(run.state_path), log_size=size, num_oom_kills=count_oom_kills()
    )


def read_reported(run: RunFolder, before: RunSnapshot) -> RunState | None:
    """The outcome that the workers wrote since; None where they wrote nothing final."""
    if _mark(run.state_path) == before.state_mark:
        return None
    state = read_state(run)
    is_open = state is None or state.status in (RunStatus.PREPARED, RunStatus.RUNNING)
    return None if is_open else state


def read_state(run: RunFolder) -> RunState | None:
    """The run's own state; None where there is none that can be read."""
    try:
        return run.read_state()
    except UserError:
        return None


def run_error(state: RunState, *, remedy: str) -> UserError:
    """The error that ended a failed run, as an exception; `remedy` where the run names none."""
    error = UserError(state.problem or "The run failed.", remedy=state.remedy or remedy)
    error.exit_code = state.exit_code or UserError.exit_code
    return error


def infer_outcome(
    run: RunFolder, before: RunSnapshot, *, exit_code: int, asked: signal.Signals | None
) -> RunState:
    """What the exit code and log show where the workers reported nothing."""
    last = read_lines(run.log_path, start=before.log_size)
    code = _code_of_rank(last, exit_code)
    if asked is not None and code in (0, -asked, 128 + asked, EXIT_REQUEUE):
        # Before the worker listened: nothing was done that could have been saved.
        return make_outcome(run, RunStatus.STOPPED, exit_code=EXIT_REQUEUE)
    if code == EXIT_OUT_OF_MEMORY:
        return make_outcome(run, RunStatus.OUT_OF_MEMORY, exit_code=EXIT_OUT_OF_MEMORY)
    if code < 0 or 128 < code < 160:
        return _killed(run, before, signum=-code if code < 0 else code - 128)
    if any(_OPENBLAS_OUT_OF_MEMORY in line for line in last):
        return _out_of_host_memory(run)
    found = _read_user_error(run, last, code) if code in _USER_CODES else None
    return found or _died(run, last, code=code)


def _read_user_error(run: RunFolder, last: list[str], code: int) -> RunState | None:
    """An error of the user's that the worker could not write down, as on a full disk."""
    if shutil.disk_usage(run.path).free < _NO_SPACE_BYTES:
        problem = f"No space left on device: the disk of {run.path} is full. "
        problem += "The last checkpoint is intact."
        remedy = f"make room (df -h {shlex.quote(str(run.path))}), then start the same command "
        return _failed(run, SetupError.exit_code, problem, f"{remedy}again")
    lines = [line.split("]:")[-1].strip() for line in last]
    problems = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    remedies = [line.removeprefix("try: ") for line in lines if line.startswith("try: ")]
    if not problems or not remedies:
        return None
    return _failed(run, code, problems[-1], remedies[-1])


def make_outcome(
    run: RunFolder,
    status: RunStatus,
    *,
    exit_code: int,
    problem: str | None = None,
    remedy: str | None = None,
) -> RunState:
    """The last known state with another ending."""
    state = read_state(run)
    return RunState(
        status=status,
        step=state.step if state else 0,
        num_steps=state.num_steps if state else 0,
        problem=problem,
        remedy=remedy,
        exit_code=exit_code,
        updated_at=datetime.now(timezone.utc).isoformat(),
    )


def _failed(run: RunFolder, exit_code: int, problem: str, remedy: str) -> RunState:
    return make_outcome(run, RunStatus.FAILED, exit_code=exit_code, problem=problem, remedy=remedy)


def _describe_step(run: RunFolder) -> str:
    state = read_state(run)
    return f" at step {state.step} of {state.num_steps}" if state and state.num_steps else ""


def _killed(run: RunFolder, before: RunSnapshot, *, signum: int) -> RunState:
    at = _describe_step(run)
    again = "start the same command again    (it goes on from the last checkpoint)"
    if signum != signal.SIGKILL:
        name = signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"
        problem = f"A worker died of {name}{at}; {run.log_path} has its last words."
        return _failed(run, EXIT_BUG, problem, again)
    if count_oom_kills() > before.num_oom_kills:
        return _out_of_host_memory(run)
    problem = f"A worker was killed (SIGKILL){at}: by hand, by the batch system, or by the "
    problem += "kernel for want of host memory (sudo dmesg | grep -i oom tells)."
    return _failed(run, UserError.exit_code, problem, again)


def _out_of_host_memory(run: RunFolder) -> RunState:
    """On a CPU a smaller plan helps; beside a GPU it is another memory that ran out."""
    if run.read_plan().hardware.node.gpu.is_cpu:
        return make_outcome(run, RunStatus.OUT_OF_MEMORY, exit_code=EXIT_OUT_OF_MEMORY)
    problem = f"The machine ran out of host memory{_describe_step(run)}, which ended a worker."
    remedy = "free host memory, or plan without offload: --set offload=none"
    return _failed(run, SetupError.exit_code, problem, remedy)


def _died(run: RunFolder, last: list[str], *, code: int) -> RunState:
    """An exit without a report: an import that failed, or a bug."""
    words = [
        found for line in last if (found := _EXCEPTION_LINE.match(line.split("]: ")[-1].strip()))
    ]
    kind, message = (words[-1][1], words[-1][2] or "") if words else ("", "")
    missing = _MISSING.search(message)
    if missing is not None and missing[1].split(".")[0] != _OWN_PACKAGE:
        problem = f"Training needs the package {missing[1]}, which is not installed."
        return _failed(run, SetupError.exit_code, problem, "pip install 'tightfit[train]'")
    why = f"{kind}: {message[:300]}" if kind else f"exit code {code}, without a message"
    remedy = f"less {shlex.quote(str(run.log_path))}    (has the whole story)"
    return _failed(run, EXIT_BUG, f"The worker failed: {why}.", remedy)


def _code_of_rank(last: list[str], exit_code: int) -> int:
    """torchrun says 1 whatever happened; its summary names the first rank that failed."""
    if exit_code != 1:
        return exit_code
    found = [int(match.group(1)) for line in last if (match := _RANK_EXIT.search(line))]
    return found[-1] if found else exit_code


def read_lines(path: Path, *, start: int) -> list[str]:
    """The last lines that were written after `start`."""
    try:
        with open_regular(path) as stream:
            stream.seek(start)
            lines = deque(stream, maxlen=NUM_LAST_LINES)
    except OSError:
        return []
    return [line.decode(errors="replace").rstrip() for line in lines]


def count_oom_kills() -> int:
    """Kills by the kernel for want of memory, in this container and on this machine."""
    total = 0
    for path in _OOM_COUNTERS:
        try:
            text = path.read_text()
        except OSError:
            continue
        total += sum(int(found) for found in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE))
    return total


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns
