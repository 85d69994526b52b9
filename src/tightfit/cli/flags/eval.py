"""What `tightfit eval` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_model
from tightfit.cli.flags.options import Json, count_option, refuse_empty, text_option

METRICS = ("auto", "loss", "exact", "rouge", "execution")
MAX_ROWS = 10**9
MAX_EVAL_BATCH = 65_536
MAX_NEW_TOKENS = 1_048_576

EXAMPLES = """\b
Examples:
  tightfit eval runs/sql --data test.jsonl
  tightfit eval runs/sql --data test.jsonl --databases databases --limit 100
  tightfit eval runs/summaries --data samsum_test.jsonl --metric rouge
  tightfit eval runs/sql --data test.jsonl --beside runs/sql/merged --beside small.gguf
  tightfit eval ./my-model --data wiki.txt --metric loss --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFlags:
    """Score a run or a model on a data file, before and after tuning.

    A run's model, template and sequence length come from its plan. Metrics by what the data
    is: loss and perplexity always; ROUGE for summaries; for text-to-SQL whether the answer's
    query finds what the gold query finds, and exact match; exact match elsewhere.

    Queries run read-only and time-limited. Results agree as multisets of rows, in order where
    the gold query is ordered, columns as given.
    """

    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run folder, an adapter folder, a model folder, a cached hub id or a GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("RUN", "runs/sql"),
            show_default=False,
        ),
    ]
    data: Annotated[
        str | None,
        text_option("--data", "FILE", "Rows that were not trained on.", example="test.jsonl"),
    ] = None
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="|".join(METRICS),
            help="What to measure. Repeatable. [default: auto]",
            autocompletion=choices.offer(METRICS),
            show_default=False,
        ),
    ] = None
    databases: Annotated[
        str | None,
        text_option(
            "--databases",
            "FOLDER",
            "Folder with NAME.sqlite for the rows' db_id. [default: databases/ beside the data; "
            "without one, synthetic rows in the tables that each row shows]",
            example="databases",
        ),
    ] = None
    limit: Annotated[
        int | None,
        count_option("--limit", "Only the first N rows.", most=MAX_ROWS, example=100),
    ] = None
    batch: Annotated[
        int | None,
        count_option(
            "--batch",
            "Answers generated at a time. [default: 16]",
            most=MAX_EVAL_BATCH,
            example=16,
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        count_option(
            "--max-new-tokens",
            "Longest answer. [default: the longest gold answer and 32 more]",
            most=MAX_NEW_TOKENS,
            example=128,
        ),
    ] = None
    base: Annotated[
        bool,
        typer.Option("--base/--no-base", help="Score the base model too.", show_default=True),
    ] = True
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--beside",
            metavar="MODEL|FILE",
            help="Score another artefact of the same model too: merged, quantized, a GGUF file. "
            "Repeatable.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    save: Annotated[
        str | None,
        text_option(
            "--save",
            "FOLDER",
            "Folder for the scores and every answer. [default: RUN/eval]",
            example="scores",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="template=NAME",
            help="Read the rows with another template than the run's or the tokenizer's.",
            show_default=False,
        ),
    ] = None
    as_json: Json = False
