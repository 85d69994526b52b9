"""Training whose steps take a second each from a given one on: a test has time to disturb it.

A tiny run is over in seconds, and a busy machine may let a test sleep for longer than that.
"""

from __future__ import annotations

from pathlib import Path

HOOK = """
import pathlib, time
from tightfit.runs import metrics
_real = metrics.append_record
def _append(path, record):
    _real(path, record)
    try:
        first_step = int(pathlib.Path({switch!r}).read_text())
    except FileNotFoundError:
        return
    if record.kind == "step" and record.step >= first_step:
        time.sleep(1)
metrics.append_record = _append
"""
"""A `sitecustomize` for the worker, which records each step when it is done."""


class SlowSteps:
    """For the processes that are started with `environment`, and for them also on their way."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {"PYTHONPATH": str(folder)}
        self._switch = folder / "first_step"
        (folder / "sitecustomize.py").write_text(HOOK.format(switch=str(self._switch)))

    def begin(self, first_step: int) -> None:
        # In one go: a worker that reads an empty file would end of it.
        beside = self._switch.with_suffix(".partial")
        beside.write_text(str(first_step))
        beside.replace(self._switch)

    def end(self) -> None:
        self._switch.unlink(missing_ok=True)
