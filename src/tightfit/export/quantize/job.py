"""`quantize_model`: make the wanted formats of a model one after another and check each."""

from __future__ import annotations

import hashlib
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveInt,
    ValidationError,
)

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import (
    CheckFailedError,
    DoesNotFitError,
    InvalidInputError,
    SetupError,
    UsageError,
    UserError,
)
from tightfit.core.figures import make_figure, style_axis, write_figure
from tightfit.core.files import write_atomic
from tightfit.core.findings import Status
from tightfit.core.frozen import Frozen
from tightfit.core.packages import __version__, require_packages
from tightfit.core.progress import CountProgress, Progress
from tightfit.core.reading import read_bytes
from tightfit.core.text import printable
from tightfit.core.units import MIB, render_bytes
from tightfit.export.formats import GPTQ_TOOLS, LIMITS, CalibrationUse, ExportFormat, find_format
from tightfit.export.quantize.calibration import (
    CPU_ROWS,
    GPU_ROWS,
    ROW_TOKENS,
    Calibration,
    read_calibration,
)
from tightfit.export.verify.verdict import Comparison, Verdict
from tightfit.models.gguf import read_gguf_model
from tightfit.models.resolve import measure_weights
from tightfit.models.spec import ModelSpec
from tightfit.runtime.model_files import Artefact, ArtefactKind, find_artefact
from tightfit.runtime.output_folder import check_file_target, check_room, check_target, reject
from tightfit.runtime.resolve import resolve_model

# QuantizeSummary: what was made of a model, how large and how good; saved as quantize.json and
# a plot.

SUMMARY_FILE = "quantize.json"
PLOT_FILE = "quantize.png"


def _read_format(name: object) -> ExportFormat:
    try:
        return name if isinstance(name, ExportFormat) else find_format(str(name))
    except UsageError as error:
        raise ValueError(error.problem) from error


class QuantizeStatus(str, Enum):
    """What became of one format."""

    MADE = "made"
    """Written whole, not checked."""
    GOOD = "good"
    REPORTED = "reported"
    """Too few bits for a limit: the figures are what there is to say."""
    REJECTED = "rejected"
    """It failed the check and was renamed."""
    FAILED = "failed"
    """Could not be made; `problem` says why."""

    @property
    def is_done(self) -> bool:
        return self in (QuantizeStatus.MADE, QuantizeStatus.GOOD, QuantizeStatus.REPORTED)


SavedFormat = Annotated[
    ExportFormat,
    PlainValidator(_read_format),
    PlainSerializer(lambda saved: saved.name, return_type=str),
]
"""Saved by its name."""


class QuantizeForecast(Frozen):
    """What one format will take. Leaves out the check after it."""

    host_bytes: NonNegativeInt
    """Peak memory of the process that writes it."""
    disk_bytes: NonNegativeInt
    """Of the result."""
    seconds: NonNegativeFloat
    """Rough: it depends on the machine and on what else runs there."""


class QuantizedModel(Frozen):
    """One format."""

    target: SavedFormat
    key: str
    """Of the calibration and the settings: only with the same ones is it taken as done."""
    path: str
    standing: QuantizeStatus
    size_bytes: NonNegativeInt = 0
    """Of the weights' files."""
    bits_per_weight: NonNegativeFloat = 0.0
    of_original_fraction: NonNegativeFloat = 0.0
    seconds: NonNegativeFloat = 0.0
    peak_host_bytes: NonNegativeInt = 0
    """Of the process that did it."""
    predicted: QuantizeForecast | None = None
    importance: bool = False
    notes: tuple[str, ...] = ()
    problem: str | None = None
    remedy: str | None = None
    check: Comparison | None = None


class QuantizeSummary(Frozen):
    """The whole job."""

    schema_version: int = 2
    model: str
    key: str
    """Of the model's files: results of other weights do not stand beside these."""
    size_bytes: PositiveInt
    """Of the original's weights."""
    num_params: PositiveInt
    calibration: str | None = None
    num_calibration_tokens: NonNegativeInt = 0
    text: str | None = None
    """What quality was measured on."""
    reference_perplexity: float | None = None
    rows: tuple[QuantizedModel, ...] = ()
    notes: tuple[str, ...] = ()
    plot: str | None = None
    updated_at: str
    """UTC, ISO 8601."""
    tightfit: str

    @property
    def is_good(self) -> bool:
        return bool(self.rows) and all(row.standing.is_done for row in self.rows)

    def find(self, target: ExportFormat) -> QuantizedModel | None:
        return next((row for row in self.rows if row.target is target), None)

    def find_error(self, formats: Sequence[ExportFormat]) -> UserError | None:
        """What is wrong with these formats: a rejected result before one that was not made."""
        rows = [row for row in self.rows if row.target in formats]
        for row in rows:
            if row.standing is QuantizeStatus.REJECTED and row.check is not None:
                first = next(f for f in row.check.findings if f.status is Status.ERROR)
                return CheckFailedError(
                    f"{row.target.name} is not good enough to be used: {first.detail} It is kept "
                    f"as {row.path}.",
                    remedy=first.remedy
                    or "choose a width with more bits, or calibrate on more data",
                )
        for row in rows:
            if row.standing is QuantizeStatus.FAILED:
                return UserError(
                    f"{row.target.name} could not be made: {row.problem}",
                    remedy=row.remedy or "run the same command again; what is done stays done",
                )
        return None

    def with_row(self, row: QuantizedModel) -> QuantizeSummary:
        """The same with this format's row new, at the place it had."""
        rows = [old if old.target is not row.target else row for old in self.rows]
        if self.find(row.target) is None:
            rows.append(row)
        return self.model_copy(update={"rows": tuple(rows)})


def write_summary(path: Path, summary: QuantizeSummary) -> None:
    write_atomic(path, summary.model_dump_json(indent=2) + "\n")


def read_summary(path: Path) -> QuantizeSummary | None:
    """None where there is none yet."""
    try:
        return QuantizeSummary.model_validate_json(read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as a summary of quantized models.",
            remedy="--force to make everything anew, or --out another folder",
        ) from error


# Size against perplexity as a picture, one point for each quantized model.

_REJECTED_COLOUR = "#b3261e"
_LOG_AXIS_RATIO = 10.0
"""Perplexities this many times apart need a logarithmic axis."""


def write_plot(summary: QuantizeSummary, path: Path) -> bool:
    """A PNG; False where matplotlib is not installed."""
    try:
        figure = make_figure(6)
    except SetupError:
        return False
    axis: Any = figure.subplots()
    found = []
    for row in summary.rows:
        if row.check is None or row.check.perplexity is None:
            continue
        is_rejected = row.standing is QuantizeStatus.REJECTED
        colour = _REJECTED_COLOUR if is_rejected else row.target.colour
        place = (row.size_bytes / MIB, row.check.perplexity)
        label = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 8, "color": colour}
        axis.plot(*place, "X" if is_rejected else "o", color=colour, markersize=7)
        axis.annotate(row.target.name, place, **label)
        found.append(row.check.perplexity)
    if summary.reference_perplexity is not None:
        axis.axhline(summary.reference_perplexity, color="#777777", linewidth=1, linestyle="--")
        axis.annotate(
            f"original, {summary.size_bytes / MIB:,.0f} MiB",
            (0.99, summary.reference_perplexity),
            xycoords=("axes fraction", "data"),
            xytext=(0, -10),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#555555",
        )
    if found and max(found) > _LOG_AXIS_RATIO * min(found):
        axis.set_yscale("log")
    axis.set_xlabel("size of the weights in MiB")
    axis.set_ylabel("perplexity (lower is better)")
    axis.set_title(f"{Path(summary.model).name}, quantized", loc="left", fontweight="bold")
    axis.margins(x=0.12, y=0.12)
    style_axis(axis, grid="both")
    write_figure(figure, path, title=f"{Path(summary.model).name}, quantized")
    return True


MERGED = "merged"
QUANTIZED = "quantized"
PROCESS_BYTES = 620 * MIB
"""A process with torch, transformers and the quantizer loaded; measured on Linux, CPU build."""
CPU_FLOPS = 60e9
GPU_FLOPS = 40e12
"""What calibration reaches on a small share of a server CPU, and on a data-centre GPU."""
_PLAIN_ENDING = re.compile(r"[-._](f16|bf16|f32|fp16|fp32)$", re.IGNORECASE)
QuantizeCheck = Callable[[Artefact, Sequence[Artefact]], Verdict]
"""Compares the original with its quantized versions; the verdict has a row for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """A model, the formats to make from it, and how."""

    model: str
    formats: Sequence[ExportFormat]
    out: Path | None = None
    calibrate: Path | None = None
    num_rows: int | None = None
    iters: int | None = None
    """None: the format's own."""
    tool: str = GPTQ_TOOLS[0]
    python: str | None = None
    """Of an environment with the GPTQ tool. None: ours."""
    device: str = "auto"
    num_threads: int = 1
    with_importance: bool = True
    check: QuantizeCheck | None = None
    """None: results are not checked."""
    force: bool = False
    """Replace existing results."""
    announce: Callable[[Mapping[ExportFormat, QuantizeForecast]], None] | None = None
    """Called with the forecasts of what is left to make, before anything is written."""
    report: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeMeasurement:
    """What writing one format took."""

    seconds: float
    peak_host_bytes: int
    importance: bool = False
    notes: tuple[str, ...] = ()


class FormatWriter(ABC):
    """Writes the formats of one tool. One instance serves all formats of a job that name it."""

    @abstractmethod
    def __init__(self, job: QuantizeJob) -> None: ...

    @abstractmethod
    def forecast(self, wanted: ExportFormat) -> QuantizeForecast: ...

    @abstractmethod
    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        """Write the file or folder whole or not at all."""

    def refusal(self, wanted: ExportFormat) -> UserError | None:
        """Why this model cannot be made into the format; None where it can."""
        del wanted
        return None

    def scratch_bytes(self) -> int:
        """Disk that it takes beside the results, until `close`."""
        return 0

    def close(self) -> None:
        """Delete what was kept for later formats."""
        return


# The source, and where results go.


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSource:
    """An unquantized model: a Hugging Face folder or a GGUF file."""

    artefact: Artefact
    name: str
    """The results are named after it."""
    home: Path
    """Default folder of the results."""
    spec: ModelSpec

    @property
    def path(self) -> Path:
        return self.artefact.path

    @property
    def is_gguf(self) -> bool:
        return self.artefact.kind is ArtefactKind.GGUF

    @property
    def value_bytes(self) -> int:
        """Of one stored value."""
        return 4 if self.spec.stored_dtype is Dtype.FP32 else 2

    @property
    def stamp(self) -> str:
        """Changes with the model's files."""
        digest = hashlib.blake2b(digest_size=10)
        for path in [self.path] if self.is_gguf else sorted(self.path.iterdir()):
            stat = path.stat()
            digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPaths:
    """Where each result goes."""

    home: Path
    of: Mapping[ExportFormat, Path]
    summary: Path | None
    """None: for a single result next to the user's own files."""


def find_quantize_source(name: str, formats: Sequence[ExportFormat]) -> QuantizeSource:
    """The model that `name` means, if these formats can be made from it."""
    artefact = _use_merged(find_artefact(name))
    if artefact.kind.is_quantized_folder:
        raise InvalidInputError(
            f"{name} is quantized already ({artefact.kind.value}).",
            remedy="name the model it was made from",
        )
    is_gguf = artefact.kind is ArtefactKind.GGUF
    others = [wanted.name for wanted in formats if not wanted.reads_gguf]
    if is_gguf and others:
        raise UsageError(
            f"{', '.join(others)} cannot be made of a GGUF file.",
            remedy=f"name the model's folder, or make one: tightfit convert {name} --to hf",
        )
    spec = read_gguf_model(artefact.path) if is_gguf else resolve_model(str(artefact.path))
    if spec.is_encoder_decoder and not all(wanted.takes_encoder_decoder for wanted in formats):
        raise InvalidInputError(
            f"{name} is an encoder-decoder model, of which only nf4 and int8 are made here.",
            remedy="--to nf4 or --to int8",
        )
    named = Path(artefact.name).expanduser()
    if artefact.run is not None:
        model, home = artefact.run.path.resolve().name, artefact.run.path / QUANTIZED
    else:
        # Next to the model; for a cached hub id in the current folder.
        home = named.parent if named.exists() and named.resolve() != Path.cwd() else Path()
        model = named.resolve().name if named.is_dir() else name.rstrip("/").rsplit("/", 1)[-1]
        if is_gguf:
            model = _PLAIN_ENDING.sub("", artefact.path.stem)
    return QuantizeSource(artefact=artefact, name=model, home=home, spec=spec)


def _use_merged(artefact: Artefact) -> Artefact:
    """A LoRA run's merged model in its adapter's place."""
    if artefact.kind is not ArtefactKind.ADAPTER:
        return artefact
    merged = None if artefact.run is None else artefact.run.path / MERGED
    if merged is None or not (merged / "config.json").is_file():
        raise InvalidInputError(
            f"{printable(artefact.name, most=400)} is an adapter, and only a whole model can be "
            "quantized.",
            remedy=f"tightfit merge {artefact.name}",
        )
    return replace(
        artefact, kind=ArtefactKind.MODEL, path=merged, base=None, tokenizer=merged, strategy=None
    )


def choose_output_paths(
    source: QuantizeSource, formats: Sequence[ExportFormat], out: Path | None
) -> OutputPaths:
    """One format: `out` is the result, or a folder it goes to. Several: the folder for all."""
    names = {wanted: wanted.file_name(source.name) for wanted in formats}
    has_run = source.artefact.run is not None
    wanted = formats[0]
    if len(formats) > 1:
        usual = source.home if has_run else source.home / f"{source.name}-{QUANTIZED}"
        home = out or usual
        if home.is_file() or home.suffix.lower() == ".gguf":
            raise UsageError(
                f"--out {home} is one file for {len(formats)} formats.", remedy="--out FOLDER"
            )
        keeps_summary = True
    elif out is None or (out.is_dir() and not (out / "config.json").is_file()):
        home = source.home if out is None else out
        keeps_summary = has_run and out is None
    else:
        is_gguf_name = out.suffix.lower() == ".gguf"
        if is_gguf_name != wanted.is_file:
            kind = f"a file that ends in {wanted.suffix}" if wanted.is_file else "a folder"
            raise UsageError(
                f"--out {out}: {wanted.name} is {kind}.",
                remedy=f"--out {wanted.file_name('model')}",
            )
        return OutputPaths(home=out.parent, of={wanted: out}, summary=None)
    return OutputPaths(
        home=home,
        of={wanted: home / name for wanted, name in names.items()},
        summary=home / SUMMARY_FILE if keeps_summary else None,
    )


# The job: calibration and writers are made once and shared.


class QuantizeJob:
    """One source and how to quantize it."""

    def __init__(self, request: QuantizeRequest, source: QuantizeSource, folder: Path) -> None:
        self.request = request
        self.source = source
        self.folder = folder
        self._writers: dict[str, FormatWriter] = {}

    @cached_property
    def calibration(self) -> Calibration:
        return read_calibration(
            self.source.artefact,
            self.request.calibrate,
            num_rows=self._num_rows,
            max_positions=self.source.spec.max_positions or ROW_TOKENS,
        )

    @property
    def has_calibration(self) -> bool:
        """Whether a writer has asked for it."""
        return "calibration" in vars(self)

    @cached_property
    def has_gpu(self) -> bool:
        if self.request.device == "cpu":
            return False
        require_packages("Quantizing", "torch", extra="quantize")
        import torch

        return bool(torch.cuda.is_available())

    def calibrates(self, wanted: ExportFormat) -> bool:
        if wanted.calibration is CalibrationUse.OPTIONAL:
            return self.request.with_importance
        return wanted.calibration is CalibrationUse.ALWAYS

    def num_calibration_tokens(self, wanted: ExportFormat) -> int:
        """Before the text is read: as many as are asked for."""
        return self._num_rows * ROW_TOKENS if self.calibrates(wanted) else 0

    @property
    def _num_rows(self) -> int:
        return self.request.num_rows or (GPU_ROWS if self.has_gpu else CPU_ROWS)

    def forward_seconds(self, num_tokens: int) -> float:
        """One pass of calibration text through the model."""
        rate = GPU_FLOPS if self.has_gpu else CPU_FLOPS
        return 2 * self.source.spec.num_params * num_tokens / rate

    def stage(self, name: str) -> CountProgress | None:
        """The progress callback of one stage."""
        report = self.request.report
        return None if report is None else lambda done, of: report(name, done, of)

    def refusal(self, wanted: ExportFormat) -> UserError | None:
        return self._writer(wanted).refusal(wanted)

    def forecast(self, wanted: ExportFormat) -> QuantizeForecast:
        return self._writer(wanted).forecast(wanted)

    def scratch_bytes(self) -> int:
        return sum(writer.scratch_bytes() for writer in self._writers.values())

    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        """Write one format, whole or not at all."""
        needed, free = self.forecast(wanted).host_bytes, psutil.virtual_memory().available
        if needed > free:
            raise DoesNotFitError(
                f"{wanted.name} will take {render_bytes(needed)} of memory; {render_bytes(free)} "
                "are free.",
                remedy="--no-importance, which needs no model in memory; or a machine with more"
                if wanted.calibration is CalibrationUse.OPTIONAL
                else "free some memory, or use a machine with more",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._writer(wanted).write(wanted, path)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, wanted: ExportFormat) -> FormatWriter:
        if wanted.writer not in self._writers:
            module, _, name = wanted.writer.partition(":")
            make: type[FormatWriter] = getattr(importlib.import_module(module), name)
            self._writers[wanted.writer] = make(self)
        return self._writers[wanted.writer]


# Making and checking.


def quantize_model(request: QuantizeRequest) -> QuantizeSummary:
    """Make and check every format.

    With several formats, one that cannot be made does not stop the others, and what an
    interrupted call has finished is not made again.
    """
    source = find_quantize_source(request.model, request.formats)
    paths = choose_output_paths(source, request.formats, request.out)
    summary = _open_summary(request, source, paths)
    key = _settings_key(request)
    job = QuantizeJob(request, source, paths.home)
    possible, notes = _leave_out_refused(job)
    summary = summary.model_copy(update={"notes": notes})
    left = []
    for target in possible:
        row, path = summary.find(target), paths.of[target]
        is_done = row is not None and row.key == key and row.standing.is_done and path.exists()
        if is_done and not request.force:
            continue
        left.append(target)
        if not target.is_file:
            check_target(path, force=request.force, sources=(source.path,))
        elif path.resolve() == source.path.resolve():
            raise UsageError(f"{path} cannot be the result.", remedy="--out another name")
        else:
            check_file_target(path, force=request.force)
    forecasts = {target: job.forecast(target) for target in left}
    if forecasts:
        needed = sum(forecast.disk_bytes for forecast in forecasts.values())
        check_room(paths.home, needed + job.scratch_bytes())
    if request.announce is not None:
        request.announce(forecasts)
    try:
        for target in left:
            row = _make(job, target, paths.of[target])
            row = row.model_copy(update={"key": key, "predicted": forecasts[target]})
            summary = _save_summary(paths, summary.with_row(row))
    finally:
        job.close()
    if job.has_calibration:
        used = job.calibration
        update = {"calibration": used.source, "num_calibration_tokens": used.num_tokens}
        summary = summary.model_copy(update=update)
    if request.check is not None:
        summary = _check(request.check, source, summary)
    scored = [row for row in summary.rows if row.check and row.check.perplexity is not None]
    plot = paths.home / PLOT_FILE
    if paths.summary is not None and len(scored) > 1 and write_plot(summary, plot):
        summary = summary.model_copy(update={"plot": str(plot)})
    return _save_summary(paths, summary)


def _leave_out_refused(job: QuantizeJob) -> tuple[list[ExportFormat], tuple[str, ...]]:
    """The formats that this model can be made into, and why not the others; raises without any."""
    refused = {target: job.refusal(target) for target in job.request.formats}
    errors = [error for error in refused.values() if error is not None]
    if errors and len(errors) == len(refused):
        raise errors[0]
    possible = [target for target, error in refused.items() if error is None]
    return possible, tuple(f"Left out: {error.problem}" for error in errors)


def _open_summary(
    request: QuantizeRequest, source: QuantizeSource, paths: OutputPaths
) -> QuantizeSummary:
    """The summary of earlier calls on the same weights, or a new one."""
    key, found = source.stamp, None
    if paths.summary is not None:
        try:
            found = read_summary(paths.summary)
        except InvalidInputError:
            if not request.force:
                raise
    if found is not None and found.key == key:
        return found
    if found is not None and len(request.formats) > 1 and not request.force:
        raise UsageError(
            f"{paths.home} holds results of other weights.",
            remedy="--force to replace them, or --out another folder",
        )
    return QuantizeSummary(
        model=str(source.path),
        key=key,
        size_bytes=source.artefact.size_bytes,
        num_params=source.spec.num_params,
        updated_at=_now(),
        tightfit=__version__,
    )


def _settings_key(request: QuantizeRequest) -> str:
    """A digest of the settings; a result with the same one need not be made again."""
    parts = [str(request.num_rows), str(request.iters), request.tool, str(request.with_importance)]
    if request.calibrate is not None:
        try:
            stat = request.calibrate.stat()
        except OSError as error:
            raise InvalidInputError(
                f"Cannot read {request.calibrate}: {error.strerror or error}.",
                remedy="--calibrate a file with rows as `train` reads them, or plain text",
            ) from error
        parts.append(f"{request.calibrate.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.blake2b("\x1e".join(parts).encode(), digest_size=8).hexdigest()


def _make(job: QuantizeJob, target: ExportFormat, path: Path) -> QuantizedModel:
    try:
        made = job.write(target, path)
    except UserError as error:
        if len(job.request.formats) == 1:
            raise
        return QuantizedModel(
            target=target,
            key="",
            path=str(path),
            standing=QuantizeStatus.FAILED,
            problem=error.problem,
            remedy=error.remedy,
        )
    size = measure_weights(path) or 0
    return QuantizedModel(
        target=target,
        key="",
        path=str(path),
        standing=QuantizeStatus.MADE,
        size_bytes=size,
        bits_per_weight=8 * size / job.source.spec.num_params,
        of_original_fraction=size / job.source.artefact.size_bytes,
        seconds=made.seconds,
        peak_host_bytes=made.peak_host_bytes,
        importance=made.importance,
        notes=made.notes,
    )


def _check(
    check: QuantizeCheck, source: QuantizeSource, summary: QuantizeSummary
) -> QuantizeSummary:
    """Check all new results at once, so that the original is loaded once."""
    new = [
        row
        for row in summary.rows
        if row.standing is QuantizeStatus.MADE and Path(row.path).exists()
    ]
    if not new:
        return summary
    verdict = check(source.artefact, [find_artefact(row.path) for row in new])
    for row, comparison in zip(new, verdict.rows, strict=True):
        summary = summary.with_row(_apply_comparison(row, comparison))
    return summary.model_copy(
        update={"text": verdict.text, "reference_perplexity": verdict.reference_perplexity}
    )


def _apply_comparison(row: QuantizedModel, comparison: Comparison) -> QuantizedModel:
    """A result that failed is renamed, so that it is not taken for a good model."""
    if comparison.is_good:
        has_limit = comparison.kind is not None and LIMITS[comparison.kind].top1 is not None
        standing = QuantizeStatus.GOOD if has_limit else QuantizeStatus.REPORTED
        return row.model_copy(update={"standing": standing, "check": comparison})
    rejected = reject(Path(row.path), Path(row.path))
    return row.model_copy(
        update={"standing": QuantizeStatus.REJECTED, "check": comparison, "path": str(rejected)}
    )


def _save_summary(paths: OutputPaths, summary: QuantizeSummary) -> QuantizeSummary:
    stamped = summary.model_copy(update={"updated_at": _now()})
    if paths.summary is not None:
        paths.home.mkdir(parents=True, exist_ok=True)
        write_summary(paths.summary, stamped)
    return stamped


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
