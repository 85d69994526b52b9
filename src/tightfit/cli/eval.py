"""`tightfit eval`: Score a run or a model on a data file, before and after tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.evaluate import EvalOptions, evaluate, evaluate_suite
from tightfit.api.options.common import Output
from tightfit.cli.terminal.output import announce, progress_bar, supports_unicode
from tightfit.cli.terminal.screen import (
    Cell,
    Column,
    heading,
    make_table,
    plain,
    render_notes,
    show_output,
    styled,
)
from tightfit.core.findings import Interval
from tightfit.core.text import count_of
from tightfit.evaluation.scores import MetricScore, Scores

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tightfit.evaluation.suite import SuiteScores

MAX_ACROSS = 3
"""Models side by side; more of them stand below each other."""


def eval(options: EvalOptions, output: Output) -> None:
    """Score, save and show."""
    if options.suite:
        _eval_suite(options, output)
        return
    with progress_bar() as report:
        scores = evaluate(replace(options, progress=report))
    show_output(scores, _render(scores), as_json=output.as_json)
    if scores.answers_path is not None:
        announce(Path(scores.answers_path))


def _eval_suite(options: EvalOptions, output: Output) -> None:
    with progress_bar() as report:
        scores = evaluate_suite(replace(options, progress=report))
    show_output(scores, _render_suite(scores), as_json=output.as_json)
    if scores.path is not None:
        announce(Path(scores.path))


def _render(scores: Scores) -> Iterator[RenderableType]:
    yield heading(f"{scores.model} on {scores.data}: {count_of(scores.num_rows, 'row')}")
    how = [scores.format, f"template {scores.template}", f"{scores.dtype} on {scores.device}"]
    if scores.max_new_tokens:
        how.append(f"greedy, at most {scores.max_new_tokens:,} tokens")
    yield plain(", ".join(how))
    yield ""
    rows: list[list[Cell]]
    if len(scores.columns) > MAX_ACROSS:
        titles = [Column(metric.title, right=True) for metric in scores.metrics]
        rows = [
            [name, *(_score(metric.scores.get(name), metric) for metric in scores.metrics)]
            for name in scores.columns
        ]
    else:
        titles = [Column(name, right=True) for name in scores.columns]
        rows = [
            [metric.title, *(_score(metric.scores.get(name), metric) for name in scores.columns)]
            for metric in scores.metrics
        ]
        if any(metric.difference is not None for metric in scores.metrics):
            titles.append(Column("difference", right=True))
            rows = [
                [*row, _difference(metric)]
                for row, metric in zip(rows, scores.metrics, strict=True)
            ]
    yield make_table(["*", *titles], rows)
    yield ""
    yield plain(
        "In brackets the 95% interval: Wilson's and Newcombe's for shares of rows, else by "
        "resampling rows."
    )
    yield from render_notes("Beware", scores.notes)


def _render_suite(scores: SuiteScores) -> Iterator[RenderableType]:
    num_tasks = count_of(len(scores.tasks), "task")
    yield heading(f"{scores.model} on {num_tasks} of lm-eval {scores.lm_eval_version}")
    for column in scores.columns:
        yield plain(f"{column}: {scores.formats[column]}")
    yield ""
    rows: list[list[Cell]] = []
    for score in scores.metrics:
        for column, found in score.scores.items():
            change = score.differences.get(column)
            is_first = column == scores.columns[0]
            style = ""
            if change is not None and not change.low <= 0 <= change.high:
                is_better = (change.value < 0) == score.is_lower_better
                style = "bold green" if is_better else "bold red"
            rows.append(
                [
                    score.task if is_first else "",
                    score.title if is_first else "",
                    f"{score.num_rows:,}" if is_first else "",
                    column,
                    f"{found.value:.3f}" + ("" if found.error is None else f" ±{found.error:.3f}"),
                    ""
                    if change is None
                    else styled(
                        f"{change.value:+.3f} [{change.low:+.3f} to {change.high:+.3f}]", style
                    ),
                ]
            )
    titles: list[str | Column] = ["*", "score", Column("rows", right=True), "model"]
    titles += [Column("value", right=True), Column("to the base", right=True)]
    yield make_table(titles, rows)
    yield ""
    yield plain(
        "After ± the standard error; in brackets the 95% interval of the difference on the same "
        "rows."
    )
    if len(scores.columns) > 1 and any(score.differences for score in scores.metrics):
        for line in scores.changes or ("Nothing became significantly worse or better.",):
            yield plain(line)
    yield from render_notes("Beware", scores.notes)


def _score(interval: Interval | None, metric: MetricScore) -> str:
    if interval is None:
        return ""
    to = "–" if supports_unicode() else " to "
    low, high = _number(interval.low, metric), _number(interval.high, metric)
    return f"{_number(interval.value, metric)} [{low.removesuffix('%')}{to}{high}]"


def _difference(metric: MetricScore) -> Cell:
    change = metric.difference
    if change is None:
        return ""
    value, low, high = (
        _number(number, metric, sign="+") for number in (change.value, change.low, change.high)
    )
    is_certain = change.low > 0 or change.high < 0
    is_better = (change.value < 0) == metric.is_lower_better
    style = ("bold green" if is_better else "bold red") if is_certain else ""
    return styled(f"{value} [{low} to {high}]".replace("%", ""), style)


def _number(value: float, metric: MetricScore, *, sign: str = "") -> str:
    if metric.is_percent:
        return f"{100 * value:{sign}.1f}%"
    return f"{value:{sign}.3f}" if abs(value) < 1000 else f"{value:{sign}.2g}"
