"""The runs tab: the list of runs, and the report of one or several."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tightfit.core.errors import NotFoundError, UserError
from tightfit.runs.charts import COLOURS, load_run_views
from tightfit.runs.find import DEFAULT_FOLDER, FoundRun, find_runs, read_found_runs
from tightfit.runs.report import RunReport
from tightfit.runs.report_html import render_report
from tightfit.runs.report_words import list_results, render_progress
from tightfit.runs.run_folder import RunFolder
from tightfit.serving.compare.controls import BUSY_EVENT
from tightfit.serving.compare.html import escape_html, render_error, render_note

MAX_DRAWN = len(COLOURS)
_NARROW = """<style>body { margin: .2rem auto; padding: 0; max-width: none; }
@media (max-width: 640px) { .chart, .scroll { overflow-x: auto; } .chart svg { min-width: 36rem; }
  .scroll table { min-width: 26rem; } td.bar { min-width: 5rem; }
  th, td { overflow-wrap: break-word; } td:first-child { min-width: 6.5rem; }
  .cards { grid-template-columns: 1fr 1fr; } .card b { font-size: 1.05rem; } }
</style></head>"""
"""On a phone a chart keeps a size that can be read, and is moved sideways by itself."""
_FIT = (
    "const page = this.contentDocument.documentElement;"
    "const fit = () => { this.style.height = page.offsetHeight + 24 + 'px'; };"
    "new ResizeObserver(fit).observe(page); fit();"
)
"""The frame grows with the report in it: no scroll bar inside another."""


def build_runs_tab(own: Sequence[RunFolder]) -> None:
    """Draw the tab and connect it. `own`: the runs that are compared here, listed first."""
    import gradio as gr

    found = list_runs(own)
    first = [_key(run) for run in found[:1] if run.report is not None]
    table = gr.HTML(render_list(found), apply_default_css=False, elem_id="tf-runs")
    reread = gr.Button("Read the folders again", size="sm", elem_id="tf-runs-again")
    chosen = gr.Dropdown(
        choices=_choices(found),
        value=first,
        multiselect=True,
        max_choices=MAX_DRAWN,
        label="Show; several stand side by side",
        elem_id="tf-runs-chosen",
        visible=bool(found),
    )
    shown = gr.HTML(
        render_runs(first, own) if first else "", apply_default_css=False, elem_id="tf-run"
    )

    def again() -> tuple[str, Any]:
        listed = list_runs(own)
        return render_list(listed), gr.update(choices=_choices(listed), visible=bool(listed))

    reread.click(again, None, [table, chosen], **BUSY_EVENT).then(
        lambda keys: render_runs(keys, own), chosen, shown, **BUSY_EVENT
    )
    chosen.change(lambda keys: render_runs(keys, own), chosen, shown, **BUSY_EVENT)


def list_runs(own: Sequence[RunFolder]) -> list[FoundRun]:
    """The compared ones, then those of `runs/`; each once."""
    listed = read_found_runs([*own, *find_runs(DEFAULT_FOLDER)])
    names = {run.path.resolve() for run in own}
    return sorted(listed, key=lambda run: run.folder.path.resolve() not in names)


def render_list(found: Sequence[FoundRun]) -> str:
    """One row per run; on a phone one block per run."""
    if not found:
        return render_note(
            f"There is no run in {DEFAULT_FOLDER}/ of this folder. "
            "One comes from: tightfit train RECIPE"
        )
    heads = ("run", "state", "model", "method", "eval loss", "peak memory", "time")
    top = "".join(f"<th>{head}</th>" for head in heads)
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{head}">{escape_html(cell)}</td>'
            for head, cell in zip(heads, _cells(run), strict=True)
        )
        + "</tr>"
        for run in found
    )
    return f'<table class="tf-table"><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table>'


def render_runs(keys: Sequence[str] | None, own: Sequence[RunFolder]) -> str:
    """The report page of the chosen runs, in a frame of its own."""
    if not keys:
        return render_note("No run is chosen.")
    known = {_key(run): run.folder for run in list_runs(own)}
    try:
        folders = [known[key] for key in keys[:MAX_DRAWN]]
        page = render_report(load_run_views(folders))
    except KeyError as error:
        gone = NotFoundError(f"The run {error} is gone.", remedy="read the folders again")
        return render_error(gone)
    except UserError as error:
        return render_error(error)
    inside = escape(page.replace("</head>", _NARROW, 1), quote=True)
    for mark, entity in (("{", "&#123;"), ("}", "&#125;"), ("$", "&#36;"), ("`", "&#96;")):
        inside = inside.replace(mark, entity)  # else it would be read as the page's template
    return (
        f'<iframe class="tf-frame" title="Run report" srcdoc="{inside}" '
        f'onload="{escape(_FIT, quote=True).replace("{", "&#123;").replace("}", "&#125;")}">'
        "</iframe>"
    )


def _choices(found: Sequence[FoundRun]) -> list[tuple[str, str]]:
    return [(run.folder.path.resolve().name, _key(run)) for run in found if run.report is not None]


def _key(run: FoundRun) -> str:
    return str(Path(run.folder.path).resolve())


def _cells(run: FoundRun) -> tuple[str, ...]:
    name = run.folder.path.resolve().name
    if run.report is None:
        problem = run.fault.problem if run.fault is not None else ""
        return (name, "unreadable", problem, "", "", "", "")
    return (name, *_report_cells(run.report))


def _report_cells(report: RunReport) -> tuple[str, ...]:
    values = {result.label: result.value for result in list_results(report)}
    peak = next((value for label, value in values.items() if label.endswith("memory, peak")), "-")
    return (
        f"{report.status.value} ({render_progress(report)})",
        report.model,
        report.method,
        f"{values.get('eval loss, before', '-')} → {values.get('eval loss, after', '-')}",
        peak,
        values.get("time", "-"),
    )
