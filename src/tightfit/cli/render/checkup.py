"""A checkup as text: every finding with its remedy, and a summary."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.terminal.screen import Cell, Column, make_table, plain, show
from tightfit.core.text import count_of, sanitize
from tightfit.hardware.checkup import Checkup, Finding, Status

_STYLES = {
    Status.OK: "green",
    Status.INFO: "cyan",
    Status.WARNING: "bold yellow",
    Status.FAULT: "bold red",
}


def show_checkup(checkup: Checkup) -> None:
    show(_render(checkup))


def _render(checkup: Checkup) -> Iterator[RenderableType]:
    columns = (
        Column(title=""),
        Column(title="area"),
        Column(title="what", keep=False),
        Column(title="finding", keep=False),
    )
    yield make_table(columns, _rows(checkup))
    yield ""
    errors, warnings = checkup.count(Status.FAULT), checkup.count(Status.WARNING)
    if not errors and not warnings:
        yield plain("Nothing is wrong.")
    else:
        yield plain(f"{count_of(errors, 'fault')}, {count_of(warnings, 'warning')}.")


def _rows(checkup: Checkup) -> Iterator[tuple[Cell, ...]]:
    area = ""
    for finding in checkup.findings:
        status = Text(finding.status.value, style=_STYLES[finding.status])
        yield (status, finding.area if finding.area != area else "", finding.name, _told(finding))
        area = finding.area


def _told(finding: Finding) -> Text:
    reported = Text(sanitize(finding.detail))
    if finding.remedy:
        reported.append(f"\ntry: {sanitize(finding.remedy)}", style="bold")
    return reported
