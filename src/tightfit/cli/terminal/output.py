"""Text to stdout and stderr: plain, JSON, progress bars; control characters are escaped.

Loads no rich until a progress bar is drawn.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tightfit.core.progress import Progress
from tightfit.core.secrets import hide_secrets
from tightfit.core.text import disarm, sanitize


class PipeClosedError(Exception):
    """The reader of stdout has gone. Not an OSError: typer would answer those itself."""


class OutputLostError(Exception):
    """Stdout takes nothing more: a full disk, a closed descriptor."""


def write_out(text: str) -> None:
    """All of `text` to stdout now, or one of the two errors above."""
    if sys.stdout is None:
        raise OutputLostError("stdout is closed")
    try:
        sys.stdout.write(_encodable(disarm(text)))
        sys.stdout.flush()
    except BrokenPipeError:
        raise PipeClosedError from None
    except OSError as error:
        raise OutputLostError(error.strerror or str(error)) from None


def write_err(text: str) -> None:
    """Text to stderr, or nowhere if stderr takes none: no channel is left to report that."""
    _write_err(disarm(text))


def _write_err(text: str) -> None:
    try:
        sys.stderr.write(hide_secrets(text))
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        _silence(sys.stderr)


def announce(path: Path) -> None:
    """A file was written; on stderr, so that stdout stays the answer alone."""
    write_err(f"wrote {sanitize(str(path))}\n")


def supports_unicode() -> bool:
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


# The `--json` side of every verb.


def show_json(value: Any) -> None:
    """One JSON document on stdout and nothing else; of a pydantic model its fields."""
    value = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    text = json.dumps(value, indent=2, ensure_ascii=not supports_unicode(), allow_nan=False)
    write_out(_escape_unprintable(text) + "\n")


def _escape_unprintable(text: str) -> str:
    """JSON of the same value: what a terminal would obey, and half of a surrogate pair (a file
    name that is no UTF-8), as escapes."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


# On stderr: a bar with the time left where someone watches, elsewhere a line now and then.

FIRST_LINE_SECONDS = 2.0
"""Of a task that is not watched; what is done sooner prints nothing."""
NEXT_LINE_SECONDS = 15.0


def report_progress(what: str, done: int, of: int) -> None:
    """One line on stderr where someone watches, rewritten in place; gone when all is done."""
    if sys.stderr is None or not sys.stderr.isatty():
        return
    # Past `write_err`, which spells cursor movements out.
    _write_err("\r\x1b[K" if done >= of else f"\r{disarm(what)}: {done / of:.0%}")


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """What to call with a task's name, how far it is, and of how much."""
    if sys.stderr is None or not sys.stderr.isatty():
        lines = _ProgressLines()
        try:
            yield lines.report
        finally:
            lines.stop()
        return
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done)

        yield report


class _ProgressLines:
    """Progress as lines for a log or a pipe: the first after two seconds, then four a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task = ("", 0, 0)
        self._next_line = 0.0
        self._timer: threading.Timer | None = None

    def report(self, what: str, done: int, of: int) -> None:
        with self._lock:
            is_new = what != self._task[0]
            self._task = (what, done, of)
            if is_new:
                self._next_line = time.monotonic() + FIRST_LINE_SECONDS
                self._start_timer()
            elif time.monotonic() >= self._next_line and done < of:
                self._write()
        if done >= of:
            self.stop()

    def stop(self) -> None:
        """Nothing is written any more, until another task reports."""
        with self._lock:
            self._task = ("", 0, 0)
            if self._timer is not None:
                self._timer.cancel()

    def _start_timer(self) -> None:
        """A task that reports its start and then works long would otherwise say nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(FIRST_LINE_SECONDS, self._write_first, (self._task[0],))
        self._timer.daemon = True
        self._timer.start()

    def _write_first(self, what: str) -> None:
        with self._lock:
            if self._task[0] == what and time.monotonic() >= self._next_line:
                self._write()

    def _write(self) -> None:
        what, done, of = self._task
        write_err(f"{what}: {done:,} of {of:,}\n")
        self._next_line = time.monotonic() + NEXT_LINE_SECONDS
