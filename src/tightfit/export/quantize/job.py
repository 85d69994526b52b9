"""A quantize job: the source model, where results go, and what the writers of formats share."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import psutil

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, InvalidInputError, SetupError, UsageError
from tightfit.core.progress import Progress
from tightfit.core.units import MIB, render_bytes
from tightfit.core.validation import printable
from tightfit.export.formats import GPTQ_TOOLS, CalibrationUse, ExportFormat
from tightfit.export.quantize.calibration import (
    CPU_ROWS,
    GPU_ROWS,
    ROW_TOKENS,
    Calibration,
    CalibrationRequest,
    read_calibration,
)
from tightfit.export.quantize.summary import SUMMARY_FILE, QuantizeForecast
from tightfit.models.gguf import read_gguf_model
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.runtime.artefacts import Artefact, ArtefactKind, find_artefact

MERGED = "merged"
QUANTIZED = "quantized"
_PLAIN_ENDING = re.compile(r"[-._](f16|bf16|f32|fp16|fp32)$", re.IGNORECASE)
_WEIGHTS = (".safetensors", ".bin", ".gguf")


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
    def size_bytes(self) -> int:
        return weight_bytes(self.path)

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
    if artefact.kind in (ArtefactKind.GPTQ, ArtefactKind.BITSANDBYTES):
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
            f"{name} is an encoder-decoder model, which GPTQ and GGUF are not made for here.",
            remedy="--to nf4 or --to int8",
        )
    return QuantizeSource(
        artefact=artefact, name=_model_name(artefact), home=_default_folder(artefact), spec=spec
    )


def choose_output_paths(
    source: QuantizeSource, formats: Sequence[ExportFormat], out: Path | None
) -> OutputPaths:
    """One format: `out` is the result, or a folder it goes to. Several: the folder for all."""
    names = {wanted: wanted.file_name(source.name) for wanted in formats}
    if len(formats) > 1:
        home = out or _folder_for_all(source)
        if home.is_file() or home.suffix.lower() == ".gguf":
            raise UsageError(
                f"--out {home} is one file for {len(formats)} formats.", remedy="--out FOLDER"
            )
        return OutputPaths(
            home=home,
            of={wanted: home / name for wanted, name in names.items()},
            summary=home / SUMMARY_FILE,
        )
    wanted = formats[0]
    home = source.home if out is None else out
    if out is not None and not (out.is_dir() and not (out / "config.json").is_file()):
        _check_ending(out, wanted)
        return OutputPaths(home=out.parent, of={wanted: out}, summary=None)
    keeps = source.artefact.run is not None and out is None
    summary = home / SUMMARY_FILE if keeps else None
    return OutputPaths(home=home, of={wanted: home / names[wanted]}, summary=summary)


def weight_bytes(path: Path) -> int:
    """Of a file, or of the weights in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.iterdir() if item.suffix in _WEIGHTS)


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


def _model_name(artefact: Artefact) -> str:
    if artefact.run is not None:
        return artefact.run.path.resolve().name
    if artefact.kind is ArtefactKind.GGUF:
        return _PLAIN_ENDING.sub("", artefact.path.stem)
    named = Path(artefact.name).expanduser()
    return named.resolve().name if named.is_dir() else artefact.name.rstrip("/").rsplit("/", 1)[-1]


def _default_folder(artefact: Artefact) -> Path:
    """In the run; else next to the model; for a cached hub id the current folder."""
    if artefact.run is not None:
        return artefact.run.path / QUANTIZED
    named = Path(artefact.name).expanduser()
    return named.parent if named.exists() and named.resolve() != Path.cwd() else Path()


def _folder_for_all(source: QuantizeSource) -> Path:
    if source.artefact.run is not None:
        return source.home
    return source.home / f"{source.name}-{QUANTIZED}"


def _check_ending(out: Path, wanted: ExportFormat) -> None:
    ending = out.suffix.lower()
    if ending != wanted.suffix if wanted.is_file else ending == ".gguf":
        kind = f"a file that ends in {wanted.suffix}" if wanted.is_file else "a folder"
        raise UsageError(
            f"--out {out}: {wanted.name} is {kind}.",
            remedy=f"--out {wanted.file_name('model')}",
        )


# The job and its writers.

PROCESS_BYTES = 620 * MIB
"""A process with torch, transformers and the quantizer loaded; measured on Linux, CPU build."""
CPU_FLOPS = 60e9
GPU_FLOPS = 40e12
"""What calibration reaches on a small share of a server CPU, and on a data-centre GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """How to quantize, whatever the format."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeMeasurement:
    """What writing one format took."""

    seconds: float
    peak_host_bytes: int
    importance: bool = False
    notes: tuple[str, ...] = ()


class FormatWriter(Protocol):
    """Writes the formats of one tool. One instance serves all formats of a job that name it."""

    def __init__(self, job: QuantizeJob) -> None: ...

    def forecast(self, wanted: ExportFormat) -> QuantizeForecast: ...

    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        """Write the file or folder whole or not at all."""
        ...

    def scratch_bytes(self) -> int:
        """Disk that it takes beside the results, until `close`."""
        ...

    def close(self) -> None: ...


class QuantizeJob:
    """One source and its options; calibration and writers are made once and shared."""

    def __init__(
        self,
        source: QuantizeSource,
        folder: Path,
        options: QuantizeSettings,
        report: Progress | None,
    ) -> None:
        self.source = source
        self.folder = folder
        self.options = options
        self.report = report
        self._writers: dict[str, FormatWriter] = {}

    @cached_property
    def calibration(self) -> Calibration:
        spec, artefact = self.source.spec, self.source.artefact
        return read_calibration(
            CalibrationRequest(
                tokenizer=artefact.tokenizer,
                template=artefact.template,
                file=self.options.calibrate,
                run=artefact.run,
                num_rows=self._num_rows,
                max_positions=spec.max_positions or ROW_TOKENS,
            )
        )

    @property
    def has_calibration(self) -> bool:
        """Whether a writer has asked for it."""
        return "calibration" in vars(self)

    @cached_property
    def has_gpu(self) -> bool:
        if self.options.device == "cpu":
            return False
        try:
            import torch
        except ImportError as error:
            raise SetupError(
                "Quantizing needs torch, which is not installed.",
                remedy="pip install 'tightfit[quantize]'",
            ) from error
        return bool(torch.cuda.is_available())

    def calibrates(self, wanted: ExportFormat) -> bool:
        if wanted.calibration is CalibrationUse.OPTIONAL:
            return self.options.with_importance
        return wanted.calibration is CalibrationUse.ALWAYS

    def num_calibration_tokens(self, wanted: ExportFormat) -> int:
        """Before the text is read: as many as are asked for."""
        return self._num_rows * ROW_TOKENS if self.calibrates(wanted) else 0

    def forward_seconds(self, num_tokens: int) -> float:
        """One pass of calibration text through the model."""
        rate = GPU_FLOPS if self.has_gpu else CPU_FLOPS
        return 2 * self.source.spec.num_params * num_tokens / rate

    def stage(self, name: str) -> Callable[[int, int], None] | None:
        """The progress callback of one stage."""
        report = self.report
        if report is None:
            return None
        return lambda done, of: report(name, done, of)

    def forecast(self, wanted: ExportFormat) -> QuantizeForecast:
        return self._writer(wanted).forecast(wanted)

    def scratch_bytes(self) -> int:
        return sum(writer.scratch_bytes() for writer in self._writers.values())

    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        """Write one format, whole or not at all."""
        _check_memory(self.forecast(wanted), wanted)
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._writer(wanted).write(wanted, path)

    def close(self) -> None:
        """Delete what was kept for later formats."""
        for writer in self._writers.values():
            writer.close()

    @property
    def _num_rows(self) -> int:
        return self.options.num_rows or (GPU_ROWS if self.has_gpu else CPU_ROWS)

    def _writer(self, wanted: ExportFormat) -> FormatWriter:
        if wanted.writer not in self._writers:
            module, _, name = wanted.writer.partition(":")
            make: type[FormatWriter] = getattr(importlib.import_module(module), name)
            self._writers[wanted.writer] = make(self)
        return self._writers[wanted.writer]


def _check_memory(forecast: QuantizeForecast, wanted: ExportFormat) -> None:
    free: Any = psutil.virtual_memory().available
    if forecast.host_bytes > free:
        remedy = "free some memory, or use a machine with more"
        if wanted.calibration is CalibrationUse.OPTIONAL:
            remedy = "--no-importance, which needs no model in memory; or a machine with more"
        raise DoesNotFitError(
            f"{wanted.name} will take {render_bytes(forecast.host_bytes)} of memory; "
            f"{render_bytes(free)} are free.",
            remedy=remedy,
        )
