"""What `tightfit prepare` accepts. None: not given, so a recipe or a default says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.choices import empty_value
from tightfit.cli.completion import complete_job
from tightfit.cli.flags.options import (
    EvalRows,
    Json,
    SeqLen,
    Template,
    count_option,
    path_option,
    refuse_empty,
    text_option,
    word_option,
)

TRAIN_ON = ("answers", "all")
MAX_SHOWN = 1000
MAX_ROW = 10**12
EXAMPLES = """\b
Examples:
  tightfit prepare ./SmolLM2-135M --data train.jsonl
  tightfit prepare recipe.yaml --show 5               five rows, what is trained in colour
  tightfit prepare recipe.yaml --row 812              the row that a message names
  tightfit prepare ./Llama-2-7b --data chats.json --template llama-2 --seq-len 4096
  tightfit prepare ./gemma-2-2b --data a.jsonl --data 'b.jsonl[:10%]' --eval 0.05 --chart len.png
"""


def _refuse_empty_files(values: list[str] | None) -> list[str] | None:
    if any(not value.strip() for value in values or ()):
        raise empty_value("--data", "train.jsonl")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFlags:
    """Encode data as `train` will, and show what becomes of it.

    Rows, tokens, lengths, packing, every fault with its row, and which words are trained. The
    encoding is kept: `tightfit train` on the same data finds it. Needs the model's tokenizer and
    config.json, not its weights.
    """

    job: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE.YAML|MODEL",
            help="A recipe; or a model's folder, cached hub id or GGUF file.",
            autocompletion=complete_job,
            callback=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ]
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Rows to train on, in place of the recipe's. Repeatable.",
            callback=_refuse_empty_files,
            show_default=False,
        ),
    ] = None
    seq_len: SeqLen = None
    template: Template = None
    eval: EvalRows = None
    take: Annotated[
        str | None,
        text_option(
            "--take",
            "PART",
            "Only a part of the training rows: 100, 1%, '[:10%]' or 'train[10:20]'.",
            example="1%",
        ),
    ] = None
    train_on: Annotated[
        str | None,
        word_option("--train-on", TRAIN_ON, "Which tokens carry loss. [default: answers]"),
    ] = None
    show: Annotated[
        int | None,
        count_option(
            "--show",
            "Rows to show with their mask, spread over the data. [default: 1]",
            most=MAX_SHOWN,
            example=3,
        ),
    ] = None
    row: Annotated[
        int | None,
        count_option(
            "--row", "Show the row at this line, as messages count.", most=MAX_ROW, example=812
        ),
    ] = None
    chart: Annotated[
        Path | None,
        path_option(
            "--chart", "Draw the lengths into a .png or .html file.", example="lengths.png"
        ),
    ] = None
    skip_faulty: Annotated[
        bool,
        typer.Option("--skip-faulty", help="Report on the other rows where some cannot be read."),
    ] = False
    as_json: Json = False
