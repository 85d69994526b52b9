"""Rates measured on this machine, as JSON files beside the store:
calibrations of its devices, and how fast models answered here.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from pydantic import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from tightfit.core.errors import SetupError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.frozen import FiniteFrozen
from tightfit.hardware.calibration import FORMAT, Calibration
from tightfit.hardware.environment import read_version
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.runs.store import ledger_path

CALIBRATIONS_FOLDER = "calibrations"
MAX_CALIBRATION_BYTES = 4 * 1024**2
"""A whole calibration is below 50 KB."""
MEASURE_AGAIN = "tightfit calibrate measures again"
_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCalibration:
    """What was found on disk for one device of this host."""

    calibration: Calibration | None = None
    path: Path | None = None
    """Where it is or would be; None where the user has no home."""
    fault: str | None = None
    """A sentence, where the file cannot be used or is out of date."""


def calibration_path(gpu_name: str, host: str | None = None) -> Path | None:
    """`TIGHTFIT_LEDGER`'s folder or the user's data folder; None where the user has no home."""
    ledger = ledger_path()
    if ledger is None:
        return None
    return ledger.parent / CALIBRATIONS_FOLDER / _name_file(gpu_name, host)


def prepare_calibrations_folder() -> Path:
    """The folder that calibrations are kept in, made and writable, or an error with a remedy."""
    ledger = ledger_path()
    remedy = "export TIGHTFIT_LEDGER=/some/folder/ledger.sqlite    (a folder that is writable)"
    if ledger is None:
        raise SetupError("There is no home folder to keep the calibration in.", remedy=remedy)
    folder = ledger.parent / CALIBRATIONS_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"Cannot make the folder {str(folder)!r}: {error.strerror or error}.", remedy=remedy
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SetupError(f"Cannot write into {str(folder)!r}.", remedy=remedy)
    return folder


def write_calibration(found: Calibration) -> Path:
    """In place of what was measured before, whole or not at all."""
    path = prepare_calibrations_folder() / _name_file(found.gpu_name, found.host)
    write_atomic(path, found.model_dump_json(indent=1) + "\n")
    return path


def read_calibration(gpu_name: str, host: str | None = None) -> StoredCalibration:
    """What was stored for this device on this host; never an error."""
    path = calibration_path(gpu_name, host)
    if path is None or not path.exists():
        return StoredCalibration(path=path)
    try:
        if path.stat().st_size > MAX_CALIBRATION_BYTES:
            raise ValueError("it is too large")
        found = Calibration.model_validate_json(path.read_bytes())
    except ValidationError as error:
        return StoredCalibration(
            path=path, fault=_explain_unused(path, _describe_validation_error(error))
        )
    except (OSError, ValueError) as error:
        return StoredCalibration(path=path, fault=_explain_unused(path, str(error)))
    if (found.gpu_name, found.host) != (gpu_name, host or socket.gethostname()):
        other = f"it was measured on {found.gpu_name} of {found.host}"
        return StoredCalibration(path=path, fault=_explain_unused(path, other))
    now = read_version("torch")
    measured_with = found.versions.get("torch")
    if now is not None and measured_with is not None and now != measured_with:
        old = f"Rates were measured with torch {measured_with}, now it is {now}: {MEASURE_AGAIN}."
        return StoredCalibration(calibration=found, path=path, fault=old)
    return StoredCalibration(calibration=found, path=path)


def apply_calibrations(cluster: Cluster) -> Cluster:
    """This machine with its measured rates, where it was calibrated; any other as it is."""
    if cluster.source != "here":
        return cluster
    groups: list[NodeGroup] = []
    warnings = list(cluster.warnings)
    for group in cluster.groups:
        stored = read_calibration(group.node.gpu.name)
        if stored.fault is not None:
            warnings.append(stored.fault)
        if stored.calibration is None:
            groups.append(group)
            continue
        if stored.calibration.warnings:
            warnings.append(_explain_not_idle(stored.calibration))
        gpu = stored.calibration.apply(group.node.gpu)
        node = group.node.model_copy(update={"gpu": gpu})
        groups.append(group.model_copy(update={"node": node}))
    return cluster.model_copy(
        update={"groups": tuple(groups), "warnings": tuple(dict.fromkeys(warnings))}
    )


def _name_file(gpu_name: str, host: str | None) -> str:
    return f"{_safe(host or socket.gethostname())}--{_safe(gpu_name)}.json"


def _explain_not_idle(found: Calibration) -> str:
    return (
        f"Rates were measured while the machine was not idle ({found.date[:10]}), so times and the "
        f"order of plans may be wrong: {MEASURE_AGAIN}."
    )


def _explain_unused(path: Path, why: str) -> str:
    return f"The calibration {path} is not used: {why}; {MEASURE_AGAIN}."


def _describe_validation_error(fault: ValidationError) -> str:
    first = fault.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if place == "format":
        return f"it is not of format {FORMAT}"
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def _safe(name: str) -> str:
    return _UNSAFE.sub("-", name).strip("-.")[:100] or "unnamed"


# How fast models answered here before: one JSON file per model, in a folder beside the ledger.

ANSWERS_FOLDER = "answers"
MOST_KEPT = 64
MAX_ANSWERS_BYTES = 1024**2
_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9.]+")


class AnswerRate(FiniteFrozen):
    """One run, beside what was predicted for it: their ratio carries over to other prompts."""

    date: str
    """UTC, ISO 8601."""
    place: str
    """`local:HOST`, `slurm:PARTITION`: where the same may be expected again."""
    device: str
    """`CPU` or a card's name."""
    num_workers: PositiveInt
    new_tokens_per_second: PositiveFloat
    """Of all of them together."""
    predicted_new_tokens_per_second: PositiveFloat
    start_seconds: NonNegativeFloat | None = None
    """From the start of a worker's process until its model was loaded; None: not measured."""

    @property
    def fraction(self) -> float:
        """What the run reached of its prediction."""
        return self.new_tokens_per_second / self.predicted_new_tokens_per_second


_RATES = TypeAdapter(tuple[AnswerRate, ...])


def record_rate(work: str, rate: AnswerRate) -> None:
    """Keep one more of `work`, which names a model, its weights and its engine."""
    path = _path_of(work)
    if path is None:
        return
    kept = (*read_rates(work), rate)[-MOST_KEPT:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _RATES.dump_json(kept, indent=1) + b"\n")
    except (OSError, UserError):
        return


def read_rates(work: str) -> tuple[AnswerRate, ...]:
    """Oldest first; nothing where nothing was kept."""
    path = _path_of(work)
    try:
        if path is None or path.stat().st_size > MAX_ANSWERS_BYTES:
            return ()
        return _RATES.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return ()


def _path_of(work: str) -> Path | None:
    ledger = ledger_path()
    return (
        None
        if ledger is None
        else ledger.parent / ANSWERS_FOLDER / f"{_UNSAFE_IN_NAME.sub('-', work)}.json"
    )
