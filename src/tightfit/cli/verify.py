"""`tightfit verify`: Compare models with the one they were made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tightfit.api.options.common import Output
from tightfit.api.verify import VerifyOptions
from tightfit.api.verify import verify as verify_models
from tightfit.cli.terminal.output import announce, progress_bar
from tightfit.cli.terminal.screen import Cell, heading, make_table, plain, show_output, styled
from tightfit.core.errors import CheckFailedError
from tightfit.core.findings import Status
from tightfit.core.text import count_of
from tightfit.core.units import render_bytes
from tightfit.export.verify.verdict import Comparison, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {Status.ERROR: "bold red", Status.WARNING: "yellow"}
_MISSING = "-"


def verify(options: VerifyOptions, output: Output) -> None:
    """Compare and show; the exit code is 8 where one does not pass."""
    with progress_bar() as report:
        verdict = verify_models(replace(options, progress=report))
    show_output(verdict, render_verdict(verdict), as_json=output.as_json)
    if options.html is not None:
        announce(Path(options.html).expanduser())
    if verdict.saved_to is not None:
        announce(Path(verdict.saved_to))
    if not verdict.is_good:
        raise typer.Exit(CheckFailedError.exit_code)


def render_verdict(verdict: Verdict) -> Iterator[RenderableType]:
    """Also for other verbs that end with a check."""
    yield heading(f"Compared with {verdict.reference} ({verdict.reference_format})")
    how = f"{verdict.num_tokens:,} tokens of {verdict.text}, in windows of {verdict.window}"
    if verdict.reference_perplexity is not None:
        how += f"; its perplexity there is {verdict.reference_perplexity:.3f}"
    yield plain(f"{how}; on {verdict.device}")
    yield ""
    numbers = (">size", ">top-1", ">mean KL", ">worst", ">perplexity", ">answers")
    columns = ("*model", "format", *numbers, "verdict")
    yield make_table(columns, [_row(row) for row in verdict.rows])
    yield ""
    yield plain(
        "top-1: places with the same most likely token. worst: largest difference of a score. "
        "answers: greedy ones that are the same."
    )
    alike = [
        Path(row.name).name
        for row in verdict.rows
        if row.template_same
        and row.tokenizer_same
        and row.specials_same
        and row.stops_like_reference
    ]
    if alike:
        reported = "all" if len(alike) == len(verdict.rows) else ", ".join(alike)
        yield plain(f"Same template, tokens, special tokens and ends: {reported}.")
    for row in verdict.rows:
        yield from _findings(row)
    yield ""
    failed = sum(not row.is_good for row in verdict.rows)
    if failed:
        models = count_of(len(verdict.rows), "model")
        yield styled(f"{failed} of {models} did not pass.", "bold red")
    else:
        yield styled("All of them pass.", "bold green")


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
        styled("pass", "green") if row.is_good else styled("fail", "bold red"),
    ]


def _findings(row: Comparison) -> Iterator[RenderableType]:
    if not row.findings:
        return
    yield ""
    kind = f", judged as {row.kind.value}" if row.kind is not None else ""
    yield heading(f"{Path(row.name).name}{kind}")
    for finding in row.findings:
        style = _STYLES.get(finding.status, "")
        yield styled(f" {finding.status.value}: {finding.detail}", style)
        if finding.remedy:
            prefix = "" if finding.status is Status.INFO else "try: "
            yield plain(f"   {prefix}{finding.remedy}")
