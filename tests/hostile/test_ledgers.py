"""The ledger and the calibrations beside it, mutated: a plan, with or without what they say."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutate import VALUES, mutate_bytes, mutate_tree, plant_special, write_json

from hostile_trials import StartTrials
from made_calibrations import make_calibration
from made_runs import make_plan
from tightfit.runs.run_folder import RunStatus
from tightfit.runs.store import Outcome, make_outcome, record_outcome, write_calibration

GPU = "T4"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return make_outcome(make_plan(on=GPU), RunStatus.OUT_OF_MEMORY)


def mutate_ledger(rng: Random, path: Path) -> None:
    """Rows and schemas that no tightfit wrote, or a file that SQLite never wrote."""
    kind = rng.random()
    if kind < 0.4:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    elif kind < 0.5:
        plant_special(rng, path)
    elif kind < 0.9:
        with closing(sqlite3.connect(path)) as ledger:
            columns = [row[1] for row in ledger.execute("PRAGMA table_info(outcomes)")]
            (row,) = ledger.execute(f"SELECT {', '.join(columns)} FROM outcomes LIMIT 1")
            values: dict[str, Any] = dict(zip(columns, row, strict=True)) | {"id": 2}
            text = json.loads(values["strategy"])
            values["strategy"] = write_json(rng, mutate_tree(rng, text)).decode("utf-8", "replace")
            for name in rng.sample(columns[1:], rng.choice((0, 1, 3))):
                values[name] = _plain(rng.choice(VALUES))
            marks = ", ".join("?" * len(columns))
            ledger.execute(f"INSERT OR IGNORE INTO outcomes VALUES ({marks})", [*values.values()])
            ledger.commit()
    else:
        changes = [
            *("DROP TABLE outcomes", "PRAGMA user_version = 99", "PRAGMA user_version = 0"),
            *("ALTER TABLE outcomes RENAME TO others", "DROP TRIGGER outcomes_stay"),
        ]
        with closing(sqlite3.connect(path)) as ledger:
            ledger.execute(rng.choice(changes))
            ledger.commit()


def _plain(value: object) -> object:
    """As SQLite can hold it."""
    if isinstance(value, list | dict) or (isinstance(value, int) and abs(value) >= 2**63):
        return None if isinstance(value, int) else json.dumps(value)
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def make_case(rng: Random, folder: Path, model: Path, outcome: Outcome) -> list[str]:
    path = folder / "ledger.sqlite"
    os.environ["TIGHTFIT_LEDGER"] = str(path)
    assert record_outcome(outcome, path) is None
    rates = write_calibration(make_calibration(GPU))
    if rng.random() < 0.7:
        mutate_ledger(rng, path)
    if rng.random() < 0.4:
        tree = mutate_tree(rng, json.loads(rates.read_bytes()))
        rates.write_bytes(write_json(rng, tree))
        if rng.random() < 0.1:
            plant_special(rng, rates)
    if rng.random() < 0.3:
        record_outcome(outcome, path)  # its errors are sentences
    return ["plan", str(model), "--on", GPU, "--seq-len", "64", "--method", "lora"]


def test_ledgers(
    trials: StartTrials, model: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_LEDGER", "")
    trials("ledgers", num_short=25).run(lambda rng, folder: make_case(rng, folder, model, outcome))
