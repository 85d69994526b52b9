"""The traced chart: areas as high as their bytes, in files that open anywhere."""

from __future__ import annotations

import builtins
import struct
from pathlib import Path
from typing import Any

import pytest

from pages import check_page
from tightfit.cli.terminal.trace_chart import COLOURS, TracePanel, stretch, write_trace_chart
from tightfit.core.errors import SetupError
from tightfit.core.figures import pick_colours
from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.trace.result import Timeline, TracedMemory
from trace_cases import record_full_tuning, trace

pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")

CONTEXT = 768 * MIB


@pytest.fixture(scope="module")
def traced() -> TracedMemory:
    return trace(record_full_tuning(num_layers=4))


def make_panel(traced: TracedMemory, *, capacity: float = 8) -> TracePanel:
    return TracePanel(
        title="1 x <card>",
        traced=traced,
        capacity_bytes=int(capacity * GIB),
        context_bytes=CONTEXT,
    )


def write_page(tmp_path: Path, *panels: TracePanel) -> str:
    write_trace_chart("A <model>", panels, tmp_path / "a.html")
    return (tmp_path / "a.html").read_text()


def test_html_is_whole_and_asks_the_network_for_nothing(
    traced: TracedMemory, tmp_path: Path
) -> None:
    page = write_page(tmp_path, make_panel(traced))
    check_page(page)
    assert "1 x &lt;card&gt;" in page
    assert "<card>" not in page


def test_the_script_gets_the_bytes_of_every_column(traced: TracedMemory, tmp_path: Path) -> None:
    panel = make_panel(traced)
    (hover,) = check_page(write_page(tmp_path, panel)).hovers
    shown = {line["label"]: line for line in hover["series"]}
    layers = {"cuda context": (CONTEXT,) * panel.num_columns}
    layers |= dict(zip(panel.timeline.categories, panel.timeline.bytes, strict=True))
    layers["together"] = panel.totals
    assert set(shown) == {*layers, "over the card by"}
    for name, row in layers.items():
        line = shown[name]
        starts = [round(x * panel.num_columns) for x in line["x"]]
        ends = [*starts[1:], panel.num_columns]
        for start, end, text in zip(starts, ends, line["text"], strict=True):
            for size in row[start:end]:
                assert text == (render_bytes(size) if size else ""), name
    assert round(hover["start"] * panel.num_columns - 0.5) == panel.peak_column
    assert panel.totals[panel.peak_column] == traced.peak_allocated_bytes + CONTEXT


def test_the_peak_is_named_with_its_op_and_place(traced: TracedMemory, tmp_path: Path) -> None:
    peak = traced.peak.model_copy(update={"module": "model.layers.3.<mlp>"})
    page = write_page(tmp_path, make_panel(traced.model_copy(update={"peak": peak})))
    assert f"{peak.stage}: {peak.op} in model.layers.3.&lt;mlp&gt;" in page
    (hover,) = check_page(page).hovers
    expected = f"{peak.stage}: the peak, {peak.op} in model.layers.3.<mlp>"
    assert expected in hover["heads"]["text"]


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


def test_a_far_larger_card_is_named_and_not_drawn(traced: TracedMemory, tmp_path: Path) -> None:
    assert "card: 140.0 GiB, above this picture" in write_page(
        tmp_path, make_panel(traced, capacity=140)
    )
    fitting = write_page(tmp_path, make_panel(traced, capacity=8))
    assert "above this picture" not in fitting
    assert "more than the card" not in fitting
    assert "more than the card" in write_page(tmp_path, make_panel(traced, capacity=4))


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
    panel = make_panel(traced.model_copy(update={"timeline": empty}))
    assert "Nothing was allocated" in write_page(tmp_path, panel)
    write_trace_chart("t", [panel], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_picture_is_made(traced: TracedMemory, tmp_path: Path) -> None:
    panels = [make_panel(traced), make_panel(traced, capacity=140)]
    write_trace_chart("t", panels, tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1000
    assert height >= 1000


def test_the_picture_has_the_colours_of_its_legend(traced: TracedMemory, tmp_path: Path) -> None:
    """Each category that matters covers some of the picture, in its own colour."""
    image = pytest.importorskip("PIL.Image", reason="pip install pillow un-skips this")
    panel = make_panel(traced)
    write_trace_chart("t", [panel], tmp_path / "a.png")
    with image.open(tmp_path / "a.png") as opened:
        counts = {colour: count for count, colour in opened.convert("RGB").getcolors(2**24)}
    colour_of = pick_colours([name for name, _ in panel.layers], COLOURS)
    drawn = {}
    for name, row in panel.layers:
        colour = tuple(bytes.fromhex(colour_of[name][1:]))
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
        write_trace_chart("t", [make_panel(traced)], tmp_path / "a.png")
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
        assert moment.has_room(moment.part or moment.stage, panel.num_columns), moment
    assert panel.num_columns < 4 * columns
