"""HTML pages, each one self-contained file, and matplotlib figures, as PNG or inside a page.

In a page, the numbers under the pointer are shown (`Hover`), and a marked artist has a tooltip.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import SetupError
from tightfit.core.files import write_atomic
from tightfit.core.text import escape_html, sanitize_lines

# The frame of every HTML page: one self-contained file, nothing fetched, light and dark.

MEMORY_COLOURS = {
    "weights": "#4477aa",
    "adapters": "#ee6677",
    "gradients": "#aa3377",
    "optimizer": "#66ccee",
    "activations": "#e69f00",
    "logits": "#009e73",
    "communication": "#6f7bd1",
    "kv cache": "#8c6d46",
    "quantization": "#cc79a7",
    "dequantized": "#228833",
    "allocator slack": "#b0b0b0",
    "cuda context": "#7f7f7f",
}
"""By component. Distinguishable with the common colour blindnesses; after the sets of Paul Tol and
of Okabe and Ito. Components that are no tensors of the job are grey."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d8dee4;
  --paper: #ffffff; --limit: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4ae; --line: #3a424b;
  --paper: #0f1419; --limit: #ff8a80; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 0; }
p { color: var(--soft); margin: .2rem 0 .6rem; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 13px; }
text.soft { fill: var(--soft); font-size: 12px; } text.over { fill: var(--limit); }
line.grid { stroke: var(--line); } line.limit { stroke: var(--limit); stroke-width: 2;
  stroke-dasharray: 6 4; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; }
ul.legend span { display: inline-block; width: .9em; height: .9em; border-radius: 2px;
  margin-right: .4em; vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; }
"""


_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""The browser itself fetches nothing, whatever a model's or a run's name holds."""


def render_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """The whole document. `body` is markup; `title` is text."""
    ending = f"<script>{script}</script>\n" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape_html(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
        f"{body}{ending}</body>\n</html>\n"
    )


def render_table(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), title: str = "", note: str = ""
) -> str:
    """Text as a table, under a heading and a sentence."""
    lines = ["".join(f"<td>{escape_html(cell)}</td>" for cell in row) for row in rows]
    if head:
        lines.insert(0, "".join(f"<th>{escape_html(name)}</th>" for name in head))
    inside = "".join(f"<tr>{line}</tr>" for line in lines)
    above = f"<h2>{escape_html(title)}</h2>\n" if title else ""
    above += f"<p>{escape_html(note)}</p>\n" if note else ""
    return f'{above}<div class="scroll"><table>{inside}</table></div>\n'


INK, SOFT, LIMIT, GRID = "#1f2328", "#555555", "#b3261e", "#dddddd"
RUN_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#aa3377", "#0099bb", "#b8860b", "#666666", "#994455",
)  # fmt: skip
"""One per run, distinguishable with the common colour blindnesses; after Paul Tol's bright set."""
OTHER_COLOURS = ("#ccbb44", "#997700", "#994455", "#117733", "#88ccaa", "#332288")
"""For memory components without a colour of their own."""
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
"""Behind a label that lines may cross. A stroke around its letters would make paths of them."""
_TIP = "tip:"

FIGURE_STYLE = """
.chart { overflow-x: auto; } .chart > div { position: relative; min-width: 36rem; }
.chart svg { display: block; width: 100%; height: auto; }
.chart svg text { font-family: system-ui, sans-serif !important; }
/* Drawn for white, and in the dark inverted as a whole. */
.chart svg text:not([class]) { fill: #1f2328; }
@media (prefers-color-scheme: dark) { .chart svg { filter: invert(.93) hue-rotate(180deg); } }
.plot { position: absolute; cursor: crosshair; touch-action: pan-y; }
.plot:focus-visible { outline: 2px solid var(--soft); }
.plot .cursor { position: absolute; top: 0; bottom: 0; border-left: 1.5px dashed var(--soft);
  pointer-events: none; }
.tip { position: absolute; top: .4rem; pointer-events: none; background: var(--paper);
  border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .6rem; font-size: .82rem;
  white-space: nowrap; z-index: 2; font-variant-numeric: tabular-nums; }
.tip div { display: flex; gap: .5rem; } .tip div > :last-child { margin-left: auto; }
.tip i { flex: 0 0 .7em; height: .7em; border-radius: 2px; align-self: center; }
@media print { .tip, .cursor { display: none; } }
"""

FIGURE_SCRIPT = """
for (const plot of document.querySelectorAll('.plot')) {
  const data = JSON.parse(plot.dataset.hover);
  const [cursor, tip] = plot.children;
  const stops = [...new Set(data.series.flatMap(line => line.x))].sort((a, b) => a - b);
  let at = data.start;
  // The last place at or before x; of curves, whichever neighbour is nearer.
  const find = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1;
      if (xs[mid] <= x) low = mid; else high = mid - 1; }
    const next = xs[low + 1];
    return !data.steps && next !== undefined && next - x < x - xs[low] ? low + 1 : low;
  };
  const show = x => {
    at = x = data.steps ? Math.max(0, Math.min(x, 0.9999)) : stops[find(stops, x)];
    tip.replaceChildren(document.createElement('b'));
    tip.firstChild.textContent = data.heads.text[find(data.heads.x, x)];
    for (const line of data.series) {
      const place = find(line.x, x), text = line.text[place];
      if (!text || !data.steps && Math.abs(line.x[place] - x) > .01) continue;
      const row = document.createElement('div');
      for (const word of ['i', 'span', 'span']) row.append(document.createElement(word));
      row.children[0].style.background = line.colour;
      row.children[1].textContent = line.label;
      row.children[2].textContent = text;
      tip.append(row);
    }
    tip.hidden = cursor.hidden = false;
    const left = x * plot.clientWidth, wide = tip.offsetWidth;
    cursor.style.left = left + 'px';
    tip.style.left = (left + wide + 24 > plot.clientWidth ? left - wide - 12 : left + 12) + 'px';
  };
  const hide = () => { tip.hidden = cursor.hidden = true; };
  const point = event => {
    const box = plot.getBoundingClientRect();
    show((event.clientX - box.left) / box.width);
  };
  plot.addEventListener('pointermove', point);
  plot.addEventListener('pointerdown', point);
  plot.addEventListener('pointerleave', hide);
  plot.addEventListener('focus', () => show(at));
  plot.addEventListener('blur', hide);
  plot.addEventListener('keydown', event => {
    const place = find(stops, at + 1e-9);
    const to = { ArrowLeft: stops[Math.max(0, place - 1)], Home: 0, End: 1,
      ArrowRight: stops[Math.min(stops.length - 1, place + 1)] }[event.key];
    if (event.key === 'Escape') hide();
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoverSeries:
    """Text for the places of one line or area."""

    label: str
    colour: str
    x: Sequence[float]
    """In data coordinates, rising."""
    text: Sequence[str]
    """Of each x; nothing is shown where it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hover:
    """What a page shows under the pointer over one plot."""

    axis: Any
    series: Sequence[HoverSeries]
    heads: Sequence[tuple[float, str]]
    """The first line of the tip, from this x on."""
    is_steps: bool = False
    """A text holds until the next x; else it is that of the nearest x."""
    start: float = 0.0
    """The x that the keyboard starts from."""


def make_figure(height: float, *, hspace: float | None = None) -> Any:
    """An empty picture, `height` inches high; `hspace` keeps its panels further apart."""
    try:
        # The object interface, not pyplot: no display, no global state.
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise SetupError(
            "A chart needs matplotlib, which is not installed.",
            remedy="pip install 'tightfit[plot]'",
        ) from error
    return Figure(figsize=(10, height), dpi=150, layout=ConstrainedLayoutEngine(hspace=hspace))


def style_axis(axis: Any, *, grid: str) -> None:
    """A light grid along `x`, `y` or `both`, behind the data, and no frame."""
    axis.grid(axis=grid, color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right") if grid == "both" else ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def write_title(figure: Any, title: str, subtitle: str = "") -> None:
    # Empty last lines keep the first panel's heading off the title.
    lines = "\n\n" if subtitle else "\n"
    figure.suptitle(f"{title}{lines}", x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.01, 1 - 0.33 / figure.get_figheight(), subtitle, va="top", fontsize=9)


def draw_legend(figure: Any, colour_of: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colour_of.items()]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=5, fontsize=8, frameon=False,
        handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip


def write_beside(axis: Any, text: str, at: tuple[float, float], *, colour: str = INK) -> None:
    """A label at the end of a bar, on white: a limit's line would strike it through."""
    axis.annotate(
        text, at, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
        color=colour, zorder=5, bbox=ON_WHITE,
    )  # fmt: skip


def pick_colours(names: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """The known colours, and others in turn for what has none."""
    others = [name for name in names if name not in known]
    drawn = {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
    return {name: known.get(name) or drawn[name] for name in names}


def add_tooltip(artist: Any, text: str) -> None:
    """Shown by the browser where the pointer rests on it."""
    artist.set_gid(
        _TIP + sanitize_lines(text)
    )  # the SVG writer keeps it as an id; `render_figure` reads it there


def write_figure(
    figure: Any, path: Path, *, title: str, hovers: Sequence[Hover] = (), more: str = ""
) -> None:
    """PNG or HTML, by the file's ending; a page has `more` markup under the picture."""
    if path.suffix.lower() == ".png":
        write_atomic(path, _save(figure, "png"))
        return
    body = render_figure(figure, hovers, label=title) + more
    page = render_page(title, body, style=FIGURE_STYLE, script=FIGURE_SCRIPT if hovers else "")
    write_atomic(path, page)


def render_figure(figure: Any, hovers: Sequence[Hover] = (), *, label: str) -> str:
    """The figure as markup for a page with `FIGURE_STYLE` and, for hovers, `FIGURE_SCRIPT`."""
    text = _save(figure, "svg").decode()
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape_html(label)}"', 1)
    text = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", text)
    # After saving, when the layout has placed the axes.
    plots = "".join(_render_hover(hover) for hover in hovers)
    return f'<div class="chart"><div>{text}{plots}</div></div>\n'


def _save(figure: Any, kind: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a dollar sign in a file's name starts no formula
        text.set_text(sanitize_lines(text.get_text()))
    file = io.BytesIO()
    metadata = {"Software": "tightfit"} if kind == "png" else {"Date": None}
    # Words in an SVG stay text; its ids are the same each time.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "tightfit"}
    with rc_context(settings), warnings.catch_warnings():
        # The font lacks some scripts; a box in a file's name is no reason for alarm.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format=kind, metadata=metadata)
    return file.getvalue()


def _render_hover(hover: Hover) -> str:
    box = hover.axis.get_position()
    low, high = hover.axis.get_xlim()

    def scaled(xs: Sequence[float]) -> list[float]:
        return [round((x - low) / (high - low), 5) for x in xs]

    data = {
        "steps": hover.is_steps,
        "start": scaled([hover.start])[0],
        "heads": {"x": scaled([x for x, _ in hover.heads]), "text": [t for _, t in hover.heads]},
        "series": [
            {"label": s.label, "colour": s.colour, "x": scaled(s.x), "text": list(s.text)}
            for s in hover.series
        ],
    }
    numbers = escape_html(json.dumps(data, separators=(",", ":")))
    place = f"left:{box.x0:.3%};top:{1 - box.y1:.3%};width:{box.width:.3%};height:{box.height:.3%}"
    return (
        f'<div class="plot" tabindex="0" style="{place}" data-hover="{numbers}">'
        '<div class="cursor" hidden></div><div class="tip" role="status" hidden></div></div>'
    )
