"""Verdict: the saved result of comparing artefacts with their reference, also as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.errors import CheckFailedError, SetupError
from tightfit.core.figures import (
    FIGURE_STYLE,
    make_figure,
    render_figure,
    render_page,
    style_axis,
    write_beside,
)
from tightfit.core.files import write_atomic
from tightfit.core.findings import Finding, Status
from tightfit.core.frozen import Frozen
from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.export.formats import StepKind
from tightfit.runs.report_html import PAGE_STYLE


def fail(area: str, detail: str, remedy: str = "make this one again from the reference") -> Finding:
    """A finding that makes an artefact unusable."""
    return Finding(area=area, status=Status.ERROR, detail=detail, remedy=remedy)


def find_difference(one: Sequence[object], two: Sequence[object]) -> int:
    """The first place at which the two differ; the shorter's end where one begins the other."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


class AnswerComparison(Frozen):
    """One prompt's greedy answers."""

    prompt: str
    reference: str
    other: str
    first_difference: int | None = None
    """Number of the first token that differs, from 0. None: they are the same."""
    reference_stopped: bool
    other_stopped: bool


class Comparison(Frozen):
    """One artefact compared with the reference. None: could not be measured."""

    name: str
    format: str = ""
    """Of the weights: `bf16`, `Q4_K_M`, ..."""
    engine: str = ""
    size_bytes: NonNegativeInt = 0
    """Of the weights on disk."""
    kind: StepKind | None = None
    num_positions: NonNegativeInt = 0
    """Positions of the text at which logits were compared."""
    top1_fraction: float | None = None
    """Share of positions with the same most likely token."""
    top1_low: float | None = None
    top1_high: float | None = None
    """99% interval of it."""
    mean_kl: float | None = None
    """KL(reference || artefact) in nats per token."""
    max_kl: float | None = None
    max_abs_logit_diff: float | None = None
    perplexity: float | None = None
    reference_perplexity: float | None = None
    perplexity_change_fraction: float | None = None
    """0.01: 1% worse than the reference."""
    perplexity_change_low: float | None = None
    perplexity_change_high: float | None = None
    """99% interval of it, paired by position."""
    num_same_answers: NonNegativeInt = 0
    num_prompts: NonNegativeInt = 0
    answers: tuple[AnswerComparison, ...] = ()
    template_same: bool | None = None
    tokenizer_same: bool | None = None
    specials_same: bool | None = None
    stops_like_reference: bool | None = None
    findings: tuple[Finding, ...] = ()
    seconds: NonNegativeFloat = 0.0

    @property
    def is_good(self) -> bool:
        return not any(finding.status is Status.ERROR for finding in self.findings)


class Verdict(Frozen):
    """The whole check."""

    schema_version: int = 2
    reference: str
    reference_format: str
    reference_size_bytes: NonNegativeInt
    reference_perplexity: float | None = None
    text: str
    """What the scores were taken on."""
    num_tokens: NonNegativeInt
    window: PositiveInt
    dtype: str
    """Arithmetic of unquantized artefacts."""
    device: str
    rows: tuple[Comparison, ...]
    is_good: bool
    checked_at: str
    """UTC, ISO 8601."""
    tightfit: str
    saved_to: str | None = None
    """RUN/checks/NAME.json, where the reference belongs to a run."""

    def raise_if_broken(self, *, remedy: str | None = None) -> None:
        """`CheckFailedError` for the first artefact that did not pass."""
        for row in self.rows:
            failures = [finding for finding in row.findings if finding.status is Status.ERROR]
            if failures:
                more = f" (and {len(failures) - 1} more findings)" if len(failures) > 1 else ""
                raise CheckFailedError(
                    f"{row.name} is not {Path(self.reference).name}: {failures[0].detail}{more}",
                    remedy=remedy
                    or failures[0].remedy
                    or f"tightfit verify {self.reference} {row.name} --html report.html",
                )


# A verdict as one HTML page that opens anywhere: table, plots, answers side by side.

GOOD, BAD, REFERENCE = "#4477aa", "#ee6677", "#228833"
MOST_ANSWERS = 12
STYLE = f"""{FIGURE_STYLE}{PAGE_STYLE}
.fail, .error {{ color: var(--limit); font-weight: 600; }}
.pass {{ color: #228833; font-weight: 600; }}
ul.found {{ padding-left: 1.1rem; margin: .3rem 0; }} ul.found small {{ color: var(--soft); }}
table.figures td, table.figures th {{ white-space: nowrap; overflow-wrap: normal; }}
td.answer {{ white-space: pre-wrap; font: 13px/1.4 ui-monospace, monospace; }}
"""


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
        + _scatter(verdict)
        + "".join(_answers(row) for row in verdict.rows)
    )
    return render_page(f"Check of {len(verdict.rows)} models", body, style=STYLE)


def _table(verdict: Verdict) -> str:
    names = ("size", "same top-1", "mean KL", "worst score", "perplexity", "change")
    head = "".join(f'<th class="number">{name}</th>' for name in names)
    size, perplexity = render_bytes(verdict.reference_size_bytes), verdict.reference_perplexity
    figures = [size, "", "", "", _number(perplexity, ".3f"), ""]
    rows = _row(verdict.reference, verdict.reference_format, "reference", figures)
    for row in verdict.rows:
        figures = [
            render_bytes(row.size_bytes),
            _number(row.top1_fraction, ".2%"),
            _number(row.mean_kl, ".2g"),
            _number(row.max_abs_logit_diff, ".2g"),
            _number(row.perplexity, ",.3f"),
            _number(row.perplexity_change_fraction, "+.2%"),
        ]
        kind = row.kind.value if row.kind else ""
        rows += _row(row.name, row.format, kind, figures, "pass" if row.is_good else "fail")
    return (
        '<div class="scroll"><table class="figures"><tr><th>model</th><th>format</th>'
        f"<th>judged as</th>{head}<th>verdict</th></tr>{rows}</table></div>\n"
    )


def _row(name: str, form: str, kind: str, figures: Sequence[str], state: str = "") -> str:
    words = "".join(f"<td>{escape(word)}</td>" for word in (Path(name).name, form, kind))
    numbers = "".join(f'<td class="number">{figure}</td>' for figure in figures)
    return f'<tr>{words}{numbers}<td class="{state}">{state}</td></tr>'


def _found(row: Comparison) -> str:
    if not row.findings:
        return ""
    items = "".join(
        f'<li><span class="{finding.status.value}">{finding.status.value}</span>: '
        f"{escape(finding.detail)}"
        + (f"<br><small>{escape(finding.remedy)}</small>" if finding.remedy else "")
        + "</li>"
        for finding in row.findings
    )
    return f'<h2>{escape(Path(row.name).name)}: found</h2>\n<ul class="found">{items}</ul>\n'


def _scatter(verdict: Verdict) -> str:
    """Size against perplexity."""
    rows = [row for row in verdict.rows if row.perplexity is not None]
    if verdict.reference_perplexity is None or not rows:
        return ""
    try:
        figure = make_figure(4)
    except SetupError as error:  # the table says the same
        return f"<p>{escape(error.problem)} {escape(error.remedy)}</p>\n"
    points = [("reference", verdict.reference_size_bytes, verdict.reference_perplexity, REFERENCE)]
    points += [
        (Path(row.name).name, row.size_bytes, row.perplexity or 0.0, GOOD if row.is_good else BAD)
        for row in rows
    ]
    unit, word = (GIB, "GiB") if max(point[1] for point in points) >= GIB else (MIB, "MiB")
    axis = figure.subplots()
    for name, size, perplexity, colour in points:
        axis.plot([size / unit], [perplexity], "o", color=colour)
        write_beside(axis, name[-24:], (size / unit, perplexity))
    axis.set_xlabel(f"size, {word}")
    axis.set_ylabel("perplexity")
    axis.margins(x=0.15, y=0.15)
    style_axis(axis, grid="both")
    return (
        "<h2>Size and perplexity</h2>\n<p>Lower and further left is better.</p>\n"
        f"{render_figure(figure, label='Size and perplexity')}"
    )


def _answers(row: Comparison) -> str:
    if not row.answers:
        return ""
    lines = ""
    for answer in row.answers[:MOST_ANSWERS]:
        at = "" if answer.first_difference is None else str(answer.first_difference)
        lines += (
            f'<tr><td>{escape(answer.prompt[:200])}</td><td class="answer">'
            f'{escape(answer.reference)}</td><td class="answer">{escape(answer.other)}</td>'
            f'<td class="number">{at}</td></tr>'
        )
    return (
        f"<details><summary>Answers of {escape(Path(row.name).name)}: {row.num_same_answers} of "
        f'{row.num_prompts} the same</summary><div class="scroll"><table><tr><th>prompt</th>'
        f"<th>reference</th><th>this one</th><th>differs at token</th></tr>{lines}</table></div>"
        "</details>\n"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
