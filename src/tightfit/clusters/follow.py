"""Follow a job to its end: its scheduler's status, and the records and log lines of its run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from tightfit.clusters.protocol import RunObserver
from tightfit.core.errors import SetupError
from tightfit.core.reading import open_regular, parse_json
from tightfit.runs.metrics import Record, StepRecord
from tightfit.runs.run_folder import RunFolder

TICK_SECONDS = 0.3
FIRST_POLL_SECONDS = 1.0
MAX_SILENCE_SECONDS = 600.0
"""Of the scheduler itself, before following is given up: it is updated while jobs run."""
Status = TypeVar("Status")
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def follow_job(
    read_status: Callable[[], Status],
    run: RunFolder | None,
    observer: RunObserver,
    *,
    is_over: Callable[[Status], bool],
    describe: Callable[[Status], Mapping[str, str]] = lambda _: {},
    max_poll_seconds: float = TICK_SECONDS,
) -> Status:
    """The last status. An exception leaves the job running.

    `describe` has a text for each part of the job, reported whenever it changes. The scheduler,
    which serves everybody, is asked ever less often, up to every `max_poll_seconds`.
    """
    news = RunFollower(run, observer, shows_last_step=True)
    described: dict[str, str] = {}
    pause = min(FIRST_POLL_SECONDS, max_poll_seconds)
    silent_since: float | None = None
    while True:
        try:
            status = read_status()
            silent_since = None
            for part, text in describe(status).items():
                if described.get(part) != text:
                    described[part] = text
                    observer.say(text)
            if is_over(status):
                news.report()
                return status
        except SetupError as error:
            now = time.monotonic()
            if silent_since is None:
                silent_since = now
                observer.say(f"{error.problem} Asking again.")
            if now - silent_since > MAX_SILENCE_SECONDS:
                raise
        end = time.monotonic() + pause
        while True:
            news.report()
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(TICK_SECONDS, left))
        pause = min(pause * 1.2, max_poll_seconds)


class LineFollower:
    """New whole lines of a file, which may not exist yet, and may be replaced by a shorter one.

    A replaced file is read from its start, but lines at its head that were reported before are
    not reported again: a resumed run rewrites metrics.jsonl without the steps it will redo.
    """

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self._path = path
        self._inode = 0
        self._position = 0
        self._reported: list[int] = []
        """Hashes of the lines reported, in order."""
        if skip_existing:
            self.read()

    def read(self) -> list[str]:
        """Whole lines that came since the last call."""
        is_replaced = False
        try:
            with open_regular(self._path) as stream:
                state = os.fstat(stream.fileno())
                if state.st_ino != self._inode or state.st_size < self._position:
                    is_replaced = self._inode != 0
                    self._inode, self._position = state.st_ino, 0
                stream.seek(self._position)
                data = stream.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._position += end
        lines = data[:end].decode(errors="replace").splitlines()
        marks = [hash(line) for line in lines]
        num_same = 0
        if is_replaced:  # in one go, so lines that are missing by now were removed
            while num_same < min(len(marks), len(self._reported)) and (
                marks[num_same] == self._reported[num_same]
            ):
                num_same += 1
            del self._reported[num_same:]
        self._reported += marks[num_same:]
        return lines[num_same:]


class MetricsFollower:
    """New records of a run's metrics.jsonl."""

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self._lines = LineFollower(path, skip_existing=skip_existing)

    def read(self) -> list[Record]:
        """Records that came since the last call; lines that are no records are skipped."""
        found: list[Record] = []
        for line in self._lines.read():
            try:
                found.append(
                    _RECORD.validate_python(
                        parse_json(line, source="a record", allows_infinity=True)
                    )
                )
            except (ValueError, ValidationError):
                continue
        return found


class RunFollower:
    """Passes new records and log lines of a run folder on to an observer."""

    def __init__(
        self, run: RunFolder | None, observer: RunObserver, *, shows_last_step: bool = False
    ) -> None:
        """`run` is None where this machine does not see the folder.

        `shows_last_step`: of the records that are there already, the last step is passed on.
        """
        self._observer = observer
        self._records = self._lines = None
        if run is not None:
            self._records = MetricsFollower(run.metrics_path)
            self._lines = LineFollower(run.log_path, skip_existing=True)
            steps = [one for one in self._records.read() if isinstance(one, StepRecord)]
            if steps and shows_last_step:
                observer.record(steps[-1])

    def report(self) -> None:
        """Pass on what came since the last call."""
        for line in self._lines.read() if self._lines else ():
            self._observer.line(line)
        for record in self._records.read() if self._records else ():
            self._observer.record(record)
        self._observer.tick()
