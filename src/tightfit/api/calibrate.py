"""`calibrate`: measure this machine and keep the rates for plans made on it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import CalibrateOptions
from tightfit.core.errors import NotFoundError, SetupError
from tightfit.core.options import list_given, repeat_options
from tightfit.core.packages import require_packages
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.local import probe_cpu, probe_here
from tightfit.hardware.types import Node
from tightfit.runs.store import prepare_calibrations_folder, read_calibration, write_calibration
from tightfit.runtime.calibrate.compare import ComparedRate, compare_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateResult:
    """Measured rates beside those that are assumed without them."""

    calibration: Calibration
    compared: tuple[ComparedRate, ...]
    path: Path | None
    """Where the calibration is kept."""


class BusyMachineError(SetupError):
    """Measured beside other work, so that nothing was kept; `result` has the figures."""

    def __init__(self, problem: str, *, remedy: str, result: CalibrateResult) -> None:
        super().__init__(problem, remedy=remedy)
        self.result = result


@accepts_keywords(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> CalibrateResult:
    """Measure and keep. Raises where other work disturbs, unless `force` is set."""
    node = _find_node(options)
    require_packages("Calibration", "torch")
    prepare_calibrations_folder()  # first: a missing folder must not cost 90 seconds of measuring
    if not options.force:
        _refuse_if_busy(options, node)
    from tightfit.runtime.calibrate.measure import DEFAULT_SECONDS, measure_machine

    seconds = options.seconds or DEFAULT_SECONDS
    found = measure_machine(node, budget_seconds=seconds, report=options.progress)
    if found.warnings and not options.force:
        # Times of a busy machine may change the order of plans: reported, and not kept.
        raise BusyMachineError(
            _describe_busy("kept", found.warnings[0]),
            remedy=_suggest_retry(options),
            result=_make_result(found, node, path=None),
        )
    return _make_result(found, node, path=write_calibration(found))


@accepts_keywords(CalibrateOptions)
def stored_calibration(options: CalibrateOptions) -> CalibrateResult:
    """The calibration of this machine that is kept. Raises where there is none."""
    node = _find_node(options)
    stored = read_calibration(node.gpu.name)
    if stored.calibration is None or stored.path is None:
        raise NotFoundError(
            stored.problem or f"{node.gpu.name} of this machine was not calibrated.",
            remedy=_name_command(options),
        )
    return _make_result(stored.calibration, node, path=stored.path)


def _make_result(found: Calibration, node: Node, *, path: Path | None) -> CalibrateResult:
    return CalibrateResult(calibration=found, compared=tuple(compare_rates(found, node)), path=path)


def _find_node(options: CalibrateOptions) -> Node:
    if options.device == "cpu":
        return probe_cpu().groups[0].node
    cluster = probe_here()
    if options.device == "cuda" and cluster.groups[0].node.gpu.is_cpu:
        raise SetupError(
            "No GPU was found on this machine.",
            remedy="tightfit calibrate --device cpu    (tightfit doctor says why)",
        )
    if len(cluster.groups) > 1:
        names = ", ".join(group.node.gpu.name for group in cluster.groups)
        raise SetupError(
            f"The GPUs of this machine differ ({names}), and one kind is measured at a time.",
            remedy="CUDA_VISIBLE_DEVICES=0 tightfit calibrate",
        )
    return cluster.groups[0].node


def _refuse_if_busy(options: CalibrateOptions, node: Node) -> None:
    """Before the first measurement: its result could not be kept."""
    from tightfit.runtime.calibrate.bench import Disturbance

    seen = Disturbance(is_cpu=node.gpu.is_cpu).seen_before
    if seen:
        raise SetupError(_describe_busy("measured", seen[0]), remedy=_suggest_retry(options))


def _describe_busy(verb: str, warning: str) -> str:
    return f"Not {verb}, since {warning.partition(':')[0]}."


def _suggest_retry(options: CalibrateOptions) -> str:
    command = _name_command(options)
    return f"{command}    (when nothing else runs; --force keeps it all the same)"


def _name_command(options: CalibrateOptions) -> str:
    """The command with its device: the default may be another one."""
    given = list_given(options, ("device", "seconds"))
    return shlex.join(["tightfit", "calibrate", *repeat_options(given)])
