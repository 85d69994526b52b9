"""The memory chart: files that open anywhere and say what the estimate says."""

from __future__ import annotations

import builtins
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_examples import make_estimate
from conftest import Run

from pages import check_page
from tightfit.cli.terminal.charts import MemoryPanel, write_memory_chart
from tightfit.core.units import GIB
from tightfit.estimation.result import Estimate

pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")


def write_page(tmp_path: Path, estimate: Estimate) -> str:
    path = tmp_path / "a.html"
    panels = [MemoryPanel("1 x <card>", "how", estimate)] * 2
    write_memory_chart("A <model>: memory", panels, path)
    return path.read_text()


def read_bars(page: str) -> list[tuple[str, float, float]]:
    """Tooltip, left and right end of each part, in the picture's own units."""
    found = []
    for tip, path in re.findall(r'<title>([^<]*)</title>\s*<path d="([^"]*)"', page):
        xs = [float(x) for x, _ in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]
        found.append((tip, min(xs), max(xs)))
    return found


def test_html_is_whole_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    page = write_page(tmp_path, make_estimate())
    checker = check_page(page)
    assert checker.tags.count("svg") == 1
    assert "script" not in checker.tags
    assert "&lt;card&gt;" in page


def test_bars_are_as_long_as_their_bytes(tmp_path: Path) -> None:
    bars = read_bars(write_page(tmp_path, make_estimate()))
    weights = [right - left for tip, left, right in bars if "weights 13.0 GiB" in tip]
    assert len(weights) == 6  # one per phase and panel
    assert max(weights) == pytest.approx(min(weights), abs=0.1)
    for tip, left, right in bars:
        size = re.search(r"([\d.]+) GiB", tip)
        if size is not None and float(size[1]) > 1:
            share = float(size[1]) / 13
            assert right - left == pytest.approx(share * weights[0], rel=0.06), tip


def test_parts_of_one_bar_follow_each_other_without_gap(tmp_path: Path) -> None:
    bars = read_bars(write_page(tmp_path, make_estimate()))
    by_phase: dict[str, list[tuple[float, float]]] = {}
    for tip, left, right in bars[: len(bars) // 2]:
        by_phase.setdefault(tip.partition(":")[0], []).append((left, right))
    assert len(by_phase) == 3
    for parts in by_phase.values():
        for (_, right), (left, _) in pairwise(parts):
            assert right == pytest.approx(left, abs=0.5)


def test_what_does_not_fit_is_marked(tmp_path: Path) -> None:
    assert "too much" in write_page(tmp_path, make_estimate(activations=40 * GIB))
    assert "too much" not in write_page(tmp_path, make_estimate())


def test_both_kinds_of_file_are_made_by_the_verb(run: Run, tmp_path: Path) -> None:
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


def test_a_chart_of_some_says_of_how_many(run: Run, tmp_path: Path) -> None:
    offers, plans = tmp_path / "offers.html", tmp_path / "plans.html"
    reported = run("plan", "Qwen2.5-0.5B", "--buy", "--chart", str(offers), "--json")
    assert reported.err == f"wrote {offers}\n"
    assert f"the cheapest 4 of {len(reported.json['offers'])} offers" in offers.read_text()
    run("plan", "Qwen2.5-0.5B", "--on", "4xT4", "--chart", str(plans))
    assert "the first 3 of " in plans.read_text()
