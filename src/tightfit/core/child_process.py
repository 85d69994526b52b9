"""Child processes that exchange one JSON object per line with us, and that end with their parent.

`python -m tightfit.core.child_process PID COMMAND...` runs a command that ends with process PID.
Standard library only: the Python of another environment runs this file by its path.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Message = dict[str, Any]
"""One line of JSON."""
LAST_LINE_CHARS = 300
_TAIL_BYTES = 4096


class ChildProcess:
    """A command whose stdin and stdout carry one JSON object per line.

    It has its own session, so Ctrl-C reaches only this process. If this process is killed, the
    child's stdin closes, which tells the child to end.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        limit_seconds: float | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """`log` receives its stderr; after `limit_seconds` it is killed. OSError: cannot start.

        `inherited`: open files that it has too, under the same numbers.
        """
        self._other_output = ""
        # A file, not a pipe: nothing has to read it, and all of it is there when the child ends.
        self._stderr = tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=env,
                start_new_session=True,
                pass_fds=inherited,
            )
        except OSError:
            self._stderr.close()
            raise
        self.pid = self._process.pid
        self._sending = threading.Lock()
        self._reading = threading.RLock()
        """Held while `_stderr` is read or closed: its descriptor may be another file's by then."""
        self.is_late = False
        """Whether it was killed at its limit."""
        self._alarm = threading.Timer(limit_seconds or 0.0, self._kill_late)
        if limit_seconds is not None:
            self._alarm.daemon = True
            self._alarm.start()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(seconds=0.0)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Whether the child's stdin took it."""
        assert self._process.stdin is not None
        try:
            with self._sending:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError):  # ValueError: stdin was closed
            return False
        return True

    def lift_limit(self) -> None:
        """It may run for as long as it likes from now on."""
        self._alarm.cancel()

    def _kill_late(self) -> None:
        self.is_late = True
        self._process.kill()

    def close_stdin(self) -> None:
        """Nothing more will be sent."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def __iter__(self) -> Iterator[Message]:
        """Messages until the child closes its stdout.

        Other lines, such as a login shell's greeting, are skipped; `last_line` has the last one.
        """
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:
                    message = None
                if isinstance(message, dict):
                    yield message
                else:
                    self._other_output = line.decode(errors="replace").strip() or self._other_output

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code; None if it still runs after that time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None

    def end(self, *, seconds: float) -> None:
        """Close its stdin; if it still runs after `seconds`, kill its process group."""
        self._alarm.cancel()
        self.close_stdin()
        if self.wait(seconds) is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        with self._reading:
            self._other_output = self.last_line
            self._stderr.close()

    @property
    def last_line(self) -> str:
        """The last line on stderr, or else of what was no JSON on stdout."""
        lines: list[str] = []
        with self._reading:
            if not self._stderr.closed:
                # pread: the child writes at the same file position.
                descriptor = self._stderr.fileno()
                start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
                text = os.pread(descriptor, _TAIL_BYTES, start).decode(errors="replace")
                lines = [line.strip() for line in text.splitlines() if line.strip()]
        return (lines[-1] if lines else self._other_output)[:LAST_LINE_CHARS]


# The child's side.

SendMessage = Callable[[Message], None]


def open_output() -> SendMessage:
    """Reserve stdout for messages; what libraries print goes to stderr from now on."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(message: Message) -> None:
        with lock:
            output.write(json.dumps(message).encode() + b"\n")
            output.flush()

    return send


def read_messages() -> Iterator[Message]:
    """Until stdin closes, which tells a child to end."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def limit_data_bytes(num_bytes: int) -> None:
    """What this process maps beyond the limit raises MemoryError from now on."""
    if not sys.platform.startswith("linux"):  # elsewhere the limit counts other things, or nothing
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if most == resource.RLIM_INFINITY else min(most, num_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


# Processes that end with their parent, whatever it dies of.

PR_SET_PDEATHSIG = 1
"""Linux, sys/prctl.h: the signal that a process gets when the thread that started it ends."""
POLL_SECONDS = 1.0


def bind_command(command: Sequence[str]) -> list[str]:
    """A command that ends with this process, if the kernel supports it."""
    from tightfit.core.import_path import module_words  # here: this file also runs by its path

    words = module_words("tightfit.core.child_process", str(os.getpid()), *command)
    return [sys.executable, *words]


def end_with_parent(parent_pid: int) -> None:
    """Have this process killed when `parent_pid`, which started it, ends; not its own children.

    The kernel does it, so that no lock and no long computation delays it. Where the kernel
    cannot, a thread polls. A parent that ended before this call is noticed as well.
    """
    if not _ask_kernel():
        threading.Thread(target=_poll_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _ask_kernel() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _poll_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
