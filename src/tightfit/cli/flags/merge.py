"""What `tightfit merge` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.options import Json, refuse_empty, text_option, word_option

DTYPES = ("auto", "fp32", "bf16", "fp16")

EXAMPLES = """\b
Examples:
  tightfit merge runs/sql
  tightfit merge runs/sql --out sql-model --dtype bf16
  tightfit merge ./my-adapter --out my-model --max-shard-size 2GB
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFlags:
    """Add a run's adapter to its base model.

    The result is one folder that any program can load. Each matrix is added to in fp32 and
    stored as the base has it; a QLoRA run is merged into the unquantized base. The model is read
    and written tensor by tensor, so that little memory is enough. Tokenizer, chat template of the
    training and generation settings go along.

    The result is checked against the adapter; one that fails is kept as NAME.rejected.
    """

    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ADAPTER",
            help="A run folder or an adapter folder.",
            autocompletion=complete_model,
            callback=refuse_empty("RUN", "runs/sql"),
            show_default=False,
        ),
    ]
    out: Annotated[
        str | None,
        text_option(
            "--out",
            "FOLDER",
            "Where the model goes. [default: RUN/merged, or ADAPTER-merged]",
            example="my-model",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        word_option("--dtype", DTYPES, "How values are stored. [default: auto: as the base's]"),
    ] = None
    max_shard_size: Annotated[
        str | None,
        text_option(
            "--max-shard-size", "SIZE", "Largest weight file. [default: 5GB]", example="5GB"
        ),
    ] = None
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Check the result against the adapter on a small sample.",
            show_default=True,
        ),
    ] = True
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model that is there already.")
    ] = False
    as_json: Json = False
