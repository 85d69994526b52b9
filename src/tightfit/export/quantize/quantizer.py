"""Quantizer: makes one format after another from the same source.

Also which model is quantized and where results go.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, InvalidInputError, SetupError, UsageError
from tightfit.core.files import write_atomic
from tightfit.core.units import render_bytes
from tightfit.core.validation import printable
from tightfit.export.convert import GgufRequest, convert_to_gguf
from tightfit.export.formats import ExportFormat, FormatFamily
from tightfit.export.quantize.calibration import (
    CPU_ROWS,
    GPU_ROWS,
    ROW_TOKENS,
    Calibration,
    CalibrationRequest,
    measure_importance,
    read_calibration,
    read_importance,
)
from tightfit.export.quantize.forecast import QuantizeEffort, QuantizeForecast, estimate_quantize
from tightfit.export.quantize.gguf import (
    Importance,
    RequantizeRequest,
    open_plain_gguf,
    read_facts,
    requantize_gguf,
)
from tightfit.export.quantize.gptq import choose_group_size, explain_group_size, run_gptq
from tightfit.export.quantize.gptq_worker import AUTO_ROUND, GptqJob
from tightfit.export.quantize.summary import SUMMARY_FILE
from tightfit.hardware.machine import read_peak_memory_bytes, reset_peak_memory
from tightfit.models.gguf import read_gguf_model
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.runtime.artefacts import Artefact, ArtefactKind, find_artefact
from tightfit.runtime.load import LoadRequest, load_base
from tightfit.runtime.model_files import copy_tokenizer_files, locate_model
from tightfit.runtime.output_folder import PARTIAL, begin_folder, finish_folder

MERGED = "merged"
QUANTIZED = "quantized"
_PLAIN_ENDING = re.compile(r"[-._](f16|bf16|f32|fp16|fp32)$", re.IGNORECASE)
_WEIGHTS = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSource:
    """An unquantized model: a Hugging Face folder or a GGUF file."""

    artefact: Artefact
    name: str
    """What the results are called after."""
    home: Path
    """Where they go unless told."""
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
    """None: one result, which lies beside the user's own files."""


def find_quantize_source(name: str, targets: Sequence[ExportFormat]) -> QuantizeSource:
    """The model that `name` means, if these targets can be made of it."""
    artefact = _use_merged(find_artefact(name))
    if artefact.kind in (ArtefactKind.GPTQ, ArtefactKind.BITSANDBYTES):
        raise InvalidInputError(
            f"{name} is quantized already ({artefact.kind.value}).",
            remedy="name the model it was made from",
        )
    is_gguf = artefact.kind is ArtefactKind.GGUF
    others = [target.value for target in targets if target.family is not FormatFamily.GGUF]
    if is_gguf and others:
        raise UsageError(
            f"{', '.join(others)} cannot be made of a GGUF file.",
            remedy=f"name the model's folder, or make one: tightfit convert {name} --to hf",
        )
    spec = read_gguf_model(artefact.path) if is_gguf else resolve_model(str(artefact.path))
    if spec.is_encoder_decoder and any(t.family is not FormatFamily.BITS for t in targets):
        raise InvalidInputError(
            f"{name} is an encoder-decoder model, which GPTQ and GGUF are not made for here.",
            remedy="--to nf4 or --to int8",
        )
    return QuantizeSource(
        artefact=artefact, name=_model_name(artefact), home=_default_folder(artefact), spec=spec
    )


def choose_output_paths(
    source: QuantizeSource, targets: Sequence[ExportFormat], out: Path | None
) -> OutputPaths:
    """One target: `out` is the result, or a folder it goes to. Several: the folder for all."""
    names = {target: target.file_name(source.name) for target in targets}
    if len(targets) > 1:
        home = out or _folder_for_all(source)
        if home.is_file() or home.suffix.lower() == ".gguf":
            raise UsageError(
                f"--out {home} is one file for {len(targets)} formats.", remedy="--out FOLDER"
            )
        return OutputPaths(
            home=home,
            of={target: home / name for target, name in names.items()},
            summary=home / SUMMARY_FILE,
        )
    target = targets[0]
    home = source.home if out is None else out
    if out is not None and not (out.is_dir() and not (out / "config.json").is_file()):
        _check_ending(out, target)
        return OutputPaths(home=out.parent, of={target: out}, summary=None)
    keeps = source.artefact.run is not None and out is None
    summary = home / SUMMARY_FILE if keeps else None
    return OutputPaths(home=home, of={target: home / names[target]}, summary=summary)


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
    """A run's own folder; else beside the model; a cached hub id's results go here."""
    if artefact.run is not None:
        return artefact.run.path / QUANTIZED
    named = Path(artefact.name).expanduser()
    return named.parent if named.exists() and named.resolve() != Path.cwd() else Path()


def _folder_for_all(source: QuantizeSource) -> Path:
    if source.artefact.run is not None:
        return source.home
    return source.home / f"{source.name}-{QUANTIZED}"


def _check_ending(out: Path, target: ExportFormat) -> None:
    is_file = target.family is FormatFamily.GGUF
    if is_file != (out.suffix.lower() == ".gguf"):
        kind = "a file that ends in .gguf" if is_file else "a folder"
        raise UsageError(
            f"--out {out}: {target.value} is {kind}.",
            remedy=f"--out {target.file_name('model')}",
        )


# nf4 and int8: a model packed by bitsandbytes and saved as a folder that transformers loads.

MAX_SHARD_BYTES = 5 * 10**9
_KINDS = {ExportFormat.NF4: Dtype.NF4, ExportFormat.INT8: Dtype.INT8}


def pack_bits(source: Path, tokenizer: Path, target: ExportFormat, work: Path) -> None:
    """Fill `work` with the packed model, its config and the files it speaks with."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = json.loads((source / "config.json").read_bytes())
    request = LoadRequest(weights=_KINDS[target], compute=plain_dtype(config))
    model: Any = load_base(source, request, device)
    model.eval()
    model.save_pretrained(str(work), max_shard_size=MAX_SHARD_BYTES)
    _restore_config(work, config)
    copy_tokenizer_files(source, work)
    copy_tokenizer_files(tokenizer, work)


def plain_dtype(config: dict[str, Any]) -> Dtype:
    """What stays unpacked is stored in 16 bits: in the model's own kind, else in fp16."""
    stated = str(config.get("dtype") or config.get("torch_dtype") or "")
    return Dtype.BF16 if stated.endswith("bfloat16") else Dtype.FP16


def _restore_config(work: Path, original: dict[str, Any]) -> None:
    """The model's own config with the packing added; loading for work has changed other keys."""
    saved = json.loads((work / "config.json").read_bytes())
    added = {key: saved[key] for key in ("quantization_config", "dtype") if key in saved}
    original.pop("torch_dtype", None)
    write_atomic(work / "config.json", json.dumps(original | added, indent=2) + "\n")


# Workshop: makes one target after another from the same source, sharing what they share.

StageCallback = Callable[[str, int, int], None]
"""What is being done, how far, of how much."""
DEFAULT_ITERS = {8: 0, 4: 20, 3: 50, 2: 50}
"""By bits. Rounding alone is near enough at 8; at 4 a few tuning steps take SmolLM2-135M from 16%
to 14.6% over the original's perplexity."""
_GGUF_DTYPES = {Dtype.FP32: "f32", Dtype.FP16: "f16", Dtype.BF16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How to quantize, whatever the target."""

    calibrate: Path | None = None
    num_rows: int | None = None
    iters: int | None = None
    """None: by the number of bits."""
    tool: str = AUTO_ROUND
    python: str | None = None
    """Of an environment with the GPTQ tool. None: ours."""
    device: str = "auto"
    num_threads: int = 1
    with_importance: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeMeasurement:
    """What came of one target."""

    seconds: float
    peak_host_bytes: int
    importance: bool = False
    notes: tuple[str, ...] = ()


class Quantizer:
    """Holds the calibration, the importance and the plain GGUF file while targets need them."""

    def __init__(
        self,
        source: QuantizeSource,
        home: Path,
        options: QuantizeOptions,
        report: StageCallback | None,
    ) -> None:
        self._source = source
        self._home = home
        self._options = options
        self._report = report
        self._plain: Path | None = None

    @cached_property
    def calibration(self) -> Calibration:
        spec, artefact = self._source.spec, self._source.artefact
        return read_calibration(
            CalibrationRequest(
                tokenizer=artefact.tokenizer,
                template=artefact.template,
                file=self._options.calibrate,
                run=artefact.run,
                num_rows=self._num_rows,
                max_positions=spec.max_positions or ROW_TOKENS,
            )
        )

    def forecast(self, target: ExportFormat) -> QuantizeForecast:
        """What one target will take. Calibration is taken as long as it is asked for."""
        stored = self._source.spec.stored_dtype
        effort = QuantizeEffort(
            num_tokens=self._num_rows * ROW_TOKENS if self._needs_rows(target) else 0,
            group_size=self._group_size(target),
            iters=self._iters(target),
            num_threads=self._options.num_threads,
            has_gpu=self._has_gpu,
            stored_bytes=4 if stored is Dtype.FP32 else 2,
        )
        return estimate_quantize(self._source.spec, target, effort)

    def plain_bytes(self) -> int:
        """Of the plain GGUF file that GGUF targets are made from, where it must be made first."""
        return 0 if self._source.is_gguf else self._source.size_bytes

    def make(self, target: ExportFormat, path: Path) -> QuantizeMeasurement:
        """Write one target, whole or not at all."""
        _check_memory(self.forecast(target), target)
        path.parent.mkdir(parents=True, exist_ok=True)
        make = {
            FormatFamily.GGUF: self._make_gguf,
            FormatFamily.GPTQ: self._make_gptq,
            FormatFamily.BITS: self._make_bits,
        }[target.family]
        return make(target, path)

    def close(self) -> None:
        """Drop the plain GGUF file, if one was made."""
        if self._plain is not None:
            self._plain.unlink(missing_ok=True)
            self._plain = None

    @property
    def _num_rows(self) -> int:
        return self._options.num_rows or (GPU_ROWS if self._has_gpu else CPU_ROWS)

    @cached_property
    def _has_gpu(self) -> bool:
        if self._options.device == "cpu":
            return False
        try:
            import torch
        except ImportError as fault:
            raise SetupError(
                "Quantizing needs torch, which is not installed.",
                remedy="pip install 'tightfit[quantize]'",
            ) from fault
        return bool(torch.cuda.is_available())

    @cached_property
    def _widths(self) -> frozenset[int]:
        """Of the rows that GPTQ quantizes; the head stays as it is."""
        blocks = self._source.spec.blocks
        return frozenset(part.in_features for block in blocks for part in block.linears)

    def _group_size(self, target: ExportFormat) -> int:
        return choose_group_size(self._widths, bits=target.bits)

    def _iters(self, target: ExportFormat) -> int:
        if target.family is not FormatFamily.GPTQ:
            return 0
        stated = self._options.iters
        return DEFAULT_ITERS[target.bits] if stated is None else stated

    def _needs_rows(self, target: ExportFormat) -> bool:
        if target.family is FormatFamily.GPTQ:
            return True
        return target.takes_importance and self._options.with_importance

    def _make_gguf(self, target: ExportFormat, path: Path) -> QuantizeMeasurement:
        reset_peak_memory()
        started = time.monotonic()
        plain = self._plain_gguf()
        importance = self._importance(plain) if self._needs_rows(target) else None
        done = requantize_gguf(
            RequantizeRequest(
                source=plain,
                target=path,
                kind=target,
                importance=importance,
                num_threads=self._options.num_threads,
                report=self._told(target.value),
            )
        )
        notes = []
        if done.fallen:
            wanted = ", ".join(sorted(set(done.fallen.values())))
            given = ", ".join(sorted({done.types[name] for name in done.fallen}))
            notes.append(
                f"{target.value}: {len(done.fallen)} of {done.num_tensors} matrices have rows that "
                f"are no multiple of 256 wide; they are {given} instead of {wanted}."
            )
        if importance is not None:
            notes += self.calibration.notes
        return QuantizeMeasurement(
            seconds=time.monotonic() - started,
            peak_host_bytes=read_peak_memory_bytes(),
            importance=importance is not None and done.num_weighted > 0,
            notes=tuple(notes),
        )

    def _plain_gguf(self) -> Path:
        """The source itself, or its exact copy as a GGUF file, made once."""
        if self._source.is_gguf:
            return self._source.path
        if self._plain is None:
            dtype = _GGUF_DTYPES.get(self._source.spec.stored_dtype or Dtype.FP16, "f16")
            self._plain = self._home / f".{self._source.name}-{self._source.stamp}-{dtype}.gguf"
            if not self._plain.is_file():
                convert_to_gguf(
                    GgufRequest(
                        source=self._source.path,
                        target=self._plain,
                        dtype=dtype,
                        tokenizer=self._source.artefact.tokenizer,
                        report=self._report,
                    )
                )
        return self._plain

    def _importance(self, plain: Path) -> Importance:
        import torch

        folder = locate_model(str(plain)) if self._source.is_gguf else self._source.path
        named = self._options.device
        measured = measure_importance(
            folder,
            self.calibration,
            architecture=read_facts(open_plain_gguf(plain)).architecture,
            device=None if named == "auto" else torch.device(named),
            report=self._told("importance"),
        )
        return read_importance(measured)

    def _make_gptq(self, target: ExportFormat, path: Path) -> QuantizeMeasurement:
        import numpy as np

        work = path.with_name(path.name + PARTIAL)
        work.mkdir(parents=True, exist_ok=True)
        rows, out = work / "rows.npy", work / "model"
        with rows.open("wb") as stream:
            np.save(stream, self.calibration.rows)
        job = GptqJob(
            model=str(self._source.path.resolve()),
            rows=str(rows.resolve()),
            out=str(out.resolve()),
            resume=str((work / "resume").resolve()),
            bits=target.bits,
            group_size=self._group_size(target),
            iters=self._iters(target),
            tool=self._options.tool,
            device=self._options.device,
            key=f"{self._source.stamp} {self.calibration.digest}",
        )
        worked = run_gptq(job, work, python=self._options.python, report=self._told(target.value))
        self._add_companions(out)
        finish_folder(out, path)
        shutil.rmtree(work, ignore_errors=True)
        note = explain_group_size(self._widths, self._group_size(target))
        return QuantizeMeasurement(
            seconds=worked.seconds,
            peak_host_bytes=worked.peak_rss_bytes,
            notes=tuple(filter(None, (note, *self.calibration.notes))),
        )

    def _make_bits(self, target: ExportFormat, path: Path) -> QuantizeMeasurement:
        reset_peak_memory()
        started = time.monotonic()
        work = begin_folder(path)
        try:
            pack_bits(self._source.path, self._source.artefact.tokenizer, target, work)
            finish_folder(work, path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return QuantizeMeasurement(
            seconds=time.monotonic() - started, peak_host_bytes=read_peak_memory_bytes()
        )

    def _add_companions(self, folder: Path) -> None:
        copy_tokenizer_files(self._source.path, folder)
        copy_tokenizer_files(self._source.artefact.tokenizer, folder)

    def _told(self, what: str) -> Callable[[int, int], None] | None:
        report = self._report
        if report is None:
            return None
        return lambda done, of: report(what, done, of)


def _check_memory(forecast: QuantizeForecast, target: ExportFormat) -> None:
    free: Any = psutil.virtual_memory().available
    if forecast.host_bytes > free:
        remedy = "free some memory, or use a machine with more"
        if target.takes_importance:
            remedy = "--no-importance, which needs no model in memory; or a machine with more"
        raise DoesNotFitError(
            f"{target.value} will take {render_bytes(forecast.host_bytes)} of memory; "
            f"{render_bytes(free)} are free.",
            remedy=remedy,
        )
