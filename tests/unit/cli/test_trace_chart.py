"""The traced chart: areas as high as their bytes, in files that open anywhere."""

from __future__ import annotations

import builtins
import json
import re
import struct
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from test_cli_chart import Checker

from tightfit.cli.charts.trace import (
    SIDE,
    TraceChart,
    TracePanel,
    make_trace_panel,
    render_trace_html,
    stretch,
    write_trace_chart,
)
from tightfit.core.errors import SetupError
from tightfit.core.units import GIB, MIB
from tightfit.trace.result import Timeline, TracedMemory
from trace_cases import record_full_tuning, trace

CONTEXT = 768 * MIB


@pytest.fixture(scope="module")
def traced() -> TracedMemory:
    return trace(record_full_tuning(num_layers=4))


def make_panel(traced: TracedMemory, *, capacity: float = 8) -> TracePanel:
    return make_trace_panel(
        "1 x <card>", traced, capacity_bytes=int(capacity * GIB), context_bytes=CONTEXT
    )


def make_chart(traced: TracedMemory, **fields: Any) -> TraceChart:
    return TraceChart(title="A <model>: memory", panels=(make_panel(traced, **fields),))


def svg_of(page: str) -> ET.Element:
    return ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def edge_of(path: str) -> list[tuple[float, float]]:
    """(x where it ends, y) of each run along a path's upper edge."""
    return [(float(x), float(y)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", path)]


def test_html_is_whole_and_asks_the_network_for_nothing(traced: TracedMemory) -> None:
    page = render_trace_html(make_chart(traced))
    checker = Checker()
    checker.feed(page)
    checker.close()

    assert checker.open == []
    assert "http" not in page
    assert {"link", "img", "iframe"}.isdisjoint(checker.tags)
    assert {"src", "href"}.isdisjoint(name for name, _ in checker.attributes)
    assert "prefers-color-scheme: dark" in page
    assert "1 x &lt;card&gt;" in page
    assert "<card>" not in page


def test_areas_are_stacked_as_high_as_their_bytes(traced: TracedMemory) -> None:
    panel = make_panel(traced)
    svg = svg_of(render_trace_html(TraceChart(title="t", panels=(panel,))))
    paths = {path.attrib["data-part"]: edge_of(path.attrib["d"]) for path in svg.iter("path")}

    assert list(paths)[-1] == "cuda context"
    assert set(paths) == {"cuda context", *traced.timeline.categories}
    names = ["cuda context", *panel.timeline.categories]
    for place, name in enumerate(names):
        for end, y in paths[name]:
            column = round(end / SIDE * panel.num_columns) - 1
            below = CONTEXT + sum(row[column] for row in panel.timeline.bytes[:place])
            assert (1 - y / SIDE) * panel.top_bytes == pytest.approx(below, abs=0.001 * GIB)
        assert paths[name][-1][0] == SIDE
    limit = next(line for line in svg.iter("line") if line.get("class") == "limit")
    assert (1 - float(limit.attrib["y1"]) / SIDE) * panel.top_bytes == pytest.approx(
        8 * GIB, rel=0.001
    )


def test_the_script_gets_the_bytes_of_every_column(traced: TracedMemory) -> None:
    panel = make_panel(traced)
    page = render_trace_html(TraceChart(title="t", panels=(panel,)))
    found = re.search(r'data-trace="([^"]*)"', page)
    assert found
    data = json.loads(unescape(found.group(1)))
    unrolled = {
        part["name"]: [size for start, end, size in part["runs"] for _ in range(start, end)]
        for part in data["parts"]
    }
    assert unrolled.pop("cuda context") == [CONTEXT] * panel.num_columns
    for name, row in zip(panel.timeline.categories, panel.timeline.bytes, strict=True):
        assert unrolled[name] == list(row)
    assert data["columns"] == panel.num_columns
    assert panel.totals[data["peak"]] == traced.peak_allocated_bytes + CONTEXT


def test_the_peak_is_named_with_its_op_and_place(traced: TracedMemory) -> None:
    peak = traced.peak.model_copy(update={"module": "model.layers.3.<mlp>"})
    page = render_trace_html(make_chart(traced.model_copy(update={"peak": peak})))
    assert f"{peak.stage}: {peak.op} in model.layers.3.&lt;mlp&gt;" in page


def test_the_peak_is_looked_for_where_the_trace_puts_it(traced: TracedMemory) -> None:
    """A later process may need more; what is called the peak is that of training."""
    last = len(traced.timeline.bytes[0])
    rows = tuple((*row, 9 * GIB, 9 * GIB) for row in traced.timeline.bytes)
    timeline = traced.timeline.model_copy(
        update={"bytes": rows, "stages": (*traced.timeline.stages, (last, "resume"))}
    )
    panel = make_panel(traced.model_copy(update={"timeline": timeline}))
    assert panel.totals[panel.peak_column] == traced.peak_allocated_bytes + CONTEXT
    assert max(panel.totals) > panel.totals[panel.peak_column]
    assert panel.top_bytes > max(panel.totals)


def test_a_far_larger_card_is_named_and_not_drawn(traced: TracedMemory) -> None:
    page = render_trace_html(make_chart(traced, capacity=140))
    assert 'class="limit"' not in page
    assert "card: 140.0 GiB, above this picture" in page
    assert 'class="limit"' in render_trace_html(make_chart(traced, capacity=8))
    short = render_trace_html(make_chart(traced, capacity=4))
    assert 'class="limit"' in short
    assert "more than the card" in short


def test_short_moments_are_wide_enough_to_be_seen(traced: TracedMemory) -> None:
    timeline = Timeline(
        categories=("weights",),
        bytes=((*range(100), 777, 888),),
        stages=((0, "first step, forward"), (100, "save")),
    )
    drawn = stretch(timeline)
    assert drawn.bytes[0][:100] == tuple(range(100))
    assert sorted(set(drawn.bytes[0][100:])) == [777, 888]
    assert drawn.stages == timeline.stages
    assert (len(drawn.bytes[0]) - 100) / len(drawn.bytes[0]) > 0.05

    whole = stretch(traced.timeline)
    assert max(map(sum, zip(*whole.bytes, strict=True))) == traced.peak_allocated_bytes
    assert [name for _, name in whole.stages] == [name for _, name in traced.timeline.stages]


def test_stages_gather_their_moments(traced: TracedMemory) -> None:
    panel = make_panel(traced)
    assert [stage.name for stage in panel.stages] == [
        "load", "first step", "steady step", "eval", "save",
    ]  # fmt: skip
    assert [stage.end for stage in panel.stages[:-1]] == [stage.start for stage in panel.stages[1:]]
    assert panel.stages[-1].end == panel.num_columns


def test_nothing_traced_is_said(traced: TracedMemory, tmp_path: Path) -> None:
    empty = Timeline(categories=(), bytes=(), stages=())
    page = render_trace_html(make_chart(traced.model_copy(update={"timeline": empty})))
    assert "Nothing was allocated" in page
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    write_trace_chart(make_chart(traced.model_copy(update={"timeline": empty})), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_picture_is_made(traced: TracedMemory, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    chart = TraceChart(title="t", panels=(make_panel(traced), make_panel(traced, capacity=140)))
    write_trace_chart(chart, tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1000
    assert height >= 1000


def test_the_picture_has_the_colours_of_its_legend(traced: TracedMemory, tmp_path: Path) -> None:
    """Each category that matters covers some of the picture, in its own colour."""
    image = pytest.importorskip("PIL.Image", reason="pip install pillow un-skips this")
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    chart = make_chart(traced)
    write_trace_chart(chart, tmp_path / "a.png")
    with image.open(tmp_path / "a.png") as opened:
        counts = {colour: count for count, colour in opened.convert("RGB").getcolors(2**24)}
    panel = chart.panels[0]
    drawn = {}
    for name, row in panel.layers:
        colour = tuple(bytes.fromhex(chart.colour_of[name][1:]))
        drawn[name] = (sum(row), counts.get(colour, 0))
    for name in ("cuda context", "weights", "optimizer", "activations"):
        # Pixels in the proportion of bytes, but for edges and lines drawn over them.
        size, pixels = drawn[name]
        share = size / drawn["weights"][0]
        assert pixels / drawn["weights"][1] == pytest.approx(share, rel=0.15), name


def test_without_matplotlib_the_remedy_names_the_extra(
    traced: TracedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SetupError) as raised:
        write_trace_chart(make_chart(traced), tmp_path / "a.png")
    assert "pip install 'tightfit[plot]'" in raised.value.remedy
    assert not (tmp_path / "a.png").exists()


def test_every_part_of_a_step_is_named(traced: TracedMemory) -> None:
    """Also an update of few events between long passes."""
    columns = 600
    moments = ["first step, forward", "first step, backward", "first step, update"]
    moments += [name.replace("first", "steady") for name in moments]
    names = ["load", *moments, "eval", "save", "generate", "resume"]
    starts = [0, 60, 160, 290, 292, 400, 580, 582, 590, 592, 597]
    timeline = Timeline(
        categories=("weights",),
        bytes=(tuple(range(columns)),),
        stages=tuple(zip(starts, names, strict=True)),
    )
    panel = make_panel(traced.model_copy(update={"timeline": timeline}))
    assert [moment.name for moment in panel.moments] == names
    for moment in panel.moments:
        assert panel.has_room(moment, moment.part or moment.stage), moment
    assert panel.num_columns < 4 * columns
