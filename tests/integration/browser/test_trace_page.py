"""The traced chart's page in a real Chromium: numbers under pointer, finger and keys."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from compare_browser import DESKTOP, PHONE, Watched, browser, keep_picture, watched_page

from tightfit.cli.charts.trace import TraceChart, TracePanel, make_trace_panel, write_trace_html
from tightfit.core.units import GIB, MIB, render_bytes
from trace_cases import record_full_tuning, trace

CONTEXT = 768 * MIB


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def panel() -> TracePanel:
    """A job that is a little larger than its card."""
    return make_trace_panel(
        "1 x card",
        trace(record_full_tuning()),
        capacity_bytes=12 * GIB,
        context_bytes=CONTEXT,
        subtitle="full, bf16, adamw-foreach, 4 x 2,048 tokens, no checkpointing",
    )


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, panel: TracePanel) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page")
    chart = TraceChart(title="A model: memory over its steps", panels=(panel, panel))
    write_trace_html(chart, folder / "memory.html")
    # Chromium asks for one by itself.
    (folder / "favicon.ico").write_bytes(b"")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/memory.html"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def tab(chromium: Any, address: str) -> Iterator[Watched]:
    with watched_page(chromium, address) as watched:
        watched.page.set_viewport_size(DESKTOP)
        yield watched
        assert watched.outside == []
        assert watched.errors == []


def point_at(page: Any, panel: TracePanel, column: int) -> None:
    box = page.locator(".plot").first.bounding_box()
    x = box["x"] + box["width"] * (column + 0.5) / panel.num_columns
    page.mouse.move(x, box["y"] + box["height"] / 2)


def read_tip(page: Any) -> dict[str, str]:
    """Name to size, as it stands there."""
    lines = page.locator(".tip").first.locator("div").all()
    cells = [line.locator("span").all_inner_texts() for line in lines]
    return {name: size for _, name, size in cells}


def expect(panel: TracePanel, column: int) -> dict[str, str]:
    parts = {name: row[column] for name, row in reversed(panel.layers) if row[column]}
    parts["together"] = sum(parts.values())
    over = parts["together"] - panel.capacity_bytes
    if over > 0:
        parts["over the card by"] = over
    return {name: render_bytes(size) for name, size in parts.items()}


def test_the_page_is_one_file(chromium: Any, address: str) -> None:
    with watched_page(chromium, address) as watched:
        fetched = watched.page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
        assert [name for name in fetched if not name.endswith("/favicon.ico")] == []
        assert watched.outside == []
        keep_picture(watched.page, "trace")


def test_pointing_shows_the_bytes_of_that_place(tab: Watched, panel: TracePanel) -> None:
    tip = tab.page.locator(".tip").first
    assert not tip.is_visible()
    columns = [0, panel.num_columns // 3, panel.peak_column, panel.num_columns - 1]
    for column in columns:
        point_at(tab.page, panel, column)
        assert read_tip(tab.page) == expect(panel, column), column
        box, frame = tip.bounding_box(), tab.page.locator(".plot").first.bounding_box()
        assert box["x"] >= frame["x"] - 1
        assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
    keep_picture(tab.page, "trace-pointed")
    tab.page.mouse.move(2, 2)
    assert not tip.is_visible()


def test_the_peak_says_where_it_is(tab: Watched, panel: TracePanel) -> None:
    peak = panel.traced.peak
    assert f"{peak.stage}: {peak.op}" in tab.page.locator(".peak").first.inner_text()
    point_at(tab.page, panel, panel.peak_column)
    reported = tab.page.locator(".tip").first.inner_text()
    assert f"{peak.stage}: the peak" in reported
    assert peak.op in reported
    assert "over the card by" in reported
    # The mark hangs over the fullest place.
    mark = tab.page.locator(".lead").first.bounding_box()
    frame = tab.page.locator(".plot").first.bounding_box()
    assert (mark["x"] - frame["x"]) / frame["width"] == pytest.approx(
        (panel.peak_column + 0.5) / panel.num_columns, abs=0.005
    )


def test_keys_walk_through_the_picture(tab: Watched, panel: TracePanel) -> None:
    page = tab.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "plot"
    assert read_tip(page) == expect(panel, panel.peak_column)
    page.keyboard.press("ArrowRight")
    assert read_tip(page) == expect(panel, panel.peak_column + 1)
    page.keyboard.press("Home")
    assert read_tip(page) == expect(panel, 0)
    page.keyboard.press("ArrowLeft")
    assert read_tip(page) == expect(panel, 0)
    page.keyboard.press("PageDown")
    second = panel.moments[1]
    assert read_tip(page) == expect(panel, second.start)
    assert second.name in page.locator(".tip b").first.inner_text()
    page.keyboard.press("End")
    assert read_tip(page) == expect(panel, panel.num_columns - 1)
    page.keyboard.press("p")
    assert read_tip(page) == expect(panel, panel.peak_column)
    page.keyboard.press("Escape")
    assert not page.locator(".tip").first.is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") != "plot"


def test_it_fits_a_phone_and_a_finger(chromium: Any, address: str, panel: TracePanel) -> None:
    with watched_page(chromium, address) as watched:
        page = watched.page
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        frame = page.locator(".plot").first.bounding_box()
        assert frame["width"] > 0.7 * PHONE["width"]
        assert frame["height"] > 200
        page.locator(".plot").first.click(position={"x": frame["width"] / 2, "y": 60})
        shown = read_tip(page)
        assert shown["weights"] == render_bytes(panel.layers[1][1][-1])
        tip = page.locator(".tip").first.bounding_box()
        assert tip["y"] >= frame["y"] + frame["height"], "the numbers hide the picture"
        assert tip["x"] >= 0
        assert tip["x"] + tip["width"] <= PHONE["width"]
        sizes = page.evaluate(
            "[...document.querySelectorAll('.scale span, .names span, .peak p, .tip')]"
            ".filter(e => e.offsetParent).map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(sizes) >= 11.5, "too small to read"
        keep_picture(page, "trace-phone")
        assert watched.errors == []
        assert watched.outside == []


def test_names_under_the_picture_stay_apart(tab: Watched) -> None:
    for width in (DESKTOP["width"], 700, PHONE["width"]):
        tab.page.set_viewport_size({"width": width, "height": 800})
        boxes = tab.page.evaluate(
            "[...document.querySelector('.names').children].filter(e => e.offsetParent)"
            ".map(e => [e.className, ...['left', 'right'].map(s => e.getBoundingClientRect()[s])])"
        )
        for kind in ("stage", "moment"):
            row = sorted(box[1:] for box in boxes if box[0].split()[0] == kind)
            assert all(one[1] <= other[0] + 0.5 for one, other in itertools.pairwise(row)), (
                width,
                kind,
            )


def test_dark_mode_darkens_the_page(chromium: Any, address: str) -> None:
    with watched_page(chromium, address) as watched:
        colours = []
        for scheme in ("light", "dark"):
            watched.page.emulate_media(color_scheme=scheme)
            reported = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
            colours.append(sum(map(int, re.findall(r"\d+", reported)[:3])))
        keep_picture(watched.page, "trace-dark")
        assert colours[0] > 700
        assert colours[1] < 150


def test_without_a_script_the_peak_can_still_be_read(
    tmp_path: Path, panel: TracePanel, chromium: Any
) -> None:
    write_trace_html(TraceChart(title="t", panels=(panel,)), tmp_path / "a.html")
    text = re.sub(r"<script>.*</script>", "", (tmp_path / "a.html").read_text(), flags=re.DOTALL)
    page = chromium.new_page()
    page.set_content(text)
    reported = page.inner_text("body")
    page.close()
    assert panel.traced.peak.op in reported
    for tensor in panel.traced.peak.tensors:
        assert render_bytes(tensor.num_bytes) in reported
