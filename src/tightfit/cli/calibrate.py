"""`tightfit calibrate`: measure this machine, and keep what was found for plans made on it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from tightfit.cli.choices import read_word
from tightfit.cli.faults import report_fault
from tightfit.cli.flags.calibrate import DEVICES, CalibrateFlags
from tightfit.cli.repeat import list_given
from tightfit.cli.require import require_packages
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce
from tightfit.cli.terminal.progress_bar import progress_bar
from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UsageError
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.cpu import probe_cpu
from tightfit.hardware.local import probe_here
from tightfit.hardware.types import Cluster, Node
from tightfit.ledger.calibrations import (
    prepare_folder,
    read_calibration,
    write_calibration,
)


def calibrate(flags: CalibrateFlags) -> None:
    """Measure and store, or show what was stored."""
    device = None if flags.device is None else read_word(flags.device, DEVICES, option="--device")
    if flags.show and flags.seconds is not None:
        raise UsageError("--show measures nothing; --seconds would be ignored.", remedy="--show")
    if flags.show and flags.force:
        raise UsageError("--show stores nothing; --force would be ignored.", remedy="--show")
    cluster = _find_machine(device)
    node = cluster.groups[0].node
    if flags.show:
        found, path = _read_stored(node, flags)
        _tell(flags, found, node, path=path)
        return
    require_packages("Calibration", "torch")
    prepare_folder()  # 90 seconds are not to be lost for a folder
    if not flags.force:
        _refuse_if_busy(flags, node)
    found = _measure(node, flags.seconds)
    if found.warnings and not flags.force:
        _refuse(flags, found, node)
    path = write_calibration(found)
    _tell(flags, found, node, path=path)
    announce(path)


def _refuse_if_busy(flags: CalibrateFlags, node: Node) -> None:
    """Before the first measurement: what it would find could not be kept."""
    from tightfit.runtime.calibrate.disturbance import Disturbance

    seen = Disturbance(is_cpu=node.gpu.is_cpu).seen_before
    if seen:
        raise _describe_fault(flags, "measured", seen[0])


def _describe_fault(flags: CalibrateFlags, verb: str, warning: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"Not {verb}, since {warning.partition(':')[0]}.",
        remedy=f"{_name_command(flags)}    (when nothing else runs; --force keeps it all the same)",
    )


def _refuse(flags: CalibrateFlags, found: Calibration, node: Node) -> None:
    """Times of a busy machine may turn the order of plans around: shown, and not kept."""
    fault = _describe_fault(flags, "kept", found.warnings[0])
    told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
    _tell(flags, found, node, path=None, more=told)
    raise typer.Exit(report_fault(fault, as_json=False))


def _find_machine(device: str | None) -> Cluster:
    if device == "cpu":
        return probe_cpu()
    cluster = probe_here()
    if device == "cuda" and cluster.groups[0].node.gpu.is_cpu:
        raise EnvironmentFaultError(
            "No GPU is to be seen on this machine.",
            remedy="tightfit calibrate --device cpu    (tightfit doctor says why)",
        )
    if len(cluster.groups) > 1:
        names = ", ".join(group.node.gpu.name for group in cluster.groups)
        raise EnvironmentFaultError(
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


def _tell(
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
    from tightfit.cli.render.calibrate import show_calibration

    show_calibration(found, compared)
