"""`tightfit calibrate`: Measure this machine in under 2 minutes; plans made on it then use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import typer
from rich.console import RenderableType

from tightfit.api import calibrate as api
from tightfit.api.calibrate import BusyMachineError, CalibrateResult
from tightfit.api.options.training import CalibrateOptions, CalibrateOutput
from tightfit.cli.terminal.error_report import describe_error, report_error
from tightfit.cli.terminal.output import announce, progress_bar, show_json
from tightfit.cli.terminal.screen import heading, make_table, plain, render_notes, show
from tightfit.core.errors import UsageError
from tightfit.core.units import GB, TERA, render_bytes, render_seconds
from tightfit.hardware.calibration import Calibration
from tightfit.runtime.calibrate.compare import ComparedRate, Unit


def calibrate(options: CalibrateOptions, output: CalibrateOutput) -> None:
    """Measure and store, or show what was stored."""
    if output.show and options.seconds is not None:
        raise UsageError("--show measures nothing; --seconds would be ignored.", remedy="--show")
    if output.show and options.force:
        raise UsageError("--show stores nothing; --force would be ignored.", remedy="--show")
    if output.show:
        _show_result(api.stored_calibration(options), as_json=output.as_json)
        return
    try:
        with progress_bar() as progress:
            found = api.calibrate(replace(options, progress=progress))
    except BusyMachineError as error:
        _show_result(error.result, as_json=output.as_json, **describe_error(error))
        raise typer.Exit(report_error(error, as_json=False)) from None
    _show_result(found, as_json=output.as_json)
    if found.path is not None:
        announce(found.path)


def _show_result(found: CalibrateResult, *, as_json: bool, **more: Any) -> None:
    if not as_json:
        show(_render(found.calibration, found.compared))
        return
    rows = [row.model_dump(mode="json") | {"ratio": row.ratio} for row in found.compared]
    show_json(
        {
            "path": None if found.path is None else str(found.path),
            "calibration": found.calibration.model_dump(mode="json"),
            "compared": rows,
            **more,
        }
    )


def _render(found: Calibration, compared: Sequence[ComparedRate]) -> Iterator[RenderableType]:
    count = "" if found.num_gpus == 1 else f"{found.num_gpus} x "
    yield heading(f"{count}{found.gpu_name} on {found.host}")
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    driver = f", driver {found.driver_version}" if found.driver_version else ""
    yield plain(f"{found.device}{driver}; {versions}")
    yield plain(f"measured {found.date[:10]} in {render_seconds(found.seconds)}")
    yield ""
    rows = [
        (
            row.name,
            _render_rate(row.measured, row.unit),
            "-" if row.assumed is None else _render_rate(row.assumed, row.unit),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
        )
        for row in compared
    ]
    yield make_table(("~what", ">measured", ">assumed", ">ratio"), rows)
    yield ""
    yield plain("assumed: what estimates go by without a calibration; ratio: measured over that.")
    yield from render_notes("Beware", found.warnings)
    yield from render_notes("Not measured", found.skipped)


def _render_rate(value: float, unit: Unit) -> str:
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
