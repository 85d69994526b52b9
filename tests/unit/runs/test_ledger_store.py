"""The store: rows stay, writers do not trip over each other, and no error of it stops a run."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from shutil import copy

import pytest

from made_runs import make_plan, make_run
from tightfit.planning.filter import find_known_limit
from tightfit.runs import store
from tightfit.runs.report import make_report
from tightfit.runs.run_folder import RunStatus
from tightfit.runs.store import (
    MIGRATIONS,
    Outcome,
    known_outcomes,
    ledger_path,
    make_outcome,
    read_outcomes,
    record_outcome,
)

WRITER = """
import sys
from pathlib import Path
from tightfit.runs.store import Outcome, record_outcome
outcome = Outcome.model_validate_json(sys.argv[2])
for number in range(int(sys.argv[3])):
    told = record_outcome(outcome, Path(sys.argv[1]))
    assert told is None, told
"""


def outcome(status: RunStatus = RunStatus.FINISHED) -> Outcome:
    return make_outcome(make_plan(), status)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a" / "ledger.sqlite"
    report = make_report(make_run(tmp_path / "run"))
    first, second = make_outcome(make_plan(), RunStatus.FINISHED, report), outcome(RunStatus.FAILED)

    assert record_outcome(first, path) is None
    assert record_outcome(second, path) is None

    assert read_outcomes(path=path) == (first, second)
    assert first.measured_peak_bytes == 2_300_000_000
    assert first.measured_seconds_per_step == 0.5
    assert read_outcomes(first.model_name, first.gpu_name, path) == (first, second)
    assert read_outcomes("another", path=path) == ()
    assert read_outcomes(gpu="another", path=path) == ()


def test_a_row_of_a_killed_process_is_kept_once_without_its_log(tmp_path: Path) -> None:
    path, killed = tmp_path / "ledger.sqlite", tmp_path / "killed" / "ledger.sqlite"
    given = make_outcome(make_plan(), RunStatus.FINISHED, make_report(make_run(tmp_path / "run")))
    with closing(sqlite3.connect(path)) as other:
        record_outcome(outcome(RunStatus.FAILED), path)
        other.execute("SELECT * FROM outcomes").fetchall()
        record_outcome(given, path)
        # What a kill before the last connection is closed leaves.
        killed.parent.mkdir()
        for ending in ("", "-wal", "-shm"):
            copy(path.with_name(path.name + ending), killed.parent)

    assert record_outcome(given, killed, once=True) is None

    assert {one.name for one in killed.parent.iterdir()} == {killed.name, f"{killed.name}.lock"}
    assert read_outcomes(given.model_name, path=killed)[1:] == (given,)
    later = given.model_copy(update={"date": "2999-01-01T00:00:00+00:00"})
    assert record_outcome(later, killed, once=True) is None
    assert read_outcomes(path=killed)[1:] == (given, later)


def test_no_row_can_be_changed_or_deleted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    record_outcome(outcome(), path)
    ledger = sqlite3.connect(path)
    for statement in ("DELETE FROM outcomes", "UPDATE outcomes SET status = 'x'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            ledger.execute(statement)
    assert ledger.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    ledger.close()


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    words = [sys.executable, "-c", WRITER, str(path), outcome().model_dump_json(), "15"]
    writers = [subprocess.Popen(words) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(read_outcomes(path=path)) == 45


@pytest.mark.parametrize(
    "content", [b"this is no database at all" * 100, b"SQLite format 3\0" * 80]
)
def test_a_broken_file_is_moved_aside_and_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    assert read_outcomes(path=path) == ()

    reported = record_outcome(outcome(), path)

    assert reported is not None
    (aside,) = (found for found in tmp_path.glob("*.broken-*") if "wal" not in found.name)
    assert str(aside) in reported
    assert aside.read_bytes() == content
    assert len(read_outcomes(path=path)) == 1
    assert record_outcome(outcome(), path) is None


def test_a_page_lost_in_the_middle_is_moved_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for _ in range(30):
        record_outcome(outcome(), path)
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))

    assert "broken" in (record_outcome(outcome(), path) or "")
    assert len(read_outcomes(path=path)) == 1


def test_a_place_that_takes_nothing_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reported = record_outcome(outcome(), tmp_path / "file" / "ledger.sqlite")
    assert reported is not None
    assert "not kept" in reported
    assert read_outcomes(path=tmp_path / "file" / "ledger.sqlite") == ()


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.sqlite"
    record_outcome(outcome(), path)
    real = store._connect

    def nearly_full(uri: str) -> sqlite3.Connection:
        ledger = real(uri)
        ledger.execute("PRAGMA max_page_count = 1")  # sqlite then says what it says on a full disk
        return ledger

    monkeypatch.setattr(store, "_connect", nearly_full)
    reported = [record_outcome(outcome(), path) for _ in range(20)][-1]
    assert reported is not None
    assert "full" in reported
    assert not list(tmp_path.glob("*.broken-*"))


def test_a_newer_ledger_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    record_outcome(outcome(), path)
    ledger = sqlite3.connect(path)
    ledger.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    ledger.close()
    assert "newer tightfit" in (record_outcome(outcome(), path) or "")


def test_it_is_read_from_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """As the owner of everything in a container we could write; so the log's files are blocked."""
    path = tmp_path / "ledger.sqlite"
    record_outcome(outcome(), path)
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
        path.with_name(path.name + ending).mkdir()
    assert len(read_outcomes(path=path)) == 1


def test_an_unknown_strategy_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    record_outcome(outcome(), path)
    ledger = sqlite3.connect(path)
    ledger.execute(
        "INSERT INTO outcomes SELECT 99, date, host, tightfit_version, model_name, gpu_name, 0, "
        '\'{"from": "the future"}\', status, 1, 1, 1.0, 1.0 FROM outcomes'
    )
    ledger.commit()
    ledger.close()
    assert len(read_outcomes(path=path)) == 1


def test_the_planner_learns_from_what_ran_and_what_was_too_big(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for status in (RunStatus.OUT_OF_MEMORY, RunStatus.FAILED, RunStatus.STOPPED):
        record_outcome(outcome(status), path)
    spec, node = make_plan().model, make_plan().hardware.node
    (known,) = known_outcomes(path=path)
    assert known.status == "out-of-memory"
    assert find_known_limit([known], spec, node) is not None

    record_outcome(outcome().model_copy(update={"date": "2999-01-01T00:00:00+00:00"}), path)
    assert find_known_limit(known_outcomes(path=path), spec, node) is None


def test_the_ram_of_another_host_says_nothing_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ours = outcome(RunStatus.OUT_OF_MEMORY).model_copy(update={"is_cpu": True})
    record_outcome(ours.model_copy(update={"host": "another"}), path)
    record_outcome(ours, path)
    assert len(read_outcomes(path=path)) == 2
    assert len(known_outcomes(path=path)) == 1


def test_where_it_lies() -> None:
    assert ledger_path({"TIGHTFIT_LEDGER": "/x/l.db", "XDG_DATA_HOME": "/d"}) == Path("/x/l.db")
    assert ledger_path({"XDG_DATA_HOME": "relative"}) == ledger_path({})
    assert ledger_path({"XDG_DATA_HOME": "/d"}) == Path("/d/tightfit/ledger.sqlite")
    home = ledger_path({})
    assert home is not None
    assert home.parts[-4:] == (".local", "share", "tightfit", "ledger.sqlite")
