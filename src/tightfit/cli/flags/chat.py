"""What `tightfit chat` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.engine_options import (
    Context,
    Device,
    Engine_,
    Hosts,
    MaxNewTokens,
    MinP,
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
)
from tightfit.cli.flags.options import Json, refuse_empty, text_option

EXAMPLES = """\b
Examples:
  tightfit chat runs/sql
  tightfit chat model.gguf --system 'Answer in one sentence.' --temperature 0.7
  tightfit chat ./my-model --weights nf4 --once 'What is the capital of Norway?'
  echo 'What is the capital of Norway?' | tightfit chat ./my-model
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """Talk to a model in the terminal.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves. Where stdin is no terminal,
    each line is a message, and only answers are printed.
    """

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="A run, an adapter, a model folder, a cached hub id or a GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("MODEL", "runs/sql"),
            show_default=False,
        ),
    ]
    once: Annotated[
        str | None,
        text_option("--once", "TEXT", "Answer this one message and leave.", example="'Hello'"),
    ] = None
    system: System = None
    max_new_tokens: MaxNewTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None
    stop: Stop = None
    engine: Engine_ = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    threads: Threads = None
    hosts: Hosts = None
    settings: Settings = None
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Refuse to load what is predicted not to fit.",
            show_default=True,
        ),
    ] = True
    as_json: Json = False
