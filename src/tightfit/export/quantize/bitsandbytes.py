"""nf4 and int8: a model quantized by bitsandbytes, saved as a folder that transformers loads."""

from __future__ import annotations

import json
import time
from math import ceil
from pathlib import Path
from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.files import atomic_folder, write_atomic
from tightfit.core.reading import read_json_file
from tightfit.core.strategy import Strategy
from tightfit.estimation.host_and_disk import FILE_SHARD_BYTES
from tightfit.estimation.weights import largest_matrix
from tightfit.export.formats import ExportFormat
from tightfit.export.quantize.job import (
    PROCESS_BYTES,
    FormatWriter,
    QuantizeForecast,
    QuantizeJob,
    QuantizeMeasurement,
)
from tightfit.hardware.machine import read_peak_memory_bytes, reset_peak_memory
from tightfit.runtime.load import load_base
from tightfit.runtime.model_files import copy_tokenizer_files

MAX_SHARD_BYTES = 5 * 10**9
BITS_PER_WEIGHT = {Dtype.NF4: 4.127, Dtype.INT8: 8.03}
"""nf4 with doubly quantized scales; int8 with one scale per row."""
READ_BYTES_PER_SECOND = 500e6


class BitsandbytesWriter(FormatWriter):
    """Writes nf4 and int8 folders."""

    def __init__(self, job: QuantizeJob) -> None:
        self._job = job

    def forecast(self, wanted: ExportFormat) -> QuantizeForecast:
        """The packed model, and the file it is read from, which is mapped while it is read."""
        spec = self._job.source.spec
        packed = ceil(spec.linear_params * BITS_PER_WEIGHT[Dtype(wanted.name)] / 8)
        packed += 2 * (spec.num_params - spec.linear_params)
        stored = self._job.source.value_bytes * spec.num_params
        return QuantizeForecast(
            host_bytes=PROCESS_BYTES
            + packed
            + min(stored, FILE_SHARD_BYTES)
            + 4 * largest_matrix(spec),
            disk_bytes=packed,
            seconds=5 + stored / READ_BYTES_PER_SECOND,
        )

    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        reset_peak_memory()
        started = time.monotonic()
        source = self._job.source
        with atomic_folder(path) as work:
            save_quantized(source.path, source.artefact.tokenizer, Dtype(wanted.name), work)
        return QuantizeMeasurement(
            seconds=time.monotonic() - started, peak_host_bytes=read_peak_memory_bytes()
        )


def save_quantized(source: Path, tokenizer: Path, dtype: Dtype, work: Path) -> None:
    """Fill `work` with the quantized model, its config and tokenizer files."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = read_json_file(source / "config.json", allows_infinity=True)
    # Norms and embeddings are stored in 16 bits: bf16 where the model is bf16, else fp16.
    stated = str(config.get("dtype") or config.get("torch_dtype") or "")
    compute = Dtype.BF16 if stated.endswith("bfloat16") else Dtype.FP16
    strategy = Strategy(weights=dtype, compute=compute)
    model: Any = load_base(source, strategy, device, attention="eager")  # every family has it
    model.eval()
    model.save_pretrained(str(work), max_shard_size=MAX_SHARD_BYTES)
    # The model's own config plus the quantization: loading has changed other keys.
    saved = read_json_file(work / "config.json", allows_infinity=True)
    added = {key: saved[key] for key in ("quantization_config", "dtype") if key in saved}
    config.pop("torch_dtype", None)
    write_atomic(work / "config.json", json.dumps(config | added, indent=2) + "\n")
    copy_tokenizer_files(source, work)
    copy_tokenizer_files(tokenizer, work)
