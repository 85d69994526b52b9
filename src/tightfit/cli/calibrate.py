"""`tightfit calibrate`: measure this machine and keep the rates for plans made on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer
from rich.console import RenderableType

from tightfit.api import calibrate as api
from tightfit.api.calibrate import BusyMachineError, CalibrateResult
from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import CalibrateFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json
from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.core.errors import UsageError
from tightfit.core.units import GB, TERA, render_bytes, render_seconds
from tightfit.hardware.calibration import Calibration
from tightfit.runtime.calibrate.compare import ComparedRate, Unit


def calibrate(flags: CalibrateFlags) -> None:
    """Measure and store, or show what was stored."""
    if flags.show and flags.seconds is not None:
        raise UsageError("--show measures nothing; --seconds would be ignored.", remedy="--show")
    if flags.show and flags.force:
        raise UsageError("--show stores nothing; --force would be ignored.", remedy="--show")
    if flags.show:
        _show_result(flags, api.stored_calibration(flags))
        return
    try:
        with progress_bar() as progress:
            found = api.calibrate(replace(flags, progress=progress))
    except BusyMachineError as error:
        described = {"error": error.problem, "remedy": error.remedy, "exit_code": error.exit_code}
        _show_result(flags, error.result, more=described)
        raise typer.Exit(report_error(error, as_json=False)) from None
    _show_result(flags, found)
    if found.path is not None:
        announce(found.path)


def _show_result(
    flags: CalibrateFlags, found: CalibrateResult, *, more: Mapping[str, Any] | None = None
) -> None:
    if not flags.as_json:
        show_calibration(found.calibration, found.compared)
        return
    show_json(
        {
            "path": None if found.path is None else str(found.path),
            "calibration": found.calibration.model_dump(mode="json"),
            "compared": [
                row.model_dump(mode="json") | {"ratio": row.ratio} for row in found.compared
            ],
            **(more or {}),
        }
    )


def show_calibration(found: Calibration, compared: Sequence[ComparedRate]) -> None:
    show(_render(found, compared))


def _render(found: Calibration, compared: Sequence[ComparedRate]) -> Iterator[RenderableType]:
    count = "" if found.num_gpus == 1 else f"{found.num_gpus} x "
    yield heading(f"{count}{found.gpu_name} on {found.host}")
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    driver = f", driver {found.driver_version}" if found.driver_version else ""
    yield plain(f"{found.device}{driver}; {versions}")
    yield plain(f"measured {found.date[:10]} in {render_seconds(found.seconds)}")
    yield ""
    columns = (
        Column(title="what", keep=False),
        Column(title="measured", right=True),
        Column(title="assumed", right=True),
        Column(title="ratio", right=True),
    )
    yield make_table(columns, [_row(row) for row in compared])
    yield ""
    yield plain("assumed: what estimates go by without a calibration; ratio: measured over that.")
    yield from render_notes("Beware", found.warnings)
    yield from render_notes("Not measured", found.skipped)


def _row(row: ComparedRate) -> tuple[str, ...]:
    return (
        row.name,
        _say(row.measured, row.unit),
        "-" if row.assumed is None else _say(row.assumed, row.unit),
        "-" if row.ratio is None else f"{row.ratio:.2f}",
    )


def _say(value: float, unit: Unit) -> str:
    if unit == "B":
        return render_bytes(value)
    if unit == "s":
        if value < 1e-3:
            return f"{value * 1e6:.3g} us"
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "FLOP/s" and value >= TERA:
        return f"{value / TERA:.3g} TFLOP/s"
    name = {"FLOP/s": "GFLOP/s", "B/s": "GB/s", "weights/s": "G weights/s"}[unit]
    return f"{value / GB:,.3g} {name}" if value < 1000 * GB else f"{value / GB:,.0f} {name}"
