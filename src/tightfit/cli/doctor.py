"""`tightfit doctor`: Check this machine; each problem with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from tightfit.api.catalogue import DoctorOptions
from tightfit.api.catalogue import doctor as api_doctor
from tightfit.api.options.common import Output
from tightfit.cli.terminal.screen import Cell, make_table, plain, show_output, styled
from tightfit.core.findings import Status
from tightfit.core.text import count_of
from tightfit.hardware.checkup import Checkup

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {
    Status.OK: "green",
    Status.INFO: "cyan",
    Status.WARNING: "bold yellow",
    Status.ERROR: "bold red",
}


def doctor(options: DoctorOptions, output: Output) -> None:
    """Run the checks and print them; the exit code is that of the worst finding."""
    checkup = api_doctor(options)
    show_output(checkup, render_checkup(checkup), as_json=output.as_json)
    if checkup.exit_code:
        raise typer.Exit(checkup.exit_code)


def render_checkup(checkup: Checkup) -> Iterator[RenderableType]:
    """Every finding with its remedy, and a summary."""
    rows: list[tuple[Cell, ...]] = []
    area = ""
    for finding in checkup.findings:
        detail = styled(finding.detail)
        if finding.remedy:
            detail.append(f"\ntry: {plain(finding.remedy)}", style="bold")
        status = styled(finding.status.value, _STYLES[finding.status])
        rows.append((status, finding.area if finding.area != area else "", finding.name, detail))
        area = finding.area
    yield make_table(("", "area", "~what", "~finding"), rows)
    yield ""
    errors, warnings = checkup.count(Status.ERROR), checkup.count(Status.WARNING)
    if errors or warnings:
        yield plain(f"{count_of(errors, 'error')}, {count_of(warnings, 'warning')}.")
    else:
        yield plain("Nothing is wrong.")
