"""`convert`: turn a model into another file format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tightfit.api.call import accepts_keywords
from tightfit.api.options.common import OnForecast, model_argument
from tightfit.core.options import switch_option, text_option, word_option
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress
from tightfit.export.formats import CONVERT_DTYPES, CONVERT_FORMATS

if TYPE_CHECKING:
    from tightfit.export.convert import ConvertResult


CONVERT_EXAMPLES = """\b
Examples:
  tightfit convert ./my-model --to gguf
  tightfit convert ./Llama-2-7b --to hf
  tightfit convert model.Q4_K_M.gguf --to hf --dtype bf16 --out my-model
  tightfit convert runs/sql --to gguf-lora
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Turn a model into another format, tensor by tensor.

    Meta's original Llama files (params.json, consolidated.*.pth, tokenizer.model) and GGUF files
    become a Hugging Face folder; a Hugging Face folder becomes a GGUF file. A family that is not
    known, or a setting that llama.cpp would ignore, is refused by name, with the families that are.

    An adapter becomes a GGUF file of its own with --to gguf-lora, for llama.cpp to load beside its
    base's GGUF file.

    A GGUF's tokenizer is checked: llama.cpp must cut text as the model's own tokenizer does.
    """

    source: Annotated[
        str,
        model_argument(
            "SOURCE",
            "A model folder, a finished run, an adapter, Meta's folder or a GGUF file.",
            example="./my-model",
        ),
    ] = field(kw_only=False)
    to: str | None = word_option(CONVERT_FORMATS, "The new format. [default: the other one]")
    dtype: str | None = word_option(
        CONVERT_DTYPES,
        "How matrices are stored. [default: f16 in a GGUF, f32 in a gguf-lora, else as they are]",
    )
    out: str | None = text_option(
        "PATH",
        "Where the result goes. [default: beside the source, NAME-f16.gguf, NAME-hf or "
        "NAME-lora-f32.gguf]",
        example="my-model.gguf",
    )
    force: bool = switch_option("Replace a result that is there already.")
    on_forecast: OnForecast | None = None
    """Called with source, target and `ConvertForecast` before anything is written."""
    progress: Progress | None = None


@accepts_keywords(ConvertOptions)
def convert(options: ConvertOptions) -> ConvertResult:
    """Write the model as a GGUF file or a Hugging Face folder, or an adapter as a GGUF file."""
    require_packages("Converting", "torch", "transformers")
    require_packages("Converting", "gguf", extra="gguf")
    from tightfit.export.convert import plan_conversion

    conversion = plan_conversion(
        options.source,
        to=options.to,
        dtype=options.dtype,
        target=None if options.out is None else Path(options.out).expanduser(),
        force=options.force,
    )
    if options.on_forecast is not None:
        options.on_forecast(conversion.source, conversion.target, conversion.forecast)
    return conversion.run(options.progress)
