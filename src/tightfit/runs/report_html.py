"""A run, or several side by side, as one HTML file that opens anywhere."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from tightfit.core.files import write_atomic
from tightfit.core.html_page import render_page
from tightfit.core.units import render_bytes, render_count
from tightfit.runs.charts import (
    RunView,
    describe_capacity,
    load_run_views,
    make_loss_chart,
    make_memory_chart,
    render_chart,
)
from tightfit.runs.report import Comparison, Event, RunReport, list_differing, list_settings
from tightfit.runs.report_words import (
    UNKNOWN,
    align_results,
    list_results,
    render_error,
    render_quantity,
    render_time,
)
from tightfit.runs.run_folder import RunFolder

PAGE_STYLE = """
h2 { border-top: 1px solid var(--line); padding-top: 1rem; }
.state { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .85rem;
  border: 1px solid var(--line); vertical-align: 3px; margin-left: .4rem; }
.finished { border-color: #228833; color: #228833; }
.failed, .died, .out-of-memory { border-color: var(--limit); color: var(--limit); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem;
  margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.3rem; } .card small { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
td.soft { color: var(--soft); } .far { color: var(--limit); }
td.bar { width: 30%; } .track { position: relative; height: .9rem; background: var(--line);
  border-radius: 2px; margin-top: .25rem; } .track i { position: absolute; inset: 0 auto 0 0;
  border-radius: 2px; } .track u { position: absolute; top: -.2rem; bottom: -.2rem; left: 50%;
  border-left: 2px dashed var(--ink); }
ul.legend span { background: var(--c); } ul.legend span.dots { border-radius: 50%; }
ul.legend span.level, ul.legend span.upright { background: none; width: 1.4em; height: 0;
  border-top: 2px dashed var(--c); vertical-align: 4px; border-radius: 0; }
ul.legend span.upright { width: 0; height: 1em; border-top: 0; border-left: 2px dotted var(--c);
  vertical-align: -2px; }
details { margin: .4rem 0; } summary { cursor: pointer; }
.chart { position: relative; } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.faint { stroke-width: 1; opacity: .35; } polyline.dots { stroke-width: 1;
  stroke-dasharray: 2 4; } circle { stroke: var(--paper); stroke-width: 1.5; }
line.mark { stroke: var(--limit); stroke-dasharray: 2 3; stroke-width: 1.5; }
line.cursor { stroke: var(--soft); stroke-width: 1; pointer-events: none; }
.tip { position: absolute; top: .4rem; pointer-events: none; background: var(--paper);
  border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .6rem; font-size: .82rem;
  white-space: nowrap; z-index: 2; }
.tip span { display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  margin-right: .35em; }
@media print { .tip, .cursor { display: none; } }
"""

PAGE_SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.dataset.chart);
  const svg = chart.querySelector('svg'), tip = chart.querySelector('.tip');
  const cursor = chart.querySelector('.cursor');
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid + 1;
      else high = mid; }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute('x1', -9);
    cursor.setAttribute('x2', -9); };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * data.width;
    const found = data.series.map(line => [line, nearest(line.x, x)]);
    const close = found.reduce((best, item) =>
      Math.abs(item[0].x[item[1]] - x) < Math.abs(best[0].x[best[1]] - x) ? item : best);
    const place = close[0].x[close[1]];
    cursor.setAttribute('x1', place); cursor.setAttribute('x2', place);
    tip.replaceChildren();
    const head = document.createElement('b');
    head.textContent = 'step ' + close[0].step[close[1]].toLocaleString('en');
    tip.append(head);
    for (const [line, at] of found) {
      if (Math.abs(line.x[at] - place) > 8) continue;
      const row = document.createElement('div'), dot = document.createElement('span');
      dot.style.background = line.colour;
      row.append(dot, line.label + ': ' + line.y[at] + (data.unit ? ' ' + data.unit : ''));
      tip.append(row);
    }
    tip.hidden = false;
    const left = place / data.width * box.width;
    tip.style.left = (left + tip.offsetWidth + 24 > box.width
      ? left - tip.offsetWidth - 12 : left + 12) + 'px';
  });
}
"""


# A run, or several side by side, as one HTML file that opens anywhere.

FAR_OFF_PERCENT = 10.0
"""An error beyond this is marked."""
Cells = Sequence[str]


def write_html(run: RunFolder, path: Path | None = None) -> None:
    """The report of one run; into its own folder where no path is given."""
    write_atomic(path or run.html_path, render_report(load_run_views([run])))


def render_report(runs: Sequence[RunView]) -> str:
    """One run in full; several with their differences first."""
    if len(runs) == 1:
        run = runs[0]
        body = _head(run) + _cards(run.report) + render_charts(runs) + _one_run(run)
        return render_page(
            f"{run.curves.name}: run report", body, style=PAGE_STYLE, script=PAGE_SCRIPT
        )
    body = f"<h1>{len(runs)} runs side by side</h1>\n" + _side_by_side(runs) + render_charts(runs)
    for run in runs:
        body += _head(run, level=2) + _one_run(run, is_part=True)
    return render_page(f"{len(runs)} runs", body, style=PAGE_STYLE, script=PAGE_SCRIPT)


def render_plots(runs: Sequence[RunView]) -> str:
    """The charts alone."""
    title = runs[0].curves.name if len(runs) == 1 else f"{len(runs)} runs"
    body = f"<h1>{escape(title)}</h1>\n" + render_charts(runs)
    body += "".join(_compared(run.report, name=run.curves.name) for run in runs)
    return render_page(title, body, style=PAGE_STYLE, script=PAGE_SCRIPT)


def render_charts(runs: Sequence[RunView]) -> str:
    curves = [run.curves for run in runs]
    return (
        "<h2>Loss</h2>\n<p>How wrong the model's next word is: lower is better. "
        "<em>Train</em> is on the rows it learns from, <em>eval</em> on rows held back; where eval "
        "rises while train falls, it learns by heart. Point at the chart for numbers.</p>\n"
        f"{render_chart(make_loss_chart(curves))}"
        "<h2>Memory</h2>\n<p>Most that was held at each step on rank 0, beside what was "
        f"predicted; {escape(describe_capacity(curves))}.</p>\n"
        f"{render_chart(make_memory_chart(curves))}"
    )


def _head(run: RunView, *, level: int = 1) -> str:
    report = run.report
    state = report.status.value
    trained = f"{render_count(report.num_trainable_params)} of {render_count(report.num_params)}"
    badge = f'<span class="state {state}">{state}</span>'
    text = (
        f"<h{level}>{escape(run.curves.name)} {badge}</h{level}>\n"
        f"<p>{escape(report.model)}, {escape(report.method)} on {escape(report.hardware)}; "
        f"{trained} parameters trained; last change {escape(render_time(report.updated_at))}</p>\n"
    )
    if report.problem:
        text += f'<p class="far">{escape(report.problem)}</p>\n'
    if report.remedy:
        text += f"<p>try: {escape(report.remedy)}</p>\n"
    return text


def _cards(report: RunReport) -> str:
    """What a reader wants first: did it learn, how long, did it fit."""
    values = {result.label: result.value for result in list_results(report)}
    peak = next(label for label in values if label.endswith("memory, peak"))

    def change(what: str, before: str, after: str) -> tuple[str, str]:
        reported = values[f"{what}, {before}"], values[f"{what}, {after}"]
        return (what, UNKNOWN if set(reported) == {UNKNOWN} else " → ".join(reported))

    shown = [
        change("eval loss", "before", "after"),
        change("perplexity", "before", "after"),
        change("train loss", "first", "last"),
        ("time", values["time"]),
        ("tokens per second", values["tokens per second"]),
        (peak, values[peak]),
    ]
    cards = "".join(
        f'<div class="card"><small>{escape(label)}</small><b>{escape(value)}</b></div>'
        for label, value in shown
    )
    return f'<div class="cards">{cards}</div>\n'


def _one_run(run: RunView, *, is_part: bool = False) -> str:
    report, plan = run.report, run.past.plan
    results = [(r.label, r.value, r.meaning) for r in list_results(report)]
    settings = list(list_settings(plan).items())
    notes = [*plan.warnings, *plan.estimate.assumptions]
    return "".join(
        [
            _compared(report),
            "" if is_part else _section("Results", _table(results, soft={2})),
            _section("The plan, and why", f"<p>{escape(report.strategy)}</p>{_list(plan.why)}"),
            _folded("What was assumed, and warnings", _list(notes)) if notes else "",
            _events("Changes of plan", report.plan_changes),
            _events("Events", report.events),
            _folded("Settings", _table(settings)),
            _folded("Versions and machine", _environment(run)),
        ]
    )


def _compared(report: RunReport, *, name: str | None = None) -> str:
    rows = "".join(map(_compared_row, report.compared))
    head = '<th class="number">predicted</th><th class="number">measured</th>'
    title = "Predicted beside measured" + (f": {name}" if name else "")
    return _section(
        title,
        "<p>The bar is what was measured; the dashed line is the prediction. "
        "The error is in percent of the measured value: above 0, too much was predicted.</p>"
        f'<div class="scroll"><table><tr><th></th>{head}<th class="number">error</th><th></th></tr>'
        f"{rows}</table></div>",
    )


def _compared_row(found: Comparison) -> str:
    measured, predicted = found.measured, found.predicted
    share = 0.0 if measured is None or not predicted else min(2.0, measured / predicted)
    is_far = found.error_percent is not None and abs(found.error_percent) > FAR_OFF_PERCENT
    colour = "#ee6677" if is_far else "#4477aa"
    return (
        f"<tr><td>{escape(found.name)}</td>"
        f'<td class="number">{render_quantity(predicted, found.unit)}</td>'
        f'<td class="number">{render_quantity(measured, found.unit)}</td>'
        f'<td class="number{" far" if is_far else ""}">{render_error(found.error_percent)}</td>'
        f'<td class="bar"><div class="track"><i style="width:{50 * share:.1f}%;'
        f'background:{colour}"></i><u></u></div></td></tr>'
    )


def _side_by_side(runs: Sequence[RunView]) -> str:
    names = [run.curves.name for run in runs]
    differing = list_differing([run.past.plan for run in runs])
    rows = align_results([run.report for run in runs])
    changed = [(name, *values) for name, values in differing.items()]
    same = "<p>All settings are the same.</p>"
    return _section("Settings that differ", _table(changed, head=names) if changed else same) + (
        _section("Results", _table([("status", *_states(runs)), *rows], head=names))
    )


def _states(runs: Sequence[RunView]) -> list[str]:
    return [run.report.status.value for run in runs]


def _environment(run: RunView) -> str:
    found = run.past.environment
    if found is None:
        return "<p>Not kept by this run.</p>"
    rows = [
        ("command", shlex.join(found.argv)),
        ("started", found.started_at),
        ("host", f"{found.hostname}, {found.cpu}, {found.num_cores} cores"),
        ("RAM", render_bytes(found.memory_bytes)),
        ("GPUs", ", ".join(found.gpus) or "none"),
        ("driver", f"{found.driver} (up to CUDA {found.driver_cuda})" if found.driver else "-"),
        ("torch built for", f"CUDA {found.torch_cuda}" if found.torch_cuda else "the CPU"),
        ("system", found.platform),
        ("python", found.python),
        ("tightfit", found.tightfit),
        *found.packages.items(),
    ]
    return _table(rows)


def _section(title: str, inside: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{inside}\n"


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>\n"


def _list(notes: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def _events(title: str, events: Sequence[Event]) -> str:
    rows = [(f"step {event.step:,}", event.text) for event in events]
    return _section(title, _table(rows)) if rows else ""


def _table(rows: Iterable[Cells], *, head: Cells = (), soft: set[int] | None = None) -> str:
    """First column names, the rest values; columns in `soft` are asides."""
    lines = []
    if head:
        lines.append("<tr><th></th>" + "".join(f"<th>{escape(name)}</th>" for name in head))
    for row in rows:
        cells = "".join(
            f"<td{' class=soft' if place in (soft or ()) else ''}>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        lines.append(f"<tr>{cells}")
    closed = "".join(f"{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>{closed}</table></div>'
