"""What `tightfit quantize` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_model
from tightfit.cli.flags.engine_options import Device, Threads, natural_option
from tightfit.cli.flags.options import (
    Json,
    count_option,
    path_option,
    refuse_empty,
    text_option,
    word_option,
)

FORMATS = (
    "gptq-8", "gptq-4", "gptq-3", "gptq-2", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k",
    "nf4", "int8", "all",
)  # fmt: skip
"""Of `export/quantize/targets.py`, repeated so that `--help` needs no more; a test holds them
together."""
TOOLS = ("auto-round", "gptqmodel")
MAX_ROWS = 65_536
MAX_ITERS = 10_000
MAX_TOKENS = 10**7

EXAMPLES = """\b
Examples:
  tightfit quantize runs/sql --to q4_k_m
  tightfit quantize ./my-model --to gptq-4 --calibrate train.jsonl
  tightfit quantize ./my-model --to q8_0 --to q4_k_m --out shrunk
  tightfit quantize model-f16.gguf --to q5_k_m --no-importance
  tightfit quantize runs/sql --to all
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeFlags:
    """Shrink a model to fewer bits, and measure what was lost.

    q*: a GGUF file for llama.cpp, with its own mixture of types. gptq-*: a folder that
    transformers and vLLM load. nf4, int8: a folder for bitsandbytes. Each result is held against
    the original before it is called good; one that fails is renamed and the command ends with 8.

    What an interrupted `--to all` has finished is not made again.
    """

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="A model folder, a run (its merged model), a cached hub id, or for q* an F16, "
            "BF16 or F32 GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ]
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="|".join(FORMATS),
            help="The format. Repeatable; all: every one, with a table to compare them.",
            autocompletion=choices.offer(FORMATS),
            show_default=False,
        ),
    ] = None
    calibrate: Annotated[
        Path | None,
        path_option(
            "--calibrate",
            "Rows as `train` reads them, or text. [default: the run's data; without a run, "
            "Python's documentation]",
            example="train.jsonl",
        ),
    ] = None
    rows: Annotated[
        int | None,
        count_option(
            "--rows",
            "Rows of 512 tokens to calibrate on. [default: 128 on a GPU, 32 on a CPU]",
            most=MAX_ROWS,
            example=64,
        ),
    ] = None
    out: Annotated[
        str | None,
        text_option(
            "--out",
            "FOLDER|FILE",
            "Where to. [default: beside the model; of a run RUN/quantized]",
            example="shrunk",
        ),
    ] = None
    importance: Annotated[
        bool,
        typer.Option(
            "--importance/--no-importance",
            help="Weigh rounding errors of GGUF files by what each input carries. Needs the model "
            "in memory.",
            show_default=True,
        ),
    ] = True
    iters: Annotated[
        int | None,
        natural_option(
            "--iters",
            "Tuning steps of each layer for gptq-*. [default: 0, at 4 bits 20, at 3 and 2 bits 50]",
            most=MAX_ITERS,
            example=50,
        ),
    ] = None
    gptq_tool: Annotated[
        str | None, word_option("--gptq-tool", TOOLS, "What makes gptq-*. [default: auto-round]")
    ] = None
    python: Annotated[
        str | None,
        text_option(
            "--python",
            "FILE",
            "Python of an environment that has the GPTQ tool. [default: TIGHTFIT_GPTQ_PYTHON, else "
            "this one]",
            example="/opt/gptq/bin/python",
        ),
    ] = None
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Hold results against the original.", show_default=True
        ),
    ] = True
    text: Annotated[
        Path | None,
        path_option(
            "--text", "Text to measure quality on. [default: a short one]", example="t.txt"
        ),
    ] = None
    tokens: Annotated[
        int | None,
        count_option(
            "--tokens",
            "Tokens of it to measure on. [default: 2048]",
            most=MAX_TOKENS,
            example=4096,
        ),
    ] = None
    device: Device = None
    threads: Threads = None
    force: Annotated[bool, typer.Option("--force", help="Replace results that are there.")] = False
    as_json: Json = False
