"""`tightfit eval`: score a run or a model on data, before and after tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from tightfit.api.evaluate import evaluate
from tightfit.cli.flags.export import EvalFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json, supports_unicode
from tightfit.cli.terminal.screen import (
    Cell,
    Column,
    heading,
    make_table,
    plain,
    render_notes,
    show,
)
from tightfit.core.text import count_of
from tightfit.evaluation.scores import Interval, MetricScore, Scores

# Scores as text: before, after and the difference, with what they rest on.

MAX_ACROSS = 3
"""Models side by side; more of them stand below each other."""


def show_scores(scores: Scores) -> None:
    show(_render(scores))


def _render(scores: Scores) -> Iterator[RenderableType]:
    yield heading(f"{scores.model} on {scores.data}: {count_of(scores.num_rows, 'row')}")
    how = [scores.format, f"template {scores.template}", f"{scores.dtype} on {scores.device}"]
    if scores.max_new_tokens:
        how.append(f"greedy, at most {scores.max_new_tokens:,} tokens")
    yield plain(", ".join(how))
    yield ""
    yield _down(scores) if len(scores.columns) > MAX_ACROSS else _across(scores)
    yield ""
    yield plain("In brackets the 95% interval, by resampling rows.")
    yield from render_notes("Beware", scores.notes)


def _across(scores: Scores) -> RenderableType:
    """A column for each model."""
    has_difference = any(metric.difference is not None for metric in scores.metrics)
    columns = [Column(title="", style="bold")]
    columns += [Column(title=name, right=True) for name in scores.columns]
    columns += [Column(title="difference", right=True)] if has_difference else []
    return make_table(columns, [_row(metric, scores, has_difference) for metric in scores.metrics])


def _down(scores: Scores) -> RenderableType:
    """A line for each model, in the order they were made."""
    columns = [Column(title="", style="bold")]
    columns += [Column(title=metric.title, right=True) for metric in scores.metrics]
    lines: list[list[Cell]] = [
        [name, *(_told(metric.scores.get(name), metric) for metric in scores.metrics)]
        for name in scores.columns
    ]
    return make_table(columns, lines)


def _row(metric: MetricScore, scores: Scores, has_difference: bool) -> list[Cell]:
    row: list[Cell] = [metric.title]
    row += [_told(metric.scores.get(name), metric) for name in scores.columns]
    if has_difference:
        row.append(_difference(metric))
    return row


def _told(interval: Interval | None, metric: MetricScore) -> str:
    if interval is None:
        return ""
    to = "–" if supports_unicode() else " to "
    low, high = _number(interval.low, metric), _number(interval.high, metric)
    return f"{_number(interval.value, metric)} [{low.removesuffix('%')}{to}{high}]"


def _difference(metric: MetricScore) -> Cell:
    change = metric.difference
    if change is None:
        return ""
    low, high = (_number(end, metric, is_signed=True) for end in (change.low, change.high))
    text = f"{_number(change.value, metric, is_signed=True)} [{low} to {high}]"
    is_certain = change.low > 0 or change.high < 0
    is_better = (change.value < 0) == metric.is_lower_better
    style = ("bold green" if is_better else "bold red") if is_certain else ""
    return Text(text.replace("%", ""), style=style)


def _number(value: float, metric: MetricScore, *, is_signed: bool = False) -> str:
    sign = "+" if is_signed else ""
    if metric.is_percent:
        return f"{100 * value:{sign}.1f}%"
    return f"{value:{sign}.3f}" if abs(value) < 1000 else f"{value:{sign}.2g}"


def eval(flags: EvalFlags) -> None:
    """Score, save and show."""
    with progress_bar() as report:
        scores = evaluate(replace(flags, progress=report))
    if flags.as_json:
        show_json(scores.model_dump(mode="json"))
    else:
        show_scores(scores)
    if scores.answers_path is not None:
        announce(Path(scores.answers_path))
