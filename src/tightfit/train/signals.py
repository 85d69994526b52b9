"""Signals that ask a run to save and stop: SIGTERM, SIGINT, and Slurm's SIGUSR1."""

from __future__ import annotations

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers that somebody asked; the loop looks at it after each step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def listen(self) -> None:
        """Note the signals, save SIGTERM under torchrun, which is not to be noted there.

        torchrun ends its processes by SIGTERM when it starts them anew after the loss of
        a neighbour: that is no wish to stop. A real wish comes from the launcher as SIGUSR1,
        also when a batch system sends SIGTERM to every process at once.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @property
    def is_made(self) -> bool:
        return self.signal_name is not None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
