"""`convert`: turn a model into another file format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.call import accepts_keywords
from tightfit.api.options import choices
from tightfit.api.options.export import ConvertOptions
from tightfit.core.packages import require_packages
from tightfit.export.formats import CONVERT_DTYPES, CONVERT_FORMATS

if TYPE_CHECKING:
    from tightfit.export.convert import ConvertResult


@accepts_keywords(ConvertOptions)
def convert(options: ConvertOptions) -> ConvertResult:
    """Write the model as a GGUF file or a Hugging Face folder."""
    to = options.to and choices.read_word(options.to, CONVERT_FORMATS, option="--to")
    dtype = options.dtype and choices.read_word(options.dtype, CONVERT_DTYPES, option="--dtype")
    require_packages("Converting", "torch", "transformers")
    require_packages("Converting", "gguf", extra="gguf")
    from tightfit.export.convert import ConvertRequest, convert_model

    return convert_model(
        ConvertRequest(
            source=options.source,
            to=to,
            dtype=dtype,
            target=None if options.out is None else Path(options.out).expanduser(),
            force=options.force,
            announce=options.on_forecast,
            report=options.progress,
        )
    )
