"""What `tightfit convert` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.options import Json, refuse_empty, text_option, word_option

FORMATS = ("gguf", "hf")
DTYPES = ("f16", "bf16", "f32")

EXAMPLES = """\b
Examples:
  tightfit convert ./my-model --to gguf
  tightfit convert ./Llama-2-7b --to hf
  tightfit convert model.Q4_K_M.gguf --to hf --dtype bf16 --out my-model
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertFlags:
    """Turn a model into another format, tensor by tensor.

    Meta's original Llama files (params.json, consolidated.*.pth, tokenizer.model) and GGUF files
    become a Hugging Face folder; a Hugging Face folder becomes a GGUF file. Families: llama,
    mistral, qwen2, qwen3, gemma 1 to 3 (text), phi3, gpt2, falcon, bloom. Others are refused.

    A GGUF's tokenizer is checked: llama.cpp must cut text as the model's own tokenizer does.
    """

    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A model folder, a finished full-tuning run, Meta's folder or a GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("SOURCE", "./my-model"),
            show_default=False,
        ),
    ]
    to: Annotated[
        str | None,
        word_option("--to", FORMATS, "The new format. [default: the other one]"),
    ] = None
    dtype: Annotated[
        str | None,
        word_option(
            "--dtype", DTYPES, "How matrices are stored. [default: f16 in a GGUF, else as they are]"
        ),
    ] = None
    out: Annotated[
        str | None,
        text_option(
            "--out",
            "PATH",
            "Where the result goes. [default: beside the source, NAME-f16.gguf or NAME-hf]",
            example="my-model.gguf",
        ),
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Replace a result that is there already.")
    ] = False
    as_json: Json = False
