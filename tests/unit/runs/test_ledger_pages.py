"""Pictures and pages: whole, self-contained, and drawn where the numbers are."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_runs import make_plan, make_records, make_run, make_step
from pages import check_page
from tightfit.api.runs import plot_runs
from tightfit.core.units import GIB
from tightfit.runs.metrics import EventRecord, Record, mean
from tightfit.runs.report_html import (
    MOST_POINTS,
    draw_runs,
    load_runs,
    render_plots,
    render_report,
    smooth,
    thin,
    write_html,
)
from tightfit.runs.run_folder import RunFolder, RunStatus, probe_environment

pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")


def make_nasty(path: Path) -> RunFolder:
    records = [*make_records(30), make_step(31, loss=math.nan)]
    records.append(EventRecord(step=31, text="<script>alert('x')</script> & $\\alpha"))
    return make_run(path, records=records, status=RunStatus.FAILED, problem="<b>bad</b>")


def test_one_run_is_one_whole_page_that_fetches_nothing(tmp_path: Path) -> None:
    run = make_nasty(tmp_path / "a <run>")
    run.write_environment(probe_environment(["tightfit", "train", "<recipe>.yaml"]))
    write_html(run)
    page = run.html_path.read_text()

    checker = check_page(page)
    assert checker.tags.count("svg") == 1
    assert checker.tags.count("script") == 1
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "&lt;b&gt;bad" in page
    assert "&lt;recipe&gt;.yaml" in page
    assert "nothing &lt;is&gt; faster" in page
    for word in (
        "Predicted beside measured",
        "learning_rate",
        "perplexity",
        "not finite at step 31",
    ):
        assert word in page


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    first = make_run(tmp_path / "x" / "same")
    second = make_run(tmp_path / "y" / "same", plan=make_plan(micro_batch=2))
    reported = load_runs([first, second])
    for page in (render_report(reported), render_plots(reported)):
        check_page(page)
        assert "x/same" in page
        assert "y/same" in page
    assert "micro_batch" in render_report(reported)


def test_the_numbers_for_the_pointer_are_those_of_the_run(tmp_path: Path) -> None:
    (reported,) = load_runs([make_run(tmp_path / "run", records=[make_step(i) for i in (1, 2, 3)])])
    losses, memory = check_page(render_report([reported])).hovers
    assert losses["heads"]["text"] == ["step 1", "step 2", "step 3"]
    shown = next(line for line in losses["series"] if line["label"] == "train")
    assert shown["text"] == [f"{make_step(i).loss:.5g}" for i in (1, 2, 3)]
    first, second, third = shown["x"]
    assert 0 < first < second < third < 1
    assert third - second == pytest.approx(second - first, abs=1e-4)
    assert {line["label"] for line in memory["series"]} == {"allocated", "reserved"}


def test_lines_and_levels_lie_where_their_bytes_are(tmp_path: Path) -> None:
    records: list[Record] = [make_step(i, gpu_allocated_bytes=i * GIB) for i in (1, 2, 4)]
    (reported,) = load_runs([make_run(tmp_path / "run", records=records)])
    figure, _ = draw_runs([reported])
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    assert list(lines["allocated"].get_xdata()) == [1, 2, 4]
    assert list(lines["allocated"].get_ydata()) == [1, 2, 4]  # GiB
    gpu = reported.plan.estimate.gpu
    level = next(line for label, line in lines.items() if label.startswith("predicted peak"))
    expected = (gpu.peak_reserved_bytes - gpu.context_bytes) / GIB
    assert level.get_ydata()[0] == pytest.approx(expected)
    assert figure.axes[1].get_ylim()[0] == 0


def test_a_long_run_makes_a_small_page_and_keeps_its_peak(tmp_path: Path) -> None:
    records: list[Record] = [make_step(i) for i in range(1, 5001)]
    records[3210] = make_step(3211, gpu_allocated_bytes=9 * 10**9)
    runs = load_runs([make_run(tmp_path / "run", records=records)])
    page = render_plots(runs)
    losses, memory = check_page(page).hovers
    assert len(losses["series"][0]["x"]) <= MOST_POINTS
    assert "8.4 GiB" in memory["series"][0]["text"]
    assert len(page) < 250_000


def test_without_matplotlib_the_report_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = make_run(tmp_path / "run")
    write_html(run)
    page = run.html_path.read_text()
    assert "pip install &#x27;tightfit[plot]&#x27;" in page
    assert "Predicted beside measured" in page


@given(st.lists(st.floats(-100, 100), max_size=300))
def test_smoothing_stays_inside_and_keeps_the_steps(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    found = smooth(points)
    assert [x for x, _ in found] == [x for x, _ in points]
    for _, y in found:
        assert min(values) - 1e-6 <= y <= max(values) + 1e-6


def test_smoothing_a_straight_line_changes_its_inside_nowhere() -> None:
    points = [(float(x), 3.0 * x) for x in range(240)]
    for (_, y), (_, smoothed) in list(zip(points, smooth(points), strict=True))[:-4]:
        assert smoothed == pytest.approx(y)


@given(st.integers(1, 20_000))
def test_thinning_covers_the_whole_run(count: int) -> None:
    points = [(float(x), 1.0) for x in range(count)]
    found = thin(points, mean)
    assert len(found) <= MOST_POINTS
    assert found[-1] == points[-1]


def test_the_picture_is_a_png_of_a_sensible_size(tmp_path: Path) -> None:
    runs = [
        make_nasty(tmp_path / "cost$5 $x_{$"),
        make_run(tmp_path / "b", plan=make_plan(on="4xT4")),
    ]
    image = tmp_path / "a.png"
    plot_runs(load_runs(runs), image)
    data = image.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1200
    assert height >= 1000
