"""How far reading has come, told to whoever watches about five times a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

_EVERY_SECONDS = 0.2
_ROWS_BETWEEN_LOOKS = 64


class ReadProgress(NamedTuple):
    """What has been read so far; bytes are those on disk, so compressed ones count as such."""

    num_rows: int
    num_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        return min(self.num_bytes / self.total_bytes, 1.0) if self.total_bytes else 0.0


class Meter:
    """Counts rows and bytes over all files of a source. Telling nobody costs next to nothing."""

    def __init__(
        self, tell: Callable[[ReadProgress], None] | None = None, *, total_bytes: int = 0
    ) -> None:
        self._tell = tell
        self._total_bytes = total_bytes
        self._num_rows = 0
        self._done_bytes = 0
        self._position = 0
        self._last = time.monotonic()

    def add_row(self) -> None:
        self._num_rows += 1
        if self._num_rows % _ROWS_BETWEEN_LOOKS == 0:
            self._look()

    def move_to(self, position: int) -> None:
        """Where the reading of the present file stands."""
        self._position = max(self._position, position)
        self._look()

    def close_file(self, size: int) -> None:
        """The present file is done; the next one starts at its own zero."""
        self._done_bytes += size
        self._position = 0

    def finish(self) -> None:
        """Tell the last state, however short the time."""
        if self._tell is not None:
            self._tell(self._state())

    def _look(self) -> None:
        if self._tell is not None and time.monotonic() - self._last >= _EVERY_SECONDS:
            self._tell(self._state())
            self._last = time.monotonic()

    def _state(self) -> ReadProgress:
        return ReadProgress(self._num_rows, self._done_bytes + self._position, self._total_bytes)
