"""A verdict as one HTML page that opens anywhere: table, plots, answers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import log10
from pathlib import Path

from tightfit.core.files import write_atomic
from tightfit.core.html_page import render_page
from tightfit.core.units import render_bytes
from tightfit.export.verify.verdict import AnswerComparison, Comparison, Verdict
from tightfit.runs.charts import pick_ticks
from tightfit.runs.report_html import PAGE_STYLE as TABLE_STYLE

GOOD, BAD, REFERENCE = "#4477aa", "#ee6677", "#228833"
WIDTH, BAR_HEIGHT, LABEL_WIDTH = 960, 26, 250
PLOT_HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 340, 64, 44, 20, 190
LEAST_KL = 1e-8
MOST_ANSWERS = 12
STYLE = TABLE_STYLE + (
    " .fail { color: var(--limit); font-weight: 600; } .pass { color: #228833; font-weight: 600; }"
    " ul.found { padding-left: 1.1rem; margin: .3rem 0; } ul.found small { color: var(--soft); }"
    " table.figures td, table.figures th { white-space: nowrap; overflow-wrap: normal; }"
    " td.said { white-space: pre-wrap; font: 13px/1.4 ui-monospace, monospace; }"
)


def write_verdict_html(verdict: Verdict, path: Path) -> None:
    write_atomic(path, render_verdict_html(verdict))


def render_verdict_html(verdict: Verdict) -> str:
    """Nothing is fetched; every text of a model or file is escaped."""
    state = "pass" if verdict.is_good else "fail"
    result = "all pass" if verdict.is_good else "not all pass"
    body = (
        f'<h1>Check against {escape(verdict.reference)} <span class="state {state}">{result}</span>'
        f"</h1>\n<p>{verdict.num_tokens:,} tokens of {escape(verdict.text)}, in windows of "
        f"{verdict.window}; {escape(verdict.dtype)} on {escape(verdict.device)}; "
        f"{escape(verdict.checked_at)}, tightfit {escape(verdict.tightfit)}</p>\n"
        + _table(verdict)
        + "".join(_found(row) for row in verdict.rows)
        + "".join(_plots(verdict))
        + "".join(_answers(row) for row in verdict.rows)
    )
    return render_page(f"Check of {len(verdict.rows)} models", body, style=STYLE)


def _table(verdict: Verdict) -> str:
    names = ("size", "same top-1", "mean KL", "worst score", "perplexity", "change")
    head = "".join(f'<th class="number">{name}</th>' for name in names)
    first = _cells(
        verdict.reference_format,
        "reference",
        [render_bytes(verdict.reference_size_bytes), "", "", ""],
    )
    perplexity = _number(verdict.reference_perplexity, ".3f")
    rows = (
        f"<tr><td>{escape(Path(verdict.reference).name)}</td>{first}"
        f'<td class="number">{perplexity}</td><td class="number"></td><td></td></tr>'
    )
    for row in verdict.rows:
        rows += f"<tr><td>{escape(Path(row.name).name)}</td>" + _figures(row)
    return (
        '<div class="scroll"><table class="figures"><tr><th>model</th><th>format</th>'
        f"<th>judged as</th>{head}<th>verdict</th></tr>{rows}</table></div>\n"
    )


def _figures(row: Comparison) -> str:
    state = "pass" if row.is_good else "fail"
    figures = [
        render_bytes(row.size_bytes),
        _number(row.top1_fraction, ".2%"),
        _number(row.mean_kl, ".2g"),
        _number(row.max_abs_logit_diff, ".2g"),
        _number(row.perplexity, ",.3f"),
        _number(row.perplexity_change_fraction, "+.2%"),
    ]
    kind = row.kind.value if row.kind else ""
    return _cells(row.format, kind, figures) + f'<td class="{state}">{state}</td></tr>'


def _cells(form: str, kind: str, figures: Sequence[str]) -> str:
    numbers = "".join(f'<td class="number">{figure}</td>' for figure in figures)
    return f"<td>{escape(form)}</td><td>{escape(kind)}</td>{numbers}"


def _found(row: Comparison) -> str:
    if not row.findings:
        return ""
    items = "".join(
        f'<li><span class="{finding.level.value}">{finding.level.value}</span>: '
        f"{escape(finding.text)}"
        + (f"<br><small>{escape(finding.remedy)}</small>" if finding.remedy else "")
        + "</li>"
        for finding in row.findings
    )
    return f'<h2>{escape(Path(row.name).name)}: found</h2>\n<ul class="found">{items}</ul>\n'


def _plots(verdict: Verdict) -> Iterator[str]:
    measured = [row for row in verdict.rows if row.top1_fraction is not None]
    if not measured:
        return
    yield "<h2>Same most likely token</h2>\n"
    yield _bars(
        [(r, 100 * (r.top1_fraction or 0), f"{r.top1_fraction:.2%}") for r in measured], most=100.0
    )
    yield "<h2>Distance from the reference</h2>\n<p>Mean KL divergence in nats per token; each step of the scale is ten times the last.</p>\n"  # noqa: E501
    floor = log10(LEAST_KL)
    shown = [(row, max(LEAST_KL, abs(row.mean_kl or LEAST_KL))) for row in measured]
    yield _bars(
        [(row, log10(kl) - floor, f"{row.mean_kl or 0:.2g}") for row, kl in shown],
        most=max(log10(kl) - floor for _, kl in shown) or 1.0,
    )
    if verdict.reference_perplexity is not None:
        yield "<h2>Size and perplexity</h2>\n<p>Lower and further left is better.</p>\n"
        yield _scatter(verdict, [row for row in measured if row.perplexity is not None])


def _bars(rows: Sequence[tuple[Comparison, float, str]], *, most: float) -> str:
    height = BAR_HEIGHT * len(rows) + 8
    room = WIDTH - LABEL_WIDTH - 90
    drawn = ""
    for number, (row, value, figure) in enumerate(rows):
        y = 4 + BAR_HEIGHT * number
        width = max(1.0, room * min(1.0, value / most))
        colour = GOOD if row.is_good else BAD
        label = escape(Path(row.name).name[-34:])
        drawn += (
            f'<text x="{LABEL_WIDTH - 8}" y="{y + 16}" text-anchor="end">{label}</text>'
            f'<rect x="{LABEL_WIDTH}" y="{y + 2}" width="{width:.1f}" height="{BAR_HEIGHT - 7}" '
            f'rx="2" fill="{colour}"/>'
            f'<text class="soft" x="{LABEL_WIDTH + width + 8:.1f}" y="{y + 16}">{figure}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{drawn}</svg>\n'


def _scatter(verdict: Verdict, rows: Sequence[Comparison]) -> str:
    assert verdict.reference_perplexity is not None
    points = [("reference", verdict.reference_size_bytes, verdict.reference_perplexity, REFERENCE)]
    points += [
        (Path(row.name).name, row.size_bytes, row.perplexity or 0.0, GOOD if row.is_good else BAD)
        for row in rows
    ]
    unit = 2.0**30 if max(p[1] for p in points) >= 2**30 else 2.0**20
    xs, ys = [p[1] / unit for p in points], [p[2] for p in points]
    low_y, high_y = min(ys), max(ys)
    pad = max(high_y - low_y, 0.02 * high_y) * 0.12
    low_y, high_y, high_x = low_y - pad, high_y + pad, max(xs) * 1.05 or 1.0

    def x_of(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / high_x

    def y_of(y: float) -> float:
        return TOP + (PLOT_HEIGHT - TOP - BOTTOM) * (high_y - y) / (high_y - low_y)

    drawn = ""
    for tick in pick_ticks(low_y, high_y):
        y = y_of(tick)
        drawn += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        drawn += (
            f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in pick_ticks(0.0, high_x):
        drawn += f'<text class="soft" x="{x_of(tick):.1f}" y="{PLOT_HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'  # noqa: E501
    name = "GiB" if unit > 2**20 else "MiB"
    drawn += f'<text class="soft" x="{WIDTH - RIGHT}" y="{PLOT_HEIGHT - 6}" text-anchor="end">size, {name}</text>'  # noqa: E501
    drawn += f'<text class="soft" x="2" y="{TOP - 6}">perplexity</text>'
    for (label, _, _, colour), x, y in zip(points, xs, ys, strict=True):
        drawn += (
            f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="6" fill="{colour}"/>'
            f'<text x="{x_of(x) + 10:.1f}" y="{y_of(y) + 4:.1f}">{escape(label[-24:])}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {PLOT_HEIGHT}" role="img">{drawn}</svg>\n'


def _answers(row: Comparison) -> str:
    if not row.answers:
        return ""
    lines = "".join(map(_answer, row.answers[:MOST_ANSWERS]))
    return (
        f"<details><summary>Answers of {escape(Path(row.name).name)}: {row.num_same_answers} of "
        f'{row.num_prompts} the same</summary><div class="scroll"><table><tr><th>prompt</th>'
        f"<th>reference</th><th>this one</th><th>differs at token</th></tr>{lines}</table></div>"
        "</details>\n"
    )


def _answer(answer: AnswerComparison) -> str:
    at = "" if answer.first_difference is None else str(answer.first_difference)
    return (
        f'<tr><td>{escape(answer.prompt[:200])}</td><td class="said">{escape(answer.reference)}'
        f'</td><td class="said">{escape(answer.other)}</td><td class="number">{at}</td></tr>'
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
