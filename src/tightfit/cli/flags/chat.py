"""What `tightfit chat` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tightfit.cli.flags.engine_options import (
    Check,
    Context,
    Device,
    Engine_,
    Hosts,
    MaxNewTokens,
    MinP,
    Model,
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
from tightfit.cli.flags.options import Json, text_option

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

    model: Model
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
    check: Check = True
    as_json: Json = False
