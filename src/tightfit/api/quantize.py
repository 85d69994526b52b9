"""`quantize`: make a model smaller and compare the results with the original."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.call import accepts_keywords
from tightfit.api.options import choices
from tightfit.api.options.export import QuantizeOptions
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.packages import require_packages
from tightfit.core.text import shorten
from tightfit.export.formats import GPTQ_TOOLS, format_words, read_formats

if TYPE_CHECKING:
    from tightfit.export.quantize.quantize import QuantizeCheck
    from tightfit.export.quantize.summary import QuantizeSummary
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.artefacts import Artefact


@accepts_keywords(QuantizeOptions)
def quantize(options: QuantizeOptions) -> QuantizeSummary:
    """Make and check every format of `to`. `find_error` of the result says what went wrong."""
    if not options.to:
        raise UsageError(
            "No format to quantize to was named.",
            remedy=f"tightfit quantize {shorten(options.model)} --to {'|'.join(format_words())}",
        )
    tool = choices.read_word(options.gptq_tool or GPTQ_TOOLS[0], GPTQ_TOOLS, option="--gptq-tool")
    require_packages("Quantizing", "torch", "transformers", "gguf", extra="quantize")
    from tightfit.export.quantize.job import QuantizeSettings
    from tightfit.export.quantize.quantize import QuantizeRequest, quantize_model

    request = QuantizeRequest(
        model=options.model,
        formats=read_formats(options.to),
        out=None if options.out is None else Path(options.out).expanduser(),
        options=QuantizeSettings(
            calibrate=options.calibrate,
            num_rows=options.rows,
            iters=options.iters,
            tool=tool,
            python=options.python,
            device=options.device or "auto",
            num_threads=options.threads or os.cpu_count() or 1,
            with_importance=options.importance,
        ),
        check=_make_check(options) if options.verify else None,
        force=options.force,
        announce=options.on_forecast,
        report=options.progress,
    )
    try:
        return quantize_model(request)
    except OSError as error:
        # A full or read-only disk can show in any of a hundred writes.
        where = f" {error.filename2 or error.filename}" if error.filename else ""
        raise SetupError(
            f"Cannot write{where}: {error.strerror or error}.",
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
