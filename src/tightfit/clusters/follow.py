"""Followers of growing files: the records of metrics.jsonl, the lines of log.txt."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tightfit.runs.metrics import Record

_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


class LineFollower:
    """New whole lines of a file, which may not exist yet, and may be replaced by a shorter one.

    A replaced file is read from its start, but lines at its head that were told before are
    not told again: a resumed run rewrites metrics.jsonl without the steps it will redo.
    """

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self._path = path
        self._inode = 0
        self._position = 0
        self._told: list[int] = []
        """Hashes of the lines told, in order."""
        self._num_same = 0
        """Lines of a replaced file that matched what was told."""
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
        if self._is_replay:  # replaced in one go, so what is not there by now was taken back
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
            if same < len(self._told) and self._told[same] == mark:
                self._num_same += 1
                return False
            self._end_replay()
        self._told.append(mark)
        return True

    def _end_replay(self) -> None:
        del self._told[self._num_same :]
        self._is_replay = False


class MetricsFollower:
    """New records of a run's metrics.jsonl."""

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self._lines = LineFollower(path, skip_existing=skip_existing)

    def read(self) -> list[Record]:
        """Records that came since the last call; lines that are none are passed over."""
        found: list[Record] = []
        for line in self._lines.read():
            try:
                found.append(_RECORD.validate_python(json.loads(line)))
            except (ValueError, ValidationError):
                continue
        return found
