"""Workshop: makes one target after another from the same source, sharing what they share."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, EnvironmentFaultError
from tightfit.core.units import render_bytes
from tightfit.export.convert.convert import GgufRequest, convert_to_gguf
from tightfit.export.quantize.bits import pack_bits
from tightfit.export.quantize.calibration import (
    CPU_ROWS,
    GPU_ROWS,
    ROW_TOKENS,
    Calibration,
    CalibrationRequest,
    read_calibration,
)
from tightfit.export.quantize.forecast import Effort, Forecast, estimate_quantize
from tightfit.export.quantize.gguf import (
    Importance,
    RequantizeRequest,
    open_plain_gguf,
    read_facts,
    requantize_gguf,
)
from tightfit.export.quantize.gptq_group import choose_group_size, explain_group_size
from tightfit.export.quantize.gptq_process import run_gptq
from tightfit.export.quantize.gptq_worker import AUTO_ROUND, GptqJob
from tightfit.export.quantize.importance import measure_importance, read_importance
from tightfit.export.quantize.source import Source
from tightfit.export.quantize.targets import Family, Target
from tightfit.hardware.own_memory import read_peak_bytes, reset_peak
from tightfit.runtime.companion_files import copy_companions
from tightfit.runtime.finished_folder import PARTIAL, begin_folder, finish_folder
from tightfit.runtime.model_files import locate_model

Report = Callable[[str, int, int], None]
"""What is being done, how far, of how much."""
DEFAULT_ITERS = {8: 0, 4: 20, 3: 50, 2: 50}
"""By bits. Rounding alone is near enough at 8; at 4 a few tuning steps take SmolLM2-135M from 16%
to 14.6% over the original's perplexity."""
_STORED = {Dtype.FP32: "f32", Dtype.FP16: "f16", Dtype.BF16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeOptions:
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
class Made:
    """What came of one target."""

    seconds: float
    peak_host_bytes: int
    importance: bool = False
    notes: tuple[str, ...] = ()


class Workshop:
    """Holds the calibration, the importance and the plain GGUF file while targets need them."""

    def __init__(
        self, source: Source, home: Path, options: MakeOptions, report: Report | None
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

    def forecast(self, target: Target) -> Forecast:
        """What one target will take. Calibration is taken as long as it is asked for."""
        stored = self._source.spec.stored_dtype
        effort = Effort(
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

    def make(self, target: Target, path: Path) -> Made:
        """Write one target, whole or not at all."""
        _check_memory(self.forecast(target), target)
        path.parent.mkdir(parents=True, exist_ok=True)
        make = {
            Family.GGUF: self._make_gguf,
            Family.GPTQ: self._make_gptq,
            Family.BITS: self._make_bits,
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
            raise EnvironmentFaultError(
                "Quantizing needs torch, which is not installed.",
                remedy="pip install 'tightfit[quantize]'",
            ) from fault
        return bool(torch.cuda.is_available())

    @cached_property
    def _widths(self) -> frozenset[int]:
        """Of the rows that GPTQ quantizes; the head stays as it is."""
        blocks = self._source.spec.blocks
        return frozenset(part.in_features for block in blocks for part in block.linears)

    def _group_size(self, target: Target) -> int:
        return choose_group_size(self._widths, bits=target.bits)

    def _iters(self, target: Target) -> int:
        if target.family is not Family.GPTQ:
            return 0
        stated = self._options.iters
        return DEFAULT_ITERS[target.bits] if stated is None else stated

    def _needs_rows(self, target: Target) -> bool:
        if target.family is Family.GPTQ:
            return True
        return target.takes_importance and self._options.with_importance

    def _make_gguf(self, target: Target, path: Path) -> Made:
        reset_peak()
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
        return Made(
            seconds=time.monotonic() - started,
            peak_host_bytes=read_peak_bytes(),
            importance=importance is not None and done.num_weighted > 0,
            notes=tuple(notes),
        )

    def _plain_gguf(self) -> Path:
        """The source itself, or its exact copy as a GGUF file, made once."""
        if self._source.is_gguf:
            return self._source.path
        if self._plain is None:
            dtype = _STORED.get(self._source.spec.stored_dtype or Dtype.FP16, "f16")
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

    def _make_gptq(self, target: Target, path: Path) -> Made:
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
        return Made(
            seconds=worked.seconds,
            peak_host_bytes=worked.peak_rss_bytes,
            notes=tuple(filter(None, (note, *self.calibration.notes))),
        )

    def _make_bits(self, target: Target, path: Path) -> Made:
        reset_peak()
        started = time.monotonic()
        work = begin_folder(path)
        try:
            pack_bits(self._source.path, self._source.artefact.tokenizer, target, work)
            finish_folder(work, path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return Made(seconds=time.monotonic() - started, peak_host_bytes=read_peak_bytes())

    def _add_companions(self, folder: Path) -> None:
        copy_companions(self._source.path, folder)
        copy_companions(self._source.artefact.tokenizer, folder)

    def _told(self, what: str) -> Callable[[int, int], None] | None:
        report = self._report
        if report is None:
            return None
        return lambda done, of: report(what, done, of)


def _check_memory(forecast: Forecast, target: Target) -> None:
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
