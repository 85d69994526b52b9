"""Pictures and pages: whole, self-contained, and drawn where the numbers are."""

from __future__ import annotations

import json
import math
import struct
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from made_runs import make_plan, make_records, make_run, make_step
from tightfit.core.units import GIB
from tightfit.runs.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MOST_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    load_run_views,
    make_curves,
    make_loss_chart,
    make_memory_chart,
    pick_ticks,
    render_chart,
    smooth,
    thin,
    write_plot,
)
from tightfit.runs.environment import probe_environment, write_environment
from tightfit.runs.metrics import EventRecord, Record, mean
from tightfit.runs.report import read_run, report_run
from tightfit.runs.report_html import render_plots, render_report, write_html
from tightfit.runs.run_folder import RunFolder, RunStatus

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Notes every tag, and that each one is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert "http" not in page
    assert {"link", "img", "iframe"}.isdisjoint(checker.tags)
    assert {"src", "href"}.isdisjoint(name for name, _ in checker.attributes)
    return checker


def make_nasty(path: Path) -> RunFolder:
    records = [*make_records(30), make_step(31, loss=math.nan)]
    records.append(EventRecord(step=31, text="<script>alert('x')</script> & $\\alpha"))
    return make_run(path, records=records, status=RunStatus.FAILED, problem="<b>bad</b>")


def test_one_run_is_one_whole_page_that_fetches_nothing(tmp_path: Path) -> None:
    run = make_nasty(tmp_path / "a <run>")
    write_environment(run, probe_environment(["tightfit", "train", "<recipe>.yaml"]))
    write_html(run)
    page = run.html_path.read_text()

    checker = check(page)
    assert checker.tags.count("svg") == 2
    assert checker.tags.count("script") == 1
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "&lt;b&gt;bad" in page
    assert "&lt;recipe&gt;.yaml" in page
    assert "nothing &lt;is&gt; faster" in page
    assert "prefers-color-scheme: dark" in page
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
    reported = load_run_views([first, second])
    for page in (render_report(reported), render_plots(reported)):
        check(page)
        assert "x/same" in page
        assert "y/same" in page
    assert "micro_batch" in render_report(reported)


def test_the_numbers_for_the_pointer_are_those_of_the_run(tmp_path: Path) -> None:
    (reported,) = load_run_views(
        [make_run(tmp_path / "run", records=[make_step(i) for i in (1, 2, 3)])]
    )
    found = [
        value for name, value in check(render_report([reported])).attributes if name == "data-chart"
    ]
    losses = json.loads(found[0] or "")["series"][0]
    assert losses["step"] == [1, 2, 3]
    assert losses["y"] == pytest.approx([make_step(i).loss for i in (1, 2, 3)], rel=1e-4)


def test_lines_and_levels_lie_where_their_bytes_are(tmp_path: Path) -> None:
    records: list[Record] = [make_step(i, gpu_allocated_bytes=i * GIB) for i in (1, 2, 4)]
    (reported,) = load_run_views([make_run(tmp_path / "run", records=records)])
    chart = make_memory_chart([reported.curves])
    page = render_chart(chart)
    svg = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    line = next(iter(svg.iter("polyline")))
    xs, ys = zip(*(map(float, p.split(",")) for p in line.attrib["points"].split()), strict=True)
    # Twice the bytes, twice the height over the axis; steps from 0 at the left.
    base = HEIGHT - BOTTOM
    assert (base - ys[1]) / (base - ys[0]) == pytest.approx(2, rel=0.01)
    assert (base - ys[2]) / (base - ys[0]) == pytest.approx(4, rel=0.01)
    assert (xs[1] - LEFT) / (xs[0] - LEFT) == pytest.approx(2, rel=0.01)
    predicted = next(line for line in svg.iter("line") if line.get("class") == "limit")
    gib = reported.curves.predicted_peak_bytes / GIB
    assert (base - float(predicted.attrib["y1"])) / (base - ys[0]) == pytest.approx(gib, rel=0.02)
    for element in svg.iter("line"):
        assert TOP - 1 <= float(element.attrib["y1"]) <= HEIGHT
        assert float(element.attrib["x1"]) <= WIDTH - RIGHT + 1


def test_a_long_run_makes_a_small_page_and_keeps_its_peak(tmp_path: Path) -> None:
    records: list[Record] = [make_step(i) for i in range(1, 5001)]
    records[3210] = make_step(3211, gpu_allocated_bytes=9 * 10**9)
    past = read_run(make_run(tmp_path / "run", records=records))
    curves = make_curves(past, report_run(past))
    assert len(curves.loss) <= MOST_POINTS
    assert max(y for _, y in curves.allocated) == 9 * 10**9
    assert len(render_chart(make_loss_chart([curves]))) < 120_000


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


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
@example(5443434375.0, 1e-6)
def test_ticks_are_few_inside_and_even(low: float, span: float) -> None:
    ticks = pick_ticks(low, low + span)
    assert len(ticks) <= 8
    slack = 1e-6 * max(abs(low), span, 1)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)


def test_the_picture_is_a_png_of_a_sensible_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    runs = [
        make_nasty(tmp_path / "cost$5 $x_{$"),
        make_run(tmp_path / "b", plan=make_plan(on="4xT4")),
    ]
    image = tmp_path / "a.png"
    write_plot([reported.curves for reported in load_run_views(runs)], image)
    data = image.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1200
    assert height >= 1000
