"""`quantize`: make a model smaller and compare the results with the original."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tightfit.api.call import accepts_keywords
from tightfit.api.options.common import OnForecast, model_argument
from tightfit.api.options.engines import Device, Threads
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import describe_write_error
from tightfit.core.options import (
    count_option,
    offer,
    path_option,
    switch_option,
    text_option,
    word_option,
)
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress
from tightfit.core.text import shorten
from tightfit.export.formats import GPTQ_TOOLS, format_words, read_formats

if TYPE_CHECKING:
    from tightfit.export.quantize.job import QuantizeCheck, QuantizeSummary
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.model_files import Artefact


MAX_CALIBRATION_ROWS = 65_536
MAX_ITERS = 10_000
MAX_QUALITY_TOKENS = 10**7

QUANTIZE_EXAMPLES = """\b
Examples:
  tightfit quantize runs/sql --to q4_k_m
  tightfit quantize ./my-model --to gptq-4 --calibrate train.jsonl
  tightfit quantize ./my-model --to fp8 --out my-model-fp8
  tightfit quantize ./my-model --to q8_0 --to q4_k_m --out shrunk
  tightfit quantize model-f16.gguf --to q5_k_m --no-importance
  tightfit quantize runs/sql --to all
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Shrink a model to fewer bits, and measure what was lost.

    q*: a GGUF file for llama.cpp, with its own mixture of types. gptq-*: a folder that
    transformers and vLLM load. fp8, w4a16, mxfp4, nvfp4: a folder in compressed-tensors'
    layout for vLLM, SGLang and transformers. nf4, int8: a folder for bitsandbytes. Each result is
    compared with the original before it is called good; one that fails is renamed and the command
    ends with 8.

    What an interrupted `--to all` has finished is not made again.
    """

    model: Annotated[
        str,
        model_argument(
            "MODEL|RUN",
            "A model folder, a run (its merged model), a cached hub id, or for q* an F16, "
            "BF16 or F32 GGUF file.",
            example="./my-model",
        ),
    ] = field(kw_only=False)
    to: list[str] | None = text_option(
        "|".join(format_words()),
        "The format. Repeatable; all: every one, with a table to compare them.",
        complete=offer(format_words()),
    )
    calibrate: Path | None = path_option(
        "Rows as `train` reads them, or text. [default: the run's data; without a run, "
        "Python's documentation]",
        example="train.jsonl",
    )
    rows: int | None = count_option(
        "Rows of 512 tokens to calibrate on. [default: 128 on a GPU, 32 on a CPU]",
        most=MAX_CALIBRATION_ROWS,
        example=64,
    )
    out: str | None = text_option(
        "FOLDER|FILE",
        "Where to. [default: beside the model; of a run RUN/quantized]",
        example="shrunk",
    )
    importance: bool = switch_option(
        "Weigh rounding errors of GGUF files by what each input carries. Needs the model "
        "in memory.",
        has_off=True,
        show_default=True,
        default=True,
    )
    iters: int | None = count_option(
        "Tuning steps of each layer for gptq-*, w4a16, mxfp4 and nvfp4. [default: 0; gptq-4 and "
        "w4a16 20, gptq-3 and gptq-2 50]",
        most=MAX_ITERS,
        example=50,
        least=0,
    )
    gptq_tool: str | None = word_option(GPTQ_TOOLS, "What makes gptq-*. [default: auto-round]")
    python: str | None = text_option(
        "FILE",
        "Python of an environment that has the GPTQ tool. [default: TIGHTFIT_GPTQ_PYTHON, else "
        "this one]",
        example="/opt/gptq/bin/python",
    )
    verify: bool = switch_option(
        "Compare results with the original.", has_off=True, show_default=True, default=True
    )
    text: Path | None = path_option(
        "Text to measure quality on. [default: a short one]", example="t.txt"
    )
    tokens: int | None = count_option(
        "Tokens of it to measure on. [default: 2048]", most=MAX_QUALITY_TOKENS, example=4096
    )
    device: Device = None
    threads: Threads = None
    force: bool = switch_option("Replace results that are there.")
    on_forecast: OnForecast | None = None
    """Called with a `QuantizeForecast` by format before anything is written."""
    progress: Progress | None = None


@accepts_keywords(QuantizeOptions)
def quantize(options: QuantizeOptions) -> QuantizeSummary:
    """Make and check every format of `to`. `find_error` of the result says what went wrong."""
    if not options.to:
        raise UsageError(
            "No format to quantize to was named.",
            remedy=f"tightfit quantize {shorten(options.model)} --to {'|'.join(format_words())}",
        )
    require_packages("Quantizing", "torch", "transformers", "gguf", extra="quantize")
    from tightfit.export.quantize.job import QuantizeRequest, quantize_model

    request = QuantizeRequest(
        model=options.model,
        formats=read_formats(options.to),
        out=None if options.out is None else Path(options.out).expanduser(),
        calibrate=options.calibrate,
        num_rows=options.rows,
        iters=options.iters,
        tool=options.gptq_tool or GPTQ_TOOLS[0],
        python=options.python,
        device=options.device or "auto",
        num_threads=options.threads or os.cpu_count() or 1,
        with_importance=options.importance,
        check=_make_check(options) if options.verify else None,
        force=options.force,
        announce=options.on_forecast,
        report=options.progress,
    )
    try:
        return quantize_model(request)
    except OSError as error:
        # A full or read-only disk can show in any of a hundred writes.
        where = Path(error.filename2 or error.filename or options.out or ".")
        raise SetupError(
            f"Cannot write {where}: {describe_write_error(error, where)}.",
            remedy="--out a folder that is writable and has free space; finished formats are kept",
        ) from error


def _make_check(options: QuantizeOptions) -> QuantizeCheck:
    from tightfit.export.verify.verify import DEFAULT_TOKENS, VerifyRequest, verify_models

    def check(reference: Artefact, others: Sequence[Artefact]) -> Verdict:
        return verify_models(
            VerifyRequest(
                reference=reference,
                others=tuple(others),
                text=options.text,
                num_tokens=options.tokens or DEFAULT_TOKENS,
                device=options.device or "auto",
                threads=options.threads,
                report=options.progress,
            )
        )

    return check
