"""A calibration as text: what was measured beside what would have been assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.core.units import GB, TERA, render_bytes, render_seconds
from tightfit.hardware.calibration import Calibration
from tightfit.runtime.calibrate.compare import ComparedRate, Unit


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
