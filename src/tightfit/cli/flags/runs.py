"""What `tightfit runs` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.choices import empty_value
from tightfit.cli.flags.options import Json, path_option

EXAMPLES = """\b
Examples:
  tightfit runs                           every run in runs/, newest first
  tightfit runs /data/team/runs           those of another folder
  tightfit runs sql-lora                  one run: results, predicted beside measured
  tightfit runs sql-lora sql-qlora        what differs, and the results side by side
  tightfit runs sql-lora sql-qlora --plot loss.png
  tightfit runs sql-lora --html report.html
"""


def _refuse_empty_names(values: list[str] | None) -> list[str] | None:
    if any(not value.strip() for value in values or ()):
        raise empty_value("RUN", "runs/my-run")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFlags:
    """List, show, compare and plot runs.

    A run is a folder that `tightfit train` made. One is shown in full; several are compared.
    """

    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="Runs, by folder or by name in runs/, or folders with runs. [default: runs/]",
            callback=_refuse_empty_names,
            show_default=False,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        path_option(
            "--plot", "Draw loss, memory and predictions: .png or .html.", example="runs.png"
        ),
    ] = None
    html: Annotated[
        Path | None,
        path_option("--html", "Write the whole report as one HTML file.", example="report.html"),
    ] = None
    as_json: Json = False
