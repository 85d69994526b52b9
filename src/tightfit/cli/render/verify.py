"""A verdict and a merge as text: one line for each model, then what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

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
from tightfit.core.units import render_bytes, render_seconds
from tightfit.export.merge import MergeResult
from tightfit.export.verify.verdict import Comparison, Level, Verdict

_STYLES = {Level.FAIL: "bold red", Level.WARNING: "yellow", Level.NOTE: ""}
_MISSING = "-"


def show_verdict(verdict: Verdict) -> None:
    show(render_verdict(verdict))


def show_merged(merged: MergeResult) -> None:
    show(_render_merged(merged))


def render_verdict(verdict: Verdict) -> Iterator[RenderableType]:
    """Also for other verbs that end with a check."""
    yield heading(f"Held against {verdict.reference} ({verdict.reference_format})")
    how = f"{verdict.num_tokens:,} tokens of {verdict.text}, in windows of {verdict.window}"
    if verdict.reference_perplexity is not None:
        how += f"; its perplexity there is {verdict.reference_perplexity:.3f}"
    yield plain(f"{how}; on {verdict.device}")
    yield ""
    yield make_table(_columns(), [_row(row) for row in verdict.rows])
    yield ""
    yield plain(
        "top-1: places with the same most likely token. worst: largest difference of a score. "
        "answers: greedy ones that are the same."
    )
    alike = [Path(row.name).name for row in verdict.rows if _speaks_alike(row)]
    if alike:
        reported = "all" if len(alike) == len(verdict.rows) else ", ".join(alike)
        yield plain(f"Same template, tokens, special tokens and ends: {reported}.")
    for row in verdict.rows:
        yield from _findings(row)
    yield ""
    yield Text(
        "All of them pass." if verdict.is_good else _count_failed(verdict),
        style="bold green" if verdict.is_good else "bold red",
    )


def _columns() -> list[Column]:
    right = ("size", "top-1", "mean KL", "worst", "perplexity", "answers")
    return [
        Column(title="model", style="bold"),
        Column(title="format"),
        *(Column(title=title, right=True) for title in right),
        Column(title="verdict"),
    ]


def _row(row: Comparison) -> list[Cell]:
    change = row.perplexity_change_fraction
    perplexity = _MISSING if row.perplexity is None else f"{row.perplexity:,.3f}"
    return [
        Path(row.name).name,
        row.format or _MISSING,
        render_bytes(row.size_bytes) if row.size_bytes else _MISSING,
        _MISSING if row.top1_fraction is None else f"{row.top1_fraction:.2%}",
        _MISSING if row.mean_kl is None else f"{row.mean_kl:.2g}",
        _MISSING if row.max_abs_logit_diff is None else f"{row.max_abs_logit_diff:.2g}",
        perplexity if change is None else f"{perplexity} {change:+.2%}",
        f"{row.num_same_answers} of {row.num_prompts}" if row.num_prompts else _MISSING,
        Text("pass", style="green") if row.is_good else Text("fail", style="bold red"),
    ]


def _speaks_alike(row: Comparison) -> bool:
    parts = (row.template_same, row.tokenizer_same, row.specials_same, row.stops_like_reference)
    return all(parts)


def _findings(row: Comparison) -> Iterator[RenderableType]:
    if not row.findings:
        return
    yield ""
    kind = f", judged as {row.kind.value}" if row.kind is not None else ""
    yield heading(f"{Path(row.name).name}{kind}")
    for finding in row.findings:
        yield Text(f" {finding.level.value}: {finding.text}", style=_STYLES[finding.level])
        if finding.remedy and finding.level is not Level.NOTE:
            yield plain(f"   try: {finding.remedy}")
        elif finding.remedy:
            yield plain(f"   {finding.remedy}")


def _count_failed(verdict: Verdict) -> str:
    failed = sum(not row.is_good for row in verdict.rows)
    return f"{failed} of {count_of(len(verdict.rows), 'model')} did not pass."


def _render_merged(merged: MergeResult) -> Iterator[RenderableType]:
    yield heading(f"{merged.adapter} merged into {merged.base}")
    stored = " and ".join(merged.dtypes)
    yield plain(
        f"{merged.num_changed} of {count_of(merged.num_tensors, 'tensor')} changed, stored in "
        f"{stored}: {render_bytes(merged.size_bytes)} in {render_seconds(merged.seconds)}"
    )
    yield plain(
        f"memory: {render_bytes(merged.predicted.host_bytes)} predicted, "
        f"{render_bytes(merged.peak_host_bytes)} measured"
    )
    yield from render_notes("Note", merged.notes)
    if merged.verdict is not None:
        yield ""
        yield from render_verdict(merged.verdict)
