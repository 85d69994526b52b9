"""Followers of growing files: the records of metrics.jsonl, the lines of log.txt."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tightfit.clusters.protocol import RunObserver
from tightfit.runs.metrics import Record, StepRecord
from tightfit.runs.run_folder import RunFolder

_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


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
        self._num_same = 0
        """Lines of a replaced file that matched those reported."""
        self._is_replay = False
        if skip_existing:
            self.read()

    def read(self) -> list[str]:
        """Whole lines that came since the last call."""
        try:
            with self._path.open("rb") as stream:
                self._notice_replacement(stream.fileno())
                stream.seek(self._position)
                data = stream.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._position += end
        lines = data[:end].decode(errors="replace").splitlines()
        found = [line for line in lines if self._is_new(line)]
        if self._is_replay:  # replaced in one go, so lines that are missing by now were removed
            self._end_replay()
        return found

    def _notice_replacement(self, handle: int) -> None:
        state = os.fstat(handle)
        if state.st_ino != self._inode or state.st_size < self._position:
            self._is_replay = self._inode != 0
            self._inode, self._position, self._num_same = state.st_ino, 0, 0

    def _is_new(self, line: str) -> bool:
        mark = hash(line)
        if self._is_replay:
            same = self._num_same
            if same < len(self._reported) and self._reported[same] == mark:
                self._num_same += 1
                return False
            self._end_replay()
        self._reported.append(mark)
        return True

    def _end_replay(self) -> None:
        del self._reported[self._num_same :]
        self._is_replay = False


class MetricsFollower:
    """New records of a run's metrics.jsonl."""

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self._lines = LineFollower(path, skip_existing=skip_existing)

    def read(self) -> list[Record]:
        """Records that came since the last call; lines that are no records are skipped."""
        found: list[Record] = []
        for line in self._lines.read():
            try:
                found.append(_RECORD.validate_python(json.loads(line)))
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
