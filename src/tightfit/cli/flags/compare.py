"""What `tightfit compare` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.engine_options import (
    Context,
    Device,
    Engine_,
    MaxNewTokens,
    MinP,
    Parallel,
    RepetitionPenalty,
    Seed,
    Settings,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    Weights,
    natural_option,
)
from tightfit.cli.flags.options import Json, path_option, refuse_empty, text_option

MAX_PORT = 65_535

EXAMPLES = """\b
Examples:
  tightfit compare runs/sql                      the base model beside the tuned one
  tightfit compare ./my-model my-model.Q4_K_M.gguf
  tightfit compare runs/sql runs/sql-2 --votes votes.jsonl --port 0
  tightfit compare A B --host 0.0.0.0 --password WORD
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareFlags:
    """Open a web page with two models side by side.

    A run alone is compared with its own base model. The page also has a chat with either
    model, a planner and the runs that are here. It fetches nothing from other machines, and
    only this machine can open it unless a host and a password are given.
    """

    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A run, an adapter, a model folder, a cached hub id or a GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("A", "runs/sql"),
            show_default=False,
        ),
    ]
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            help="What it is compared with. [default: A is tuned, and its base model is shown "
            "beside it]",
            autocompletion=complete_model,
            callback=refuse_empty("B", "model.gguf"),
            show_default=False,
        ),
    ] = None
    votes: Annotated[
        Path | None,
        path_option(
            "--votes",
            "File that votes are added to. [default: votes.jsonl in the run's folder, or here]",
            example="votes.jsonl",
        ),
    ] = None
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time", help="Hold one model in memory at a time; slower, half the memory."
        ),
    ] = False
    host: Annotated[
        str | None,
        text_option(
            "--host",
            "ADDRESS",
            "Address to listen on; other than loopback needs --password. [default: 127.0.0.1]",
            example="0.0.0.0",
        ),
    ] = None
    port: Annotated[
        int | None,
        natural_option(
            "--port",
            "Port to listen on; 0: any that is free. [default: 7860]",
            most=MAX_PORT,
            example=7860,
        ),
    ] = None
    password: Annotated[
        str | None,
        text_option(
            "--password",
            "WORD",
            "Asked for when the page is opened. [default: TIGHTFIT_PASSWORD, or none]",
            example="a-long-word",
        ),
    ] = None
    system: System = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    max_new_tokens: MaxNewTokens = None
    seed: Seed = None
    stop: Stop = None
    engine: Engine_ = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    parallel: Parallel = None
    threads: Threads = None
    settings: Settings = None
    as_json: Json = False
