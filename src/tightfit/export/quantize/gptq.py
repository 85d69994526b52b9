"""The writer of GPTQ and compressed-tensors formats: group size, forecast, the worker process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import cached_property
from math import ceil
from pathlib import Path

from tightfit.core.child_process import ChildProcess, Message
from tightfit.core.errors import DoesNotFitError, InvalidInputError, SetupError, UserError
from tightfit.core.files import partial_path, publish_folder, write_atomic
from tightfit.core.import_path import module_words
from tightfit.core.progress import CountProgress
from tightfit.core.reading import read_json_file
from tightfit.estimation.weights import largest_layer
from tightfit.export.formats import ExportFormat
from tightfit.export.quantize import gptq_worker
from tightfit.export.quantize.gptq_worker import (
    EXIT_MEMORY,
    EXIT_MISSING,
    EXIT_REFUSED,
    GPTQMODEL,
    GptqJob,
)
from tightfit.export.quantize.job import (
    PROCESS_BYTES,
    FormatWriter,
    QuantizeForecast,
    QuantizeJob,
    QuantizeMeasurement,
)
from tightfit.runtime.model_files import copy_tokenizer_files

TUNED_PASSES = 3
"""Forward and backward of one layer per tuning step, in forward passes."""
GROUP_SIZES = (128, 64, 32)
WHOLE_ROW = -1
SMALL_WIDTH = 1024
"""Rows narrower than this are a small model's, which has little to spare: at 4 bits SmolLM2-135M
loses 24% in perplexity with groups of 64 and 16% with groups of 32, for 0.3 bits per weight."""


class GptqWriter(FormatWriter):
    """Writes folders for transformers and vLLM, each in a process of its own."""

    def __init__(self, job: QuantizeJob) -> None:
        self._job = job

    def forecast(self, wanted: ExportFormat) -> QuantizeForecast:
        """The model as stored, one layer in fp32 with its tuning state, and two layers' inputs.

        Source: auto-round works block by block on cached inputs (github.com/intel/auto-round).
        """
        source, steps = self._job.source, self._tuning_steps(wanted)
        spec, num_tokens = source.spec, self._job.num_calibration_tokens(wanted)
        inputs = 2 * 4 * num_tokens * spec.hidden_size
        layer = largest_layer(spec) * (4 + (12 if steps else 4))
        group_size = self._group_size(wanted)
        group = group_size if group_size > 0 else spec.hidden_size
        packed = spec.linear_params * (wanted.bits + wanted.group_bits / group) / 8
        passes = 2 + TUNED_PASSES * steps * min(1.0, 8 * 512 / max(num_tokens, 1))
        search = spec.linear_params * 200 / 1e9  # grid search of the scales, on one core
        stored = source.value_bytes * spec.num_params
        return QuantizeForecast(
            host_bytes=int(PROCESS_BYTES + stored + layer + inputs),
            disk_bytes=ceil(packed + 2 * (spec.num_params - spec.linear_params)),
            seconds=passes * self._job.forward_seconds(num_tokens) + search,
        )

    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        import numpy as np

        source, request = self._job.source, self._job.request
        plain = self._plain_matrices(wanted)
        calibration = self._job.calibration if self._job.calibrates(wanted) else None
        work = partial_path(path)
        work.mkdir(parents=True, exist_ok=True)
        rows, out = work / "rows.npy", work / "model"
        if calibration is not None:
            with rows.open("wb") as stream:
                np.save(stream, calibration.rows)
        job = GptqJob(
            model=str(source.path.resolve()),
            rows="" if calibration is None else str(rows.resolve()),
            out=str(out.resolve()),
            resume=str((work / "resume").resolve()),
            bits=wanted.bits,
            group_size=self._group_size(wanted),
            iters=self._tuning_steps(wanted),
            tool=gptq_worker.AUTO_ROUND if wanted.scheme else request.tool,
            device=request.device,
            scheme=wanted.scheme,
            plain=",".join(plain),
            key=f"{source.stamp} {'' if calibration is None else calibration.digest}",
        )
        worked = run_gptq(job, work, python=request.python, report=self._job.stage(wanted.name))
        copy_tokenizer_files(source.path, out)
        copy_tokenizer_files(source.artefact.tokenizer, out)
        publish_folder(out, path)
        shutil.rmtree(work, ignore_errors=True)
        notes = [*worked.notes, *(() if calibration is None else calibration.notes)]
        if not wanted.group_size:
            notes.insert(0, explain_group_size(self._widths, self._group_size(wanted)) or "")
        return replace(worked, notes=tuple(filter(None, notes)))

    def refusal(self, wanted: ExportFormat) -> UserError | None:
        if wanted.scheme and any(block.num_experts for block in self._job.source.spec.blocks):
            return InvalidInputError(
                f"{wanted.name} is not made of mixtures of experts here: their weights are no "
                "linear layers in transformers, and what is written for them is not checked.",
                remedy="--to q4_k_m, which every mixture with a GGUF architecture has",
            )
        return None

    def _plain_matrices(self, wanted: ExportFormat) -> list[str]:
        """Modules whose rows do not divide into the groups that the format fixes."""
        size = wanted.group_size
        parts = [part for block in self._job.source.spec.blocks for part in block.linears]
        odd = sorted({part.name for part in parts if size > 0 and part.in_features % size})
        if odd and len(odd) == len({part.name for part in parts}):
            raise InvalidInputError(
                f"{wanted.name} has groups of {size}, into which no matrix of this model divides.",
                remedy="--to fp8, which has no groups, or --to int8",
            )
        return odd

    @cached_property
    def _widths(self) -> frozenset[int]:
        """Of the rows that are quantized; the head stays as it is."""
        blocks = self._job.source.spec.blocks
        return frozenset(part.in_features for block in blocks for part in block.linears)

    def _group_size(self, wanted: ExportFormat) -> int:
        return wanted.group_size or choose_group_size(self._widths, bits=wanted.bits)

    def _tuning_steps(self, wanted: ExportFormat) -> int:
        stated = self._job.request.iters
        return wanted.tuning_steps if stated is None or not wanted.takes_tuning else stated


def choose_group_size(widths: Collection[int], *, bits: int) -> int:
    """The largest of 128, 64 and 32 that divides every quantized row; else one scale per row.

    Loaders reject or misread a last group that is not full: vLLM's kernels want whole groups.
    A small model gets the smallest groups from 4 bits down.
    """
    is_small = bits <= 4 and min(widths) < SMALL_WIDTH
    sizes = GROUP_SIZES[-1:] if is_small else GROUP_SIZES
    return next((size for size in sizes if all(width % size == 0 for width in widths)), WHOLE_ROW)


def explain_group_size(widths: Collection[int], chosen: int) -> str | None:
    """A note where the group size is not the usual 128."""
    if chosen == GROUP_SIZES[0]:
        return None
    groups = "One scale per row" if chosen == WHOLE_ROW else f"Groups of {chosen}"
    odd = [width for width in widths if width % GROUP_SIZES[0]]
    if chosen == GROUP_SIZES[-1] and min(widths) < SMALL_WIDTH:
        return f"{groups}: a model this small loses too much with {GROUP_SIZES[0]}."
    return f"{groups}: {min(odd):,} inputs do not divide into groups of {GROUP_SIZES[0]}."


# The worker process.


PYTHON_VARIABLE = "TIGHTFIT_GPTQ_PYTHON"
"""Names the Python of an environment of the quantizer's own."""
INSTALL = {
    gptq_worker.AUTO_ROUND: "pip install 'tightfit[quantize]'",
    GPTQMODEL: "install gptqmodel in an environment of its own and name its Python: "
    f"--python /path/to/python, or export {PYTHON_VARIABLE}",
}
STOP_SECONDS = 10.0


def run_gptq(
    job: GptqJob, work: Path, *, python: str | None = None, report: CountProgress | None = None
) -> QuantizeMeasurement:
    """Quantize in a process of its own, which has ended when this returns or raises.

    Run again after an interruption with the same job, it resumes after the last finished layer.
    """
    work.mkdir(parents=True, exist_ok=True)
    job_path = work / "job.json"
    try:
        earlier = read_json_file(job_path)
    except (OSError, ValueError):
        earlier = None
    if earlier != asdict(job):  # another job's leftovers
        for folder in (Path(job.out), Path(job.resume)):
            shutil.rmtree(folder, ignore_errors=True)
    write_atomic(job_path, json.dumps(asdict(job), indent=2) + "\n")
    log_path = work / "log.txt"
    command = worker_command(python or os.environ.get(PYTHON_VARIABLE), job_path)
    try:
        child = ChildProcess(command, log=log_path)
    except OSError as error:
        raise SetupError(
            f"Cannot start {command[0]}: {error.strerror or error}.",
            remedy="name a Python that has the quantizer: --python /path/to/python",
        ) from error
    last: Message = {}
    plain: list[str] = []
    try:
        for message in child:
            if "plain" in message:
                plain = [str(name) for name in message["plain"]]
            elif "done" not in message:
                last = message
            elif report is not None:
                report(int(message["done"]), int(message["of"]))
        code = child.wait()
    finally:
        child.end(seconds=STOP_SECONDS)
    if code:
        problem = str(last.get("problem", "")) or child.last_line or "it printed nothing"
        raise _worker_error(code, problem, job, log_path)
    return QuantizeMeasurement(
        seconds=float(last.get("seconds", 0.0)),
        peak_host_bytes=int(last.get("peak_rss_bytes", 0)),
        notes=(f"{job.scheme}: {', '.join(plain)} stay in 16 bits.",) if plain else (),
    )


def worker_command(python: str | None, job_path: Path) -> list[str]:
    """By module in our own environment, by path in another, which need not have tightfit."""
    words = [str(job_path), str(os.getpid())]
    if python is None or Path(python) == Path(sys.executable):
        return [sys.executable, *module_words(gptq_worker.__name__, *words)]
    return [python, str(Path(gptq_worker.__file__).resolve()), *words]


def _worker_error(code: int, problem: str, job: GptqJob, log_path: Path) -> UserError:
    if code == EXIT_MISSING:
        return SetupError(
            f"{job.scheme or 'GPTQ'} needs {job.tool}, which cannot be imported: "
            f"{problem.rstrip('.')}.",
            remedy=INSTALL[job.tool],
        )
    if code == EXIT_REFUSED:
        return InvalidInputError(
            f"{job.scheme} cannot hold this model: {problem.rstrip('.')}.",
            remedy="--to gptq-4, or a GGUF format such as --to q4_k_m",
        )
    if code in (EXIT_MEMORY, -signal.SIGKILL):
        return DoesNotFitError(
            f"Quantizing to {job.bits} bits ran out of memory.",
            remedy="--rows with a smaller number; the layers done so far are kept",
        )
    return SetupError(
        f"{job.tool} stopped with code {code}: {problem.rstrip('.')}.",
        remedy=f"see {log_path}; the same command resumes after the last finished layer",
    )
