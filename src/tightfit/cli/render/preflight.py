"""A preflight as text: the findings, the verdict, and the options to go on with."""

from __future__ import annotations

import shlex

from tightfit.cli.describe import count_of
from tightfit.cli.render.doctor import show_checkup
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.notes import heading
from tightfit.cli.terminal.output import write_out
from tightfit.cli.terminal.screen import show
from tightfit.core.units import render_seconds
from tightfit.launch.preflight.report import PreflightReport


def show_preflight(report: PreflightReport) -> None:
    show_checkup(report)
    nodes = count_of(len(report.nodes), "node")
    write_out(f"{nodes} looked at in {render_seconds(report.seconds)}.\n")
    if not all(node.options for node in report.nodes):
        return
    title = "Once that is put right" if report.exit_code else "Start the job with"
    show(["", heading(title)])
    for node in report.nodes:
        command = f"tightfit train RECIPE.YAML {shlex.join(node.options)}"
        # To be copied: a line that is broken would not run.
        write_out(f"  on {harmless(node.name)}:  {harmless(command)}\n")
