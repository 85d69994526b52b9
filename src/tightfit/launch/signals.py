"""Signals to the launcher: the first asks the workers to save and stop, the second ends them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAME_SECONDS = 1.0
"""Two of a kind this close are one wish: `timeout` and batch systems signal a process twice."""
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ENDING = (signal.SIGINT, signal.SIGTERM)
"""SIGUSR1 warns of an end to come, so that it never shortens the saving."""


class StopWish:
    """What was asked for from outside so far."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_urgent = False
        self._last = dict.fromkeys(_CAUGHT, 0.0)

    def hear(self, signum: int, _frame: FrameType | None = None) -> None:
        kind, now = signal.Signals(signum), time.monotonic()
        if self.first is None:
            self.first = kind
        elif kind in _ENDING and self._last[kind] and now - self._last[kind] > SAME_SECONDS:
            self.is_urgent = True
        elif kind is signal.SIGINT and not self._last[kind]:
            self.is_urgent = True  # Ctrl-C from somebody who will not wait for the first wish
        self._last[kind] = now

    @property
    def passed_on(self) -> signal.Signals:
        """What the workers are sent: they know SIGTERM and SIGUSR1."""
        return signal.SIGUSR1 if self.first is signal.SIGUSR1 else signal.SIGTERM

    def listen(self) -> None:
        """Take the signals over, also after a start of workers has set one aside."""
        if threading.current_thread() is not threading.main_thread():
            return
        for kind in _CAUGHT:
            # nohup ignores SIGHUP; it stays so.
            if not (kind is signal.SIGHUP and signal.getsignal(kind) is signal.SIG_IGN):
                signal.signal(kind, self.hear)


@contextmanager
def hear_wishes() -> Iterator[StopWish]:
    """Signals become wishes inside the block, and are as before after it."""
    wish = StopWish()
    is_main = threading.current_thread() is threading.main_thread()
    before = {kind: signal.getsignal(kind) for kind in _CAUGHT} if is_main else {}
    wish.listen()
    try:
        yield wish
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler if handler is not None else signal.SIG_DFL)
