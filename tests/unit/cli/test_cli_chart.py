"""The memory chart: files that open anywhere and say what the estimate says."""

from __future__ import annotations

import builtins
import itertools
import struct
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli_examples import make_estimate
from conftest import Run

from tightfit.cli.charts.memory import (
    LEFT,
    RIGHT,
    WIDTH,
    Chart,
    make_panel,
    pick_ticks,
    render_memory_html,
)
from tightfit.core.units import GIB

VOID = {"meta", "br", "link"}


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


def make_chart() -> Chart:
    estimate = make_estimate()
    return Chart(
        title="A <model>: memory", panels=(make_panel("1 x <card>", estimate, subtitle="how"),) * 2
    )


def test_html_is_whole_and_asks_the_network_for_nothing() -> None:
    page = render_memory_html(make_chart())
    checker = Checker()
    checker.feed(page)
    checker.close()

    assert checker.open == []
    assert checker.tags.count("svg") == 2
    assert "http" not in page
    assert {"script", "link", "img", "iframe"}.isdisjoint(checker.tags)
    assert {"src", "href"}.isdisjoint(name for name, _ in checker.attributes)
    assert "prefers-color-scheme: dark" in page
    assert "&lt;card&gt;" in page


def svg_of(page: str) -> ET.Element:
    return ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_bars_are_as_long_as_their_bytes() -> None:
    chart = make_chart()
    svg = svg_of(render_memory_html(chart))
    scale = (WIDTH - LEFT - RIGHT) / chart.top_gib

    rects = [(rect, rect.find("title")) for rect in svg.iter("rect")]
    weights = [r for r, title in rects if title is not None and "weights" in (title.text or "")]
    assert len(weights) == 3  # one per phase
    for rect in weights:
        assert float(rect.attrib["width"]) == pytest.approx(13 * scale, abs=0.1)
    assert all(title is not None and "iB" in (title.text or "") for _, title in rects)
    limit = next(line for line in svg.iter("line") if line.get("class") == "limit")
    assert float(limit.attrib["x1"]) == pytest.approx(LEFT + 32 * scale, abs=0.1)


def test_parts_of_one_bar_follow_each_other_without_gap() -> None:
    svg = svg_of(render_memory_html(make_chart()))
    by_row: dict[str, list[tuple[float, float]]] = {}
    for rect in svg.iter("rect"):
        box = (float(rect.attrib["x"]), float(rect.attrib["width"]))
        by_row.setdefault(rect.attrib["y"], []).append(box)
    assert len(by_row) == 3
    for boxes in by_row.values():
        for (x, width), (following, _) in itertools.pairwise(boxes):
            assert x + width == pytest.approx(following, abs=0.5)


def test_what_does_not_fit_is_marked() -> None:
    big = make_estimate(activations=40 * GIB)
    page = render_memory_html(Chart(title="t", panels=(make_panel("p", big),)))
    assert "too much" in page
    assert 'class="size over"' in page


@pytest.mark.parametrize("top", [0.3, 1.0, 17.0, 31.7, 150.0, 1600.0])
def test_ticks_are_few_and_inside(top: float) -> None:
    ticks = pick_ticks(top)
    assert 2 <= len(ticks) <= 9
    assert ticks[0] == 0
    assert ticks[-1] <= top


def test_both_kinds_of_file_are_made_by_the_verb(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    image, page = tmp_path / "a.png", tmp_path / "a.html"

    assert run("plan", "Qwen2.5-0.5B", "--on", "T4", "--chart", str(image)).code == 0
    assert run("plan", "Qwen2.5-0.5B", "--buy", "--chart", str(page)).code == 0

    data = image.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1000
    assert height >= 500
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_without_matplotlib_the_remedy_names_the_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    answer = run("plan", "Qwen2.5-0.5B", "--on", "T4", "--chart", str(tmp_path / "a.png"))

    assert answer.code == 6
    assert "pip install 'tightfit[plot]'" in answer.err
    assert not (tmp_path / "a.png").exists()


def test_sizes_are_drawn_over_the_line_of_the_card_with_a_halo() -> None:
    page = render_memory_html(make_chart())
    svg = list(svg_of(page))
    line = next(i for i, part in enumerate(svg) if part.get("class") == "limit")
    sizes = [i for i, part in enumerate(svg) if "size" in (part.get("class") or "").split()]
    assert len(sizes) == 3
    assert min(sizes) > line
    assert "paint-order: stroke" in page


def test_a_chart_of_some_says_of_how_many(run: Run, tmp_path: Path) -> None:
    offers, plans = tmp_path / "offers.html", tmp_path / "plans.html"
    reported = run("plan", "Qwen2.5-0.5B", "--buy", "--chart", str(offers), "--json")
    assert reported.err == f"wrote {offers}\n"
    assert f"the cheapest 4 of {len(reported.json['offers'])} offers" in offers.read_text()
    run("plan", "Qwen2.5-0.5B", "--on", "4xT4", "--chart", str(plans))
    assert "the first 3 of " in plans.read_text()
