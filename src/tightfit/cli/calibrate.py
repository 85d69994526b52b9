"""`tightfit calibrate`: measure this machine and keep the rates for plans made on it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType

from tightfit.api.options.choices import read_word
from tightfit.api.options.training import CALIBRATION_DEVICES
from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import CalibrateFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json
from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.cli.training.command_line import list_given
from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.core.packages import require_packages
from tightfit.core.units import GB, TERA, render_bytes, render_seconds
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.local import probe_cpu, probe_here
from tightfit.hardware.types import Cluster, Node
from tightfit.runs.measured_rates import (
    prepare_calibrations_folder,
    read_calibration,
    write_calibration,
)
from tightfit.runtime.calibrate.compare import ComparedRate, Unit

# A calibration as text: what was measured beside what would have been assumed.


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


def calibrate(flags: CalibrateFlags) -> None:
    """Measure and store, or show what was stored."""
    device = (
        None
        if flags.device is None
        else read_word(flags.device, CALIBRATION_DEVICES, option="--device")
    )
    if flags.show and flags.seconds is not None:
        raise UsageError("--show measures nothing; --seconds would be ignored.", remedy="--show")
    if flags.show and flags.force:
        raise UsageError("--show stores nothing; --force would be ignored.", remedy="--show")
    cluster = _find_machine(device)
    node = cluster.groups[0].node
    if flags.show:
        found, path = _read_stored(node, flags)
        _show_result(flags, found, node, path=path)
        return
    require_packages("Calibration", "torch")
    prepare_calibrations_folder()  # 90 seconds are not to be lost for a folder
    if not flags.force:
        _refuse_if_busy(flags, node)
    found = _measure(node, flags.seconds)
    if found.warnings and not flags.force:
        _refuse(flags, found, node)
    path = write_calibration(found)
    _show_result(flags, found, node, path=path)
    announce(path)


def _refuse_if_busy(flags: CalibrateFlags, node: Node) -> None:
    """Before the first measurement: what it would find could not be kept."""
    from tightfit.runtime.calibrate.disturbance import Disturbance

    seen = Disturbance(is_cpu=node.gpu.is_cpu).seen_before
    if seen:
        raise _describe_error(flags, "measured", seen[0])


def _describe_error(flags: CalibrateFlags, verb: str, warning: str) -> SetupError:
    return SetupError(
        f"Not {verb}, since {warning.partition(':')[0]}.",
        remedy=f"{_name_command(flags)}    (when nothing else runs; --force keeps it all the same)",
    )


def _refuse(flags: CalibrateFlags, found: Calibration, node: Node) -> None:
    """Times of a busy machine may turn the order of plans around: shown, and not kept."""
    fault = _describe_error(flags, "kept", found.warnings[0])
    told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
    _show_result(flags, found, node, path=None, more=told)
    raise typer.Exit(report_error(fault, as_json=False))


def _find_machine(device: str | None) -> Cluster:
    if device == "cpu":
        return probe_cpu()
    cluster = probe_here()
    if device == "cuda" and cluster.groups[0].node.gpu.is_cpu:
        raise SetupError(
            "No GPU is to be seen on this machine.",
            remedy="tightfit calibrate --device cpu    (tightfit doctor says why)",
        )
    if len(cluster.groups) > 1:
        names = ", ".join(group.node.gpu.name for group in cluster.groups)
        raise SetupError(
            f"The GPUs of this machine differ ({names}), and one kind is measured at a time.",
            remedy="CUDA_VISIBLE_DEVICES=0 tightfit calibrate",
        )
    return cluster


def _name_command(flags: CalibrateFlags) -> str:
    """As it was asked for: the device is not always the one it would take by itself."""
    options = (("--device", flags.device), ("--seconds", flags.seconds))
    return shlex.join(["tightfit", "calibrate", *list_given(options)])


def _read_stored(node: Node, flags: CalibrateFlags) -> tuple[Calibration, Path]:
    stored = read_calibration(node.gpu.name)
    if stored.calibration is None or stored.path is None:
        raise NotFoundError(
            stored.fault or f"{node.gpu.name} of this machine was not calibrated.",
            remedy=_name_command(flags),
        )
    return stored.calibration, stored.path


def _measure(node: Node, seconds: float | None) -> Calibration:
    from tightfit.runtime.calibrate.measure import DEFAULT_SECONDS, measure_machine

    with progress_bar() as report:
        return measure_machine(node, budget_seconds=seconds or DEFAULT_SECONDS, report=report)


def _show_result(
    flags: CalibrateFlags,
    found: Calibration,
    node: Node,
    *,
    path: Path | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    from tightfit.runtime.calibrate.compare import compare_rates

    compared = compare_rates(found, node)
    if flags.as_json:
        show_json(
            {
                "path": None if path is None else str(path),
                "calibration": found.model_dump(mode="json"),
                "compared": [
                    row.model_dump(mode="json") | {"ratio": row.ratio} for row in compared
                ],
                **(more or {}),
            }
        )
        return

    show_calibration(found, compared)
