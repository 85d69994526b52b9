"""`tightfit quantize`: a model made smaller, and what that cost it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tightfit.cli import choices
from tightfit.cli.flags.quantize import FORMATS, TOOLS, QuantizeFlags
from tightfit.cli.require import require_packages
from tightfit.cli.terminal.harmless import shorten
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce, write_err
from tightfit.cli.terminal.progress_bar import Report, progress_bar
from tightfit.core.errors import (
    CheckFailedError,
    EnvironmentFaultError,
    UsageError,
    UserError,
)
from tightfit.core.units import render_bytes, render_seconds

if TYPE_CHECKING:
    from tightfit.export.quantize.forecast import Forecast
    from tightfit.export.quantize.quantize import Check
    from tightfit.export.quantize.summary import QuantizeSummary
    from tightfit.export.quantize.targets import Target
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.artefacts import Artefact


def quantize(flags: QuantizeFlags) -> None:
    """Make, check, show."""
    if not flags.to:
        raise UsageError(
            "No format to quantize to was named.",
            remedy=f"tightfit quantize {shorten(flags.model)} --to {'|'.join(FORMATS)}",
        )
    tool = TOOLS[0]
    if flags.gptq_tool is not None:
        tool = choices.read_word(flags.gptq_tool, TOOLS, option="--gptq-tool")
    require_packages("Quantizing", "torch", "transformers", "gguf", extra="quantize")
    from tightfit.export.quantize.make import MakeOptions
    from tightfit.export.quantize.quantize import QuantizeRequest, quantize_model
    from tightfit.export.quantize.targets import read_targets

    targets = read_targets(flags.to)
    with progress_bar() as report, _faults_told():
        summary = quantize_model(
            QuantizeRequest(
                model=flags.model,
                targets=targets,
                out=None if flags.out is None else Path(flags.out).expanduser(),
                options=MakeOptions(
                    calibrate=flags.calibrate,
                    num_rows=flags.rows,
                    iters=flags.iters,
                    tool=tool,
                    python=flags.python,
                    device=flags.device or "auto",
                    num_threads=flags.threads or os.cpu_count() or 1,
                    with_importance=flags.importance,
                ),
                check=_make_check(flags, report) if flags.verify else None,
                force=flags.force,
                announce=None if flags.as_json else _announce_forecasts,
                report=report,
            )
        )
    _show(summary, targets, as_json=flags.as_json)


@contextlib.contextmanager
def _faults_told() -> Iterator[None]:
    """A disk that is full or must not be written is the user's to mend, wherever it shows."""
    try:
        yield
    except OSError as fault:
        where = f" {fault.filename2 or fault.filename}" if fault.filename else ""
        raise EnvironmentFaultError(
            f"Cannot write{where}: {fault.strerror or fault}.",
            remedy="--out a folder that is writable and has free space; finished formats are kept",
        ) from fault


def _show(summary: QuantizeSummary, targets: Sequence[Target], *, as_json: bool) -> None:
    if as_json:
        show_json(summary.model_dump(mode="json"))
    else:
        from tightfit.cli.render.quantize import show_summary

        show_summary(summary)
    if summary.plot is not None:
        announce(Path(summary.plot))
    fault = _find_fault(summary, targets)
    if fault is not None and as_json:
        # The document on stdout has said it already: no second one, only the code.
        raise typer.Exit(fault.exit_code)
    if fault is not None:
        raise fault


def _find_fault(summary: QuantizeSummary, targets: Sequence[Target]) -> UserError | None:
    """What the command ends with: a broken result before one that could not be made."""
    from tightfit.export.quantize.summary import Standing
    from tightfit.export.verify.verdict import Level

    rows = [row for row in summary.rows if row.target in targets]
    for row in rows:
        if row.standing is Standing.REJECTED and row.check is not None:
            first = next(f for f in row.check.findings if f.level is Level.FAIL)
            return CheckFailedError(
                f"{row.target.value} is not good enough to be used: {first.text} It is kept as "
                f"{row.path}.",
                remedy=first.remedy or "choose a width with more bits, or calibrate on more data",
            )
    for row in rows:
        if row.standing is Standing.FAILED:
            return UserError(
                f"{row.target.value} could not be made: {row.problem}",
                remedy=row.remedy or "run the same command again; what is done stays done",
            )
    return None


def _make_check(flags: QuantizeFlags, report: Report | None) -> Check:
    from tightfit.export.verify.chain import DEFAULT_TOKENS, VerifyRequest, verify_chain

    def check(reference: Artefact, others: Sequence[Artefact]) -> Verdict:
        return verify_chain(
            VerifyRequest(
                reference=reference,
                others=tuple(others),
                text=flags.text,
                num_tokens=flags.tokens or DEFAULT_TOKENS,
                device=flags.device or "auto",
                threads=flags.threads,
                report=report,
            )
        )

    return check


def _announce_forecasts(forecasts: Mapping[Target, Forecast]) -> None:
    """What is to come, on stderr: stdout is for the table."""
    for target, forecast in forecasts.items():
        write_err(
            f"{target.value}: about {render_bytes(forecast.disk_bytes)} on disk, "
            f"{render_bytes(forecast.host_bytes)} of memory, "
            f"{render_seconds(forecast.seconds)} (rough)\n"
        )
