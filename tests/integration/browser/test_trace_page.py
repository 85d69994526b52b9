"""The traced chart's page in a real Chromium: numbers under pointer, finger and keys."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from compare_browser import DESKTOP, PHONE, Watched, browser, keep_picture, watched_page

from tightfit.cli.terminal.trace_chart import TracePanel, write_trace_chart
from tightfit.core.units import GIB, MIB, render_bytes
from trace_cases import record_full_tuning, trace

CONTEXT = 768 * MIB


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def panel() -> TracePanel:
    """A job that is a little larger than its card."""
    return TracePanel(
        title="1 x card",
        traced=trace(record_full_tuning()),
        capacity_bytes=12 * GIB,
        context_bytes=CONTEXT,
        subtitle="full, bf16, adamw-foreach, 4 x 2,048 tokens, no checkpointing",
    )


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, panel: TracePanel) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page")
    write_trace_chart("A model", [panel, panel], folder / "memory.html")
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
    return dict(cells)


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
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= DESKTOP["width"]
    keep_picture(tab.page, "trace-pointed")
    tab.page.mouse.move(2, 2)
    assert not tip.is_visible()


def test_the_peak_says_where_it_is(tab: Watched, panel: TracePanel) -> None:
    peak = panel.traced.peak
    assert f"{peak.stage}: {peak.op}" in (tab.page.locator(".chart svg").first.text_content() or "")
    point_at(tab.page, panel, panel.peak_column)
    reported = tab.page.locator(".tip").first.inner_text()
    assert f"{peak.stage}: the peak" in reported
    assert peak.op in reported
    assert "over the card by" in reported


def test_keys_walk_through_the_picture(tab: Watched, panel: TracePanel) -> None:
    page = tab.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "plot"
    assert read_tip(page) == expect(panel, panel.peak_column)
    page.keyboard.press("ArrowRight")
    assert read_tip(page) != expect(panel, panel.peak_column)
    page.keyboard.press("Home")
    assert read_tip(page) == expect(panel, 0)
    page.keyboard.press("ArrowLeft")
    assert read_tip(page) == expect(panel, 0)
    page.keyboard.press("End")
    assert read_tip(page) == expect(panel, panel.num_columns - 1)
    page.keyboard.press("Escape")
    assert not page.locator(".tip").first.is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") != "plot"


def test_it_fits_a_phone_and_a_finger(chromium: Any, address: str) -> None:
    """The picture keeps a size that can be read, and is moved sideways inside the page."""
    with watched_page(chromium, address) as watched:
        page = watched.page
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        frame = page.locator(".plot").first.bounding_box()
        page.locator(".plot").first.click(position={"x": frame["width"] / 4, "y": 60})
        assert read_tip(page)["together"]
        keep_picture(page, "trace-phone")
        assert watched.errors == []
        assert watched.outside == []


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
    write_trace_chart("t", [panel], tmp_path / "a.html")
    text = re.sub(r"<script>.*</script>", "", (tmp_path / "a.html").read_text(), flags=re.DOTALL)
    page = chromium.new_page()
    page.set_content(text)
    reported = page.inner_text("body")
    page.close()
    assert panel.traced.peak.op in reported
    for tensor in panel.traced.peak.tensors:
        assert render_bytes(tensor.num_bytes) in reported
