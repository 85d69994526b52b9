"""A process around the one that computes with `--hosts`, for llama.cpp ends it with a lost host.

Its RPC backend calls abort() from a thread of its own, which nothing in that process can outlive.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.with_parent import end_with_parent
from tightfit.engines.llama.rpc_hello import how_to_start, probe_host

GUARD_VARIABLE = "TIGHTFIT_GUARD"
"""In the guarded process: its guard's process id."""
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


def join_guard() -> bool:
    """Whether this process is guarded already; from then on it ends with its guard."""
    guard = os.environ.get(GUARD_VARIABLE, "")
    if not guard.isdigit() or os.getppid() != int(guard):
        return False
    end_with_parent(int(guard))
    return True


def run_guarded(command: Sequence[str], hosts: tuple[str, ...]) -> int:
    """The command's exit code; an error that names the host where one was lost."""
    environment = {**os.environ, GUARD_VARIABLE: str(os.getpid())}
    with subprocess.Popen(command, env=environment) as guarded, _passing_signals_on(guarded):
        code = guarded.wait()
    if code == -signal.SIGABRT:
        raise describe_loss(hosts)
    if code < 0:  # as if there had been no process between
        if -code not in (signal.SIGKILL, signal.SIGSTOP):  # which nobody can handle
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def describe_loss(hosts: tuple[str, ...]) -> EnvironmentFaultError:
    """Which host is gone, as far as can be seen now."""
    for host in hosts:
        try:
            probe_host(host, None)
        except EnvironmentFaultError as fault:
            return EnvironmentFaultError(
                f"A host was lost while it computed. {fault.problem}",
                remedy=f"{how_to_start(host)}; then the same command goes on",
            )
    return EnvironmentFaultError(
        f"llama.cpp gave up, as it does when a connection breaks; {', '.join(hosts)} can be "
        "reached again.",
        remedy="the same command goes on    (TIGHTFIT_DEBUG=1 shows llama.cpp's own words)",
    )


def silence_abort(library: Any) -> None:
    """Keep llama.cpp's last words and its core dump back: the guard says what happened."""
    if GUARD_VARIABLE not in os.environ or os.environ.get("TIGHTFIT_DEBUG", "0") not in ("", "0"):
        return
    # A C function that does nothing with a text: Python's own may wait for a lock at that time.
    nothing = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
    library.ggml_set_abort_callback.argtypes = [ctypes.c_void_p]
    library.ggml_set_abort_callback(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextlib.contextmanager
def _passing_signals_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A terminal sends Ctrl-C to both processes; every other signal comes here alone."""

    def pass_on(number: int, _frame: object) -> None:
        if number != signal.SIGINT or not _has_terminal():
            process.send_signal(number)

    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
