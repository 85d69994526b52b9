"""Run a cluster's or a driver's own command for a bounded time; its failure is one message."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence

from tightfit.core.errors import SetupError


class CommandMissingError(SetupError):
    """The command is not installed, so that another way may be tried."""


class CommandTimeoutError(SetupError):
    """It gave no answer in time."""


RunCommand = Callable[[Sequence[str], float], str]
"""Arguments and seconds in, standard output out. Tests put recorded outputs in its place."""

_REFORMATTING = ("SINFO_", "SQUEUE_", "SLURM_TIME_FORMAT", "SLURM_JSON", "SLURM_YAML")
_WITHOUT = "without a cluster: tightfit plan MODEL --on 4xV100-32GB"
"""Named with its verb: those that start something take no hardware in words."""


def run_command(arguments: Sequence[str], timeout_seconds: float) -> str:
    """Standard output of the command, or an SetupError that says what went wrong."""
    command = arguments[0]
    # A user's SINFO_FORMAT or a translated locale would change what is printed.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(_REFORMATTING)
    }
    environment["LC_ALL"] = "C"
    try:
        done = subprocess.run(
            list(arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            env=environment,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandMissingError(
            f"The command `{command}` is not on this machine.",
            remedy=f"run this where it is installed; {_WITHOUT}",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CommandTimeoutError(
            f"`{command}` gave no answer in {timeout_seconds:.0f} s.",
            remedy=f"see whether the cluster is up; {_WITHOUT}",
        ) from error
    except OSError as error:
        raise SetupError(
            f"`{command}` does not start: {error.strerror or error}.",
            remedy=f"run it by hand to see why; {_WITHOUT}",
        ) from error
    if done.returncode != 0:
        raise SetupError(
            f"`{command}` failed: {_last_line(done.stderr) or f'exit code {done.returncode}'}",
            remedy=f"run by hand: {shlex.join(arguments)}",
        )
    return done.stdout.decode("utf-8", "replace")


def _last_line(stream: bytes) -> str:
    lines = stream.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""
