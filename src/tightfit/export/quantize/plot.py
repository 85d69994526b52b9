"""Size against perplexity as a picture, one point for each quantized model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tightfit.core.files import write_atomic
from tightfit.core.units import MIB
from tightfit.export.quantize.summary import QuantizedModel, QuantizeSummary, Standing
from tightfit.export.quantize.targets import Family

_COLOURS = {Family.GGUF: "#1b6ca8", Family.GPTQ: "#c1512e", Family.BITS: "#4c8c4a"}
_REJECTED = "#b3261e"
_FAR = 10.0
"""Perplexities this many times apart need a logarithmic axis."""


def write_plot(summary: QuantizeSummary, path: Path) -> bool:
    """A PNG; False where matplotlib is not installed."""
    try:
        # The object interface, not pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    rows = [row for row in summary.rows if row.check and row.check.perplexity is not None]
    for row in rows:
        _point(axis, row)
    _original(axis, summary)
    _dress(axis, summary, rows)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": "tightfit"})
    write_atomic(path, image.getvalue())
    return True


def _point(axis: Any, row: QuantizedModel) -> None:
    assert row.check is not None
    is_rejected = row.standing is Standing.REJECTED
    colour = _REJECTED if is_rejected else _COLOURS[row.target.family]
    place = (row.size_bytes / MIB, row.check.perplexity)
    axis.plot(*place, "X" if is_rejected else "o", color=colour, markersize=7)
    axis.annotate(
        row.target.value, place, xytext=(6, 4), textcoords="offset points", fontsize=8, color=colour
    )


def _original(axis: Any, summary: QuantizeSummary) -> None:
    if summary.reference_perplexity is None:
        return
    axis.axhline(summary.reference_perplexity, color="#777777", linewidth=1, linestyle="--")
    axis.annotate(
        f"original, {summary.size_bytes / MIB:,.0f} MiB",
        (0.99, summary.reference_perplexity),
        xycoords=("axes fraction", "data"),
        xytext=(0, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#555555",
    )


def _dress(axis: Any, summary: QuantizeSummary, rows: list[QuantizedModel]) -> None:
    found = [row.check.perplexity for row in rows if row.check and row.check.perplexity]
    if found and max(found) > _FAR * min(found):
        axis.set_yscale("log")
    axis.set_xlabel("size of the weights in MiB")
    axis.set_ylabel("perplexity (lower is better)")
    axis.set_title(f"{Path(summary.model).name}, quantized", loc="left", fontweight="bold")
    axis.margins(x=0.12, y=0.12)
    axis.grid(color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
