"""Runs with a stand-in worker, and who watches them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search
from tightfit.runs.metrics import Record
from tightfit.runs.run_folder import RunFolder

STAND_IN = Path(__file__).parent / "stand_in_worker.py"


@functools.cache
def make_plan(on: str = "T4", **fixed: object) -> Plan:
    request = JobRequest(spec=resolve_model("gpt2"), method="lora", fixed=fixed)
    return search(request, resolve_hardware(on), num_plans=1, is_coarse=True).plans[0]


def make_run(folder: Path, **behaviour: Any) -> RunFolder:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "behaviour.json").write_text(json.dumps({"num_steps": 6, **behaviour}))
    run = RunFolder(path=folder)
    run.write_plan(make_plan())
    return run


def stand_in_command(run: RunFolder) -> list[str]:
    return [sys.executable, str(STAND_IN), str(run.path)]


class Notes:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.lines: list[str] = []
        self.said: list[str] = []
        self.num_ticks = 0

    def record(self, record: Record) -> None:
        self.records.append(record)

    def line(self, line: str) -> None:
        self.lines.append(line)

    def say(self, text: str) -> None:
        self.said.append(text)

    def tick(self) -> None:
        self.num_ticks += 1

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records if record.kind == "step"]
