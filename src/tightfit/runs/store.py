"""The ledger of outcomes (SQLite, append-only), and rates measured here, as JSON beside it.

Where the ledger cannot be written, the caller gets a sentence to print, and the run goes on.
"""

from __future__ import annotations

import os
import re
import socket
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from pydantic import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from tightfit.core.errors import SetupError, UserError
from tightfit.core.files import locked_file, write_atomic
from tightfit.core.frozen import FiniteFrozen
from tightfit.core.packages import __version__
from tightfit.core.reading import read_bytes
from tightfit.core.strategy import Strategy
from tightfit.hardware.calibration import FORMAT, Calibration
from tightfit.hardware.machine import is_network_folder, read_version
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.planning.filter import KnownOutcome
from tightfit.planning.plan import Plan
from tightfit.runs.report import RunReport
from tightfit.runs.run_folder import RunStatus

BUSY_SECONDS = 10.0
"""How long to wait for another process that is writing its row."""

MIGRATIONS = (
    """
    CREATE TABLE outcomes (
        id INTEGER PRIMARY KEY,
        date TEXT NOT NULL,
        host TEXT NOT NULL,
        tightfit_version TEXT NOT NULL,
        model_name TEXT NOT NULL,
        gpu_name TEXT NOT NULL,
        is_cpu INTEGER NOT NULL,
        strategy TEXT NOT NULL,
        status TEXT NOT NULL,
        predicted_peak_bytes INTEGER NOT NULL,
        measured_peak_bytes INTEGER,
        predicted_seconds_per_step REAL NOT NULL,
        measured_seconds_per_step REAL
    );
    CREATE INDEX outcomes_of ON outcomes (model_name, gpu_name);
    CREATE TRIGGER outcomes_stay BEFORE UPDATE ON outcomes
        BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
    CREATE TRIGGER outcomes_are_kept BEFORE DELETE ON outcomes
        BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
    """,
)
"""Each takes the file one `user_version` further; an old one is never changed, only followed."""


class Outcome(FiniteFrozen):
    """What became of one plan: a run that ended, or an out-of-memory on the way."""

    date: str
    """UTC, ISO 8601."""
    host: str
    tightfit_version: str
    model_name: str
    gpu_name: str
    is_cpu: bool = False
    """Then its memory is the host's, and says nothing of other hosts."""
    strategy: Strategy
    status: RunStatus
    predicted_peak_bytes: int
    """Without the CUDA context, as the measured one is."""
    measured_peak_bytes: int | None = None
    """None: no step was finished."""
    predicted_seconds_per_step: float
    measured_seconds_per_step: float | None = None


_COLUMNS = tuple(Outcome.model_fields)


def make_outcome(plan: Plan, status: RunStatus, report: RunReport | None = None) -> Outcome:
    """From the plan that was in force; `report` where steps were measured under it."""
    gpu = plan.estimate.gpu
    is_cpu = plan.hardware.node.gpu.is_cpu
    measured = None
    if report is not None:
        reserved, allocated = report.peak_gpu_reserved_bytes, report.peak_gpu_allocated_bytes
        measured = allocated if is_cpu else reserved
    return Outcome(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        tightfit_version=__version__,
        model_name=plan.model.name,
        gpu_name=plan.hardware.node.gpu.name,
        is_cpu=is_cpu,
        strategy=plan.strategy,
        status=status,
        predicted_peak_bytes=gpu.peak_reserved_bytes - (0 if is_cpu else gpu.context_bytes),
        measured_peak_bytes=measured,
        predicted_seconds_per_step=plan.estimate.time.seconds_per_step,
        measured_seconds_per_step=None if report is None else report.seconds_per_step,
    )


def ledger_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """`TIGHTFIT_LEDGER`, else the user's data folder; None where the user has no home."""
    environ = os.environ if environ is None else environ
    try:
        if environ.get("TIGHTFIT_LEDGER"):
            return Path(environ["TIGHTFIT_LEDGER"]).expanduser()
        data = environ.get("XDG_DATA_HOME", "")
        if not Path(data).is_absolute():  # then to be ignored, says the XDG specification
            data = "~/.local/share"
        return Path(data).expanduser() / "tightfit" / "ledger.sqlite"
    except RuntimeError:
        return None


def record_outcome(outcome: Outcome, path: Path | None = None, *, once: bool = False) -> str | None:
    """Append one row; with `once` not where the very same is there already.

    None: done. Else a sentence for the user; never an error.
    """
    place = path or ledger_path()
    if place is None:
        return "The outcome was not kept in the ledger: there is no home folder (TIGHTFIT_LEDGER)."
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(place.with_name(place.name + ".lock"), wait_seconds=BUSY_SECONDS):
            try:
                _insert(place, outcome, once=once)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                aside = _move_aside(place)
                _insert(place, outcome, once=once)
                return f"The ledger was broken ({error}); it lies now in {aside}, a new one began."
    except (OSError, sqlite3.Error, _NewerLedgerError) as error:
        why = getattr(error, "strerror", None) or error
        return f"The outcome was not kept in the ledger {place}: {why}."
    return None


def read_outcomes(
    model: str | None = None, gpu: str | None = None, path: Path | None = None
) -> tuple[Outcome, ...]:
    """Oldest first. Nothing where there is no ledger, or none that can be read."""
    place = path or ledger_path()
    if place is None:
        return ()
    wanted = {"model_name": model, "gpu_name": gpu}
    given = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = ?" for name in given) or "1"
    query = f"SELECT {', '.join(_COLUMNS)} FROM outcomes WHERE {where} ORDER BY id"
    # A write-ahead log needs a writable folder even to be read; `immutable` reads without it.
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        try:
            with closing(_connect(f"{place.absolute().as_uri()}?{mode}")) as ledger:
                rows = ledger.execute(query, tuple(given.values())).fetchall()
        except (OSError, sqlite3.Error):
            continue
        return tuple(found for row in rows if (found := _as_outcome(row)) is not None)
    return ()


def known_outcomes(model: str | None = None, path: Path | None = None) -> tuple[KnownOutcome, ...]:
    """What the planner learns from: plans that ran through, and plans that were too big."""
    return tuple(
        KnownOutcome(
            model_name=row.model_name,
            gpu_name=row.gpu_name,
            strategy=row.strategy,
            status="finished" if row.status is RunStatus.FINISHED else "out-of-memory",
            peak_bytes=row.measured_peak_bytes,
            date=row.date,
        )
        for row in read_outcomes(model, path=path)
        if row.status in (RunStatus.FINISHED, RunStatus.OUT_OF_MEMORY)
        and (not row.is_cpu or row.host == socket.gethostname())
    )


class _NewerLedgerError(Exception):
    """Written by a tightfit that knows more than this one."""


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)


def _insert(place: Path, outcome: Outcome, *, once: bool) -> None:
    values = outcome.model_dump(mode="json") | {"strategy": outcome.strategy.model_dump_json()}
    marks = ", ".join("?" * len(_COLUMNS))
    with closing(_connect(f"{place.absolute().as_uri()}?mode=rwc")) as ledger:
        # The log's shared memory does not reach other hosts, which may share a network folder.
        mode = "DELETE" if is_network_folder(place.parent) else "WAL"
        ledger.execute(f"PRAGMA journal_mode={mode}")
        ledger.execute("BEGIN IMMEDIATE")
        _migrate(ledger)
        row = tuple(values[name] for name in _COLUMNS)
        # Sought by the connection that writes: closing it also clears away the log of a process
        # that was killed after it had added the row, which closing a reader does not.
        if not once or not _holds(ledger, row):
            ledger.execute(f"INSERT INTO outcomes ({', '.join(_COLUMNS)}) VALUES ({marks})", row)
        ledger.execute("COMMIT")


def _holds(ledger: sqlite3.Connection, row: tuple[object, ...]) -> bool:
    same = " AND ".join(f"{name} IS ?" for name in _COLUMNS)
    found = ledger.execute(f"SELECT EXISTS (SELECT * FROM outcomes WHERE {same})", row)
    return bool(found.fetchone()[0])


def _migrate(ledger: sqlite3.Connection) -> None:
    (version,) = ledger.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise _NewerLedgerError("a newer tightfit wrote it")
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        for statement in _statements(script):
            ledger.execute(statement)
        ledger.execute(f"PRAGMA user_version = {number}")


def _statements(script: str) -> Iterator[str]:
    """One at a time: `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _move_aside(place: Path) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    aside = place.with_name(f"{place.name}.broken-{stamp}-{os.getpid()}")
    place.replace(aside)
    for ending in ("-wal", "-shm"):
        leftover = place.with_name(place.name + ending)
        if leftover.exists():
            leftover.replace(aside.with_name(aside.name + ending))
    return aside


def _as_outcome(row: tuple[object, ...]) -> Outcome | None:
    """None: a strategy that this version does not know."""
    values = dict(zip(_COLUMNS, row, strict=True))
    try:
        strategy = Strategy.model_validate_json(str(values["strategy"]))
        return Outcome.model_validate(values | {"strategy": strategy})
    except ValidationError:
        return None


# Rates measured on this machine, as JSON files beside the store: calibrations of its devices,
# and how fast models answered here.

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
    problem: str | None = None
    """A sentence, where the file cannot be used or is out of date."""


def calibration_path(gpu_name: str, host: str | None = None) -> Path | None:
    """`TIGHTFIT_LEDGER`'s folder or the user's data folder; None where the user has no home."""
    ledger = ledger_path()
    name = f"{_safe(host or socket.gethostname())}--{_safe(gpu_name)}.json"
    return None if ledger is None else ledger.parent / CALIBRATIONS_FOLDER / name


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
    prepare_calibrations_folder()
    path = calibration_path(found.gpu_name, found.host)
    assert path is not None  # as the folder is there
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
        found = Calibration.model_validate_json(read_bytes(path))
        if (found.gpu_name, found.host) != (gpu_name, host or socket.gethostname()):
            raise ValueError(f"it was measured on {found.gpu_name} of {found.host}")
    except (OSError, ValueError) as error:
        why = _describe_validation(error) if isinstance(error, ValidationError) else str(error)
        problem = f"The calibration {path} is not used: {why}; {MEASURE_AGAIN}."
        return StoredCalibration(path=path, problem=problem)
    now, measured_with = read_version("torch"), found.versions.get("torch")
    old = None
    if now is not None and measured_with is not None and now != measured_with:
        old = f"Rates were measured with torch {measured_with}, now it is {now}: {MEASURE_AGAIN}."
    return StoredCalibration(calibration=found, path=path, problem=old)


def _describe_validation(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if place == "format":
        return f"it is not of format {FORMAT}"
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def apply_calibrations(cluster: Cluster) -> Cluster:
    """This machine with its measured rates, where it was calibrated; any other as it is."""
    if cluster.source != "here":
        return cluster
    groups: list[NodeGroup] = []
    warnings = list(cluster.warnings)
    for group in cluster.groups:
        stored = read_calibration(group.node.gpu.name)
        if stored.problem is not None:
            warnings.append(stored.problem)
        if stored.calibration is None:
            groups.append(group)
            continue
        if stored.calibration.warnings:
            warnings.append(
                "Rates were measured while the machine was not idle "
                f"({stored.calibration.date[:10]}), so times and the order of plans may be wrong: "
                f"{MEASURE_AGAIN}."
            )
        gpu = stored.calibration.apply(group.node.gpu)
        node = group.node.model_copy(update={"gpu": gpu})
        groups.append(group.model_copy(update={"node": node}))
    return cluster.model_copy(
        update={"groups": tuple(groups), "warnings": tuple(dict.fromkeys(warnings))}
    )


def _safe(name: str) -> str:
    return _UNSAFE.sub("-", name).strip("-.")[:100] or "unnamed"


# How fast models answered here before: one JSON file per model, in a folder beside the ledger.

ANSWERS_FOLDER = "answers"
MOST_KEPT = 64
MAX_ANSWERS_BYTES = 1024**2


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
        return _RATES.validate_json(read_bytes(path))
    except (OSError, ValidationError):
        return ()


def _path_of(work: str) -> Path | None:
    ledger = ledger_path()
    return (
        None
        if ledger is None
        else ledger.parent / ANSWERS_FOLDER / f"{_UNSAFE.sub('-', work)}.json"
    )
