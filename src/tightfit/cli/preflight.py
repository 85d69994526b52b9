"""`tightfit preflight`: Check the nodes of a job and the network between them in under a minute."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from tightfit.api.options.clusters import PreflightOptions
from tightfit.api.options.common import Output
from tightfit.cli.doctor import render_checkup
from tightfit.cli.terminal.output import show_json, write_err, write_out
from tightfit.cli.terminal.screen import heading, show
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_seconds

if TYPE_CHECKING:
    from tightfit.clusters.preflight.gather import PreflightReport


def preflight(options: PreflightOptions, output: Output) -> None:
    """Show what is wrong with the nodes; the exit code is that of the worst finding."""
    from tightfit.api.preflight import preflight as check_nodes

    report = check_nodes(replace(options, progress=_show_progress))
    if output.as_json:
        show_json(report)
    else:
        _show_report(report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _show_progress(text: str, _done: int, _total: int) -> None:
    write_err(f"preflight: {sanitize(text)}\n")


def _show_report(report: PreflightReport) -> None:
    """The findings, the verdict, and the options to go on with."""
    show(render_checkup(report))
    nodes = count_of(len(report.nodes), "node")
    write_out(f"{nodes} checked in {render_seconds(report.seconds)}.\n")
    if not all(node.options for node in report.nodes):
        return
    title = "Once that is put right" if report.exit_code else "Start the job with"
    show(["", heading(title)])
    for node in report.nodes:
        command = f"tightfit train RECIPE.YAML {shlex.join(node.options)}"
        # To be copied: a line that is broken would not run.
        write_out(f"  on {sanitize(node.name)}:  {sanitize(command)}\n")
