"""What `tightfit verify` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.engine_options import Device, Threads
from tightfit.cli.flags.options import Json, count_option, path_option, refuse_empty, text_option

MAX_TOKENS = 10**8

EXAMPLES = """\b
Examples:
  tightfit verify runs/sql runs/sql/merged
  tightfit verify runs/sql/merged model-f16.gguf model-q8_0.gguf model-q4_k_m.gguf
  tightfit verify ./model ./model-gptq-4 --text wiki.test.raw --tokens 100000 --html report.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFlags:
    """Hold models against the one they were made from.

    Compares scores (most likely token, KL divergence, perplexity), greedy answers, the rendered
    chat template, how text is cut into tokens, special tokens and where answers stop. How much
    may differ depends on what was done: nothing for a merge, little for 8 bit, more for 4 bit;
    3 and 2 bit are reported. Ends with 0 where all pass and with 8 where one does not.
    """

    reference: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE",
            help="What the others were made from: a run, an adapter, a model folder or a GGUF "
            "file.",
            autocompletion=complete_model,
            callback=refuse_empty("REFERENCE", "runs/sql"),
            show_default=False,
        ),
    ]
    others: Annotated[
        list[str],
        typer.Argument(
            metavar="OTHER...",
            help="Models to check.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ]
    text: Annotated[
        str | None,
        text_option(
            "--text",
            "FILE",
            "Text to score. [default: a page of our own, and rows of the run]",
            example="wiki.test.raw",
        ),
    ] = None
    prompts: Annotated[
        str | None,
        text_option(
            "--prompts",
            "FILE",
            "Prompts to answer: one on each line, or rows as `train` reads them.",
            example="prompts.txt",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        count_option(
            "--tokens",
            "Most tokens of the text to score. [default: 2048]",
            most=MAX_TOKENS,
            example=2048,
        ),
    ] = None
    step: Annotated[
        str | None,
        text_option(
            "--as",
            "KIND",
            "Judge every model as this kind: exact, format, 8-bit, int8, 6-bit, 5-bit, 4-bit, "
            "gptq-4, nf4, 3-bit or 2-bit. [default: told from the files]",
            example="8-bit",
        ),
    ] = None
    device: Device = None
    threads: Threads = None
    html: Annotated[
        str | None,
        path_option("--html", "Write the report as a page, with plots.", example="report.html"),
    ] = None
    as_json: Json = False
