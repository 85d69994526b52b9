"""metrics.jsonl: what is written is read back, and what is broken hides nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from made_runs import make_eval, make_plan, make_records, make_run, make_step
from tightfit.api.runs import plot_runs
from tightfit.core.errors import SetupError
from tightfit.runs.metrics import (
    EventRecord,
    Record,
    StepRecord,
    append_record,
    drop_after_step,
    read_records,
    write_records,
)
from tightfit.runs.report import RunReport, make_report
from tightfit.runs.report_html import load_runs, render_report
from tightfit.runs.run_folder import RunFolder

LINES = [record.model_dump_json().encode() for record in make_records(6)]
NUMBER = st.one_of(
    st.floats(), st.integers(), st.none(), st.sampled_from([1e308, -1e308, 10**400, "x", [], True])
)


def test_lines_are_json_that_any_reader_takes_and_nan_survives(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append_record(path, make_step(1, loss=math.nan))
    append_record(path, make_step(2))

    first = json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert first["loss"] is None
    records = read_records(path)
    assert [record.step for record in records] == [1, 2]
    assert isinstance(records[0], StepRecord)
    assert math.isnan(records[0].loss)


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append_record(path, make_step(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])

    append_record(path, make_step(2))

    assert [record.step for record in read_records(path)] == [1, 2]


def test_resuming_forgets_steps_and_evals_but_no_event(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    event = EventRecord(step=9, text="out of memory with a; going on with b")
    write_records(path, [*(make_step(i) for i in range(1, 9)), make_eval(8, 1.0), event])

    drop_after_step(path, 5)

    assert [r.step for r in read_records(path) if isinstance(r, StepRecord)] == [1, 2, 3, 4, 5]
    assert [r for r in read_records(path) if not isinstance(r, StepRecord)] == [event]


def test_a_folder_that_takes_nothing_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Cannot write"):
        append_record(tmp_path / "missing" / "m.jsonl", make_step(1))


@given(cut=st.integers(0, len(LINES[-1])))
def test_cut_anywhere_all_whole_lines_are_read(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    path.write_bytes(b"\n".join([*LINES[:-1], LINES[-1][:cut]]))
    expected = len(LINES) if cut == len(LINES[-1]) else len(LINES) - 1
    assert len(read_records(path)) == expected


garbled_line = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(LINES),
    st.sampled_from(
        [b"null", b"[1]", b'{"kind": []}', b'{"kind": "step"}', b"[" * 5000, b"1" * 5000]
    ),
    st.dictionaries(st.sampled_from(sorted(StepRecord.model_fields)), NUMBER).map(
        lambda changed: json.dumps(json.loads(LINES[2]) | changed).encode()
    ),
    st.dictionaries(st.sampled_from(["step", "loss", "perplexity", "seconds"]), NUMBER).map(
        lambda changed: json.dumps(json.loads(LINES[0]) | changed).encode()
    ),
)


@given(lines=st.lists(garbled_line, max_size=12))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_the_file_holds_there_is_a_report(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunFolder(path=tmp_path_factory.mktemp("run"))
    run.write_plan(make_plan())
    run.metrics_path.write_bytes(b"\n".join(lines))

    report = make_report(run)

    assert RunReport.model_validate_json(report.model_dump_json()) == report


@given(lines=st.lists(garbled_line, max_size=12))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_whatever_the_file_holds_there_is_a_page(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunFolder(path=tmp_path_factory.mktemp("run"))
    run.write_plan(make_plan())
    run.metrics_path.write_bytes(b"\n".join(lines))
    assert "</html>" in render_report(load_runs([run]))


@pytest.mark.parametrize(
    "records",
    [
        [],
        [make_step(1)],
        [make_step(1, loss=-1e308), make_step(2, loss=1e308), make_eval(2, 1e300)],
        [make_step(2**63 - 1, gpu_allocated_bytes=2**63 - 1), make_step(0, gpu_reserved_bytes=0)],
        [make_step(i, loss=math.nan) for i in range(1, 5)],
    ],
    ids=["empty", "one step", "huge losses", "huge numbers", "all nan"],
)
def test_odd_runs_are_drawn(records: list[Record], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    run = make_run(tmp_path / "run", records=records)

    plot_runs(load_runs([run]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
