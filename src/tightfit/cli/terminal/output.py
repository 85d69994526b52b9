"""The one way text leaves: stdout or a named failure, stderr or nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO

from tightfit.cli.terminal.harmless import harmless


class PipeClosedError(Exception):
    """The reader of stdout has gone. Not an OSError: typer would answer those itself."""


class OutputLostError(Exception):
    """Stdout takes nothing more: a full disk, a closed descriptor."""


def write_out(text: str) -> None:
    """All of `text` to stdout now, or one of the two errors above."""
    if sys.stdout is None:
        raise OutputLostError("stdout is closed")
    try:
        sys.stdout.write(_encodable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        raise PipeClosedError from None
    except OSError as fault:
        raise OutputLostError(fault.strerror or str(fault)) from None


def write_err(text: str) -> None:
    """Text to stderr, where there is one that takes it: there is nobody left to tell."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        _silence(sys.stderr)


def announce(path: Path) -> None:
    """A file was written; on stderr, so that stdout stays the answer alone."""
    write_err(f"wrote {harmless(str(path))}\n")


def speaks_unicode() -> bool:
    """Whether stdout can show more than ASCII for certain."""
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")


def silence_stdout() -> None:
    """What could not be written is not tried again."""
    _silence(sys.stdout)


def _silence(stream: TextIO | None) -> None:
    """Python flushes its streams once more while it ends, and would end with a code of its own."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


def _encodable(text: str) -> str:
    """Characters that stdout's encoding lacks, as `\\xe4`."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
