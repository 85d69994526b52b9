"""The runs tab: the runs of a folder and the report of one or several, live while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tightfit.core.errors import UserError
from tightfit.core.figures import RUN_COLOURS
from tightfit.runs.report import (
    FoundRun,
    find_runs,
    list_results,
    read_found_runs,
    render_progress,
)
from tightfit.runs.report_html import load_runs, render_report
from tightfit.runs.run_folder import RunFolder
from tightfit.serving.page.components import (
    ANSWER_EVENT,
    BUSY_EVENT,
    build_hidden_button,
    build_line,
    render_error,
    render_note,
    render_table,
)

MAX_DRAWN = len(RUN_COLOURS)
_NARROW = """<style>body { margin: .2rem auto; padding: 0; max-width: none; }
@media (max-width: 640px) { .scroll table { min-width: 26rem; }
  th, td { overflow-wrap: break-word; } td:first-child { min-width: 6.5rem; }
  .cards { grid-template-columns: 1fr 1fr; } .card b { font-size: 1.05rem; } }
</style></head>"""
"""On a phone a table keeps a size that can be read, and is moved sideways by itself."""
_FIT = (
    "const page = this.contentDocument.documentElement;"
    "const fit = () => { this.style.height = page.offsetHeight + 24 + 'px'; };"
    "new ResizeObserver(fit).observe(page); fit();"
)
"""The frame grows with the report in it: no scroll bar inside another."""
_SWAP = (
    "const page = document.querySelector('#tf-run .tf-frame')?.contentDocument;"
    "const next = this.contentDocument.body;"
    "page?.querySelectorAll('details').forEach((part, place) => {"
    " const same = next.querySelectorAll('details')[place]; if (same) same.open = part.open; });"
    "page?.body.replaceWith(page.adoptNode(next));"
)
"""A report that changed takes the place of the one that is shown without a flicker: it is loaded
out of sight, and its body moved."""


def build_runs_tab(own: Sequence[RunFolder], folder: Path, *, reads_paths: bool) -> None:
    """Draw the tab and connect it. `own`: the runs of the page's models, listed first."""
    import gradio as gr

    found = list_runs(own, str(folder))
    first = [_key(run) for run in found[:1] if run.report is not None]
    with gr.Row(elem_classes="tf-twins", elem_id="tf-ask-runs"):
        place = build_line(
            "Folder", str(folder), "Runs in it, or one level further in", elem_id="tf-runs-folder"
        )
        place.visible = reads_paths
        chosen = gr.Dropdown(
            choices=_choices(found),
            value=first,
            multiselect=True,
            max_choices=MAX_DRAWN,
            label="Show",
            info="Several stand side by side",
            elem_id="tf-runs-chosen",
        )
    go = build_hidden_button("tf-go-runs", "Read the folder again")
    table = gr.HTML(render_runs_list(found, folder), apply_default_css=False, elem_id="tf-runs")
    seen = gr.State((_choices(found), _fingerprint(first)))
    shown = gr.HTML(render_runs(first) if first else "", apply_default_css=False, elem_id="tf-run")
    changed = gr.HTML("", apply_default_css=False, elem_classes="tf-visually-hidden")

    def keep_listed(keys: Sequence[str]) -> list[str]:
        """A request need not come from our page: where paths are off, a run must be listed."""
        if reads_paths:
            return list(keys)
        listed = {_key(run) for run in list_runs(own, str(folder))}
        return [key for key in keys if key in listed]

    def refresh(typed: str, keys: list[str], before: Any) -> list[Any]:
        """The list, and the report where a chosen run has gone on."""
        where = typed.strip() if reads_paths and typed else str(folder)
        listed, keys = list_runs(own, where), keep_listed(keys)
        choices = _choices(listed)
        now = (choices, _fingerprint(keys))
        return [
            render_runs_list(listed, Path(where)),
            # Left alone while it is the same: it may be open.
            gr.skip() if choices == before[0] else gr.update(choices=_with_chosen(choices, keys)),
            gr.skip() if now[1] == before[1] else render_runs(keys, onload=_SWAP),
            now,
        ]

    def show(keys: list[str]) -> tuple[str, str]:
        return render_runs(keep_listed(keys)), ""

    gr.on([go.click, place.submit], refresh, [place, chosen, seen], [table, chosen, changed, seen],
          **ANSWER_EVENT)  # fmt: skip
    chosen.change(show, chosen, [shown, changed], **BUSY_EVENT)


def list_runs(own: Sequence[RunFolder], folder: str) -> list[FoundRun]:
    """The page's own, then those of the folder; each once."""
    try:
        inside = find_runs(Path(folder).expanduser())
    except (OSError, RuntimeError, ValueError):  # no such user, a NUL byte
        inside = []
    listed = read_found_runs([*own, *inside])
    names = {run.path.resolve() for run in own}
    return sorted(listed, key=lambda run: run.folder.path.resolve() not in names)


def render_runs_list(found: Sequence[FoundRun], folder: Path) -> str:
    """One row per run; on a phone one block per run."""
    if not found:
        return render_note(
            f"There is no run in {folder}. One comes from: tightfit train RECIPE --output runs/NAME"
        )
    heads = ("run", "state", "model", "method", "eval loss", ">peak memory", ">time")
    return render_table(heads, [_cells(run) for run in found])


def render_runs(keys: Sequence[str] | None, *, onload: str = _FIT) -> str:
    """The report page of the chosen runs, in a frame of its own."""
    if not keys:
        return render_note("No run is chosen.")
    folders = [RunFolder(path=Path(key)) for key in keys[:MAX_DRAWN]]
    try:
        page = render_report(load_runs(folders))
    except UserError as error:
        return render_error(error)
    inside = escape(page.replace("</head>", _NARROW, 1), quote=True)
    for mark, entity in (("{", "&#123;"), ("}", "&#125;"), ("$", "&#36;"), ("`", "&#96;")):
        inside = inside.replace(mark, entity)  # else it would be read as the page's template
    return (
        f'<iframe class="tf-frame" title="Run report" srcdoc="{inside}" '
        f'onload="{escape(onload, quote=True).replace("{", "&#123;").replace("}", "&#125;")}">'
        "</iframe>"
    )


def _choices(found: Sequence[FoundRun]) -> list[tuple[str, str]]:
    return [(run.folder.path.resolve().name, _key(run)) for run in found if run.report is not None]


def _with_chosen(choices: list[tuple[str, str]], keys: Sequence[str]) -> list[tuple[str, str]]:
    """A chosen run stays on offer when another folder is listed."""
    listed = {key for _, key in choices}
    return [*choices, *((Path(key).name, key) for key in keys if key not in listed)]


def _fingerprint(keys: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Changes with the metrics and the state of these runs."""
    found = []
    for run in (RunFolder(path=Path(key)) for key in keys):
        for path in (run.metrics_path, run.state_path):
            try:
                read = path.stat()
            except OSError:
                continue
            found.append((read.st_mtime_ns, read.st_size))
    return tuple(found)


def _key(run: FoundRun) -> str:
    return str(Path(run.folder.path).resolve())


def _cells(run: FoundRun) -> tuple[str, ...]:
    name, report = run.folder.path.resolve().name, run.report
    if report is None:
        problem = run.error.problem if run.error is not None else ""
        return (name, "unreadable", problem, "", "", "", "")
    values = {result.label: result.value for result in list_results(report)}
    peak = next((value for label, value in values.items() if label.endswith("memory, peak")), "-")
    return (
        name,
        f"{report.status.value} ({render_progress(report)})",
        report.model,
        report.method,
        f"{values.get('eval loss, before', '-')} → {values.get('eval loss, after', '-')}",
        peak,
        values.get("time", "-"),
    )
