"""What `tightfit farm` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_model
from tightfit.cli.flags.engine_options import (
    ENGINES,
    Check,
    Context,
    Device,
    Hosts,
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
)
from tightfit.cli.flags.options import (
    Json,
    count_option,
    number_option,
    path_option,
    refuse_empty,
    switch_option,
    text_option,
    word_option,
)
from tightfit.cli.flags.prompt_options import (
    Column,
    Limit,
    Out,
    Prompts,
    PromptTemplate,
    Raw,
    Samples,
    TemplateText,
    Whole,
)

RAY = "ray"
MAX_WORKERS = 100_000
MAX_LEASE_SECONDS = 86_400

EXAMPLES = """\b
Examples:
  tightfit farm ./my-model --prompts questions.txt --partitions all
  tightfit farm runs/sql --prompts rows.jsonl --partitions gpu,cpu --out answers.jsonl
  tightfit farm model.gguf --prompts questions.txt --partitions local --workers 4
  tightfit farm ./my-model --prompts questions.txt --partitions all --dry-run
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmFlags:
    """Answer the prompts of a file on many machines, once each.

    Workers on every partition take prompts from a folder beside the output, which every node must
    see; fast nodes take more. Answers are those of `tightfit generate`, in the prompts' order. A
    worker, a node or this command may die at any moment: what it held is done by others, and the
    same command goes on. Ctrl-C ends the workers; what was answered is kept.

    Prompts that cannot be answered are listed in OUT.failed.jsonl, and the exit code is then 1.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|RUN]",
            help="A run, an adapter, a model folder, a cached hub id or a GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("MODEL", "runs/sql"),
            show_default=False,
        ),
    ] = None
    model_option: Annotated[
        str | None,
        text_option("--model", "MODEL|RUN", "The same as an option.", example="runs/sql"),
    ] = None
    prompts: Prompts = None
    partitions: Annotated[
        str | None,
        text_option(
            "--partitions",
            "all|NAME,...|local|k8s",
            "Where workers run: Slurm's partitions, this machine, or Kubernetes. [default: local]",
            example="gpu,cpu",
        ),
    ] = None
    workers: Annotated[
        int | None,
        count_option(
            "--workers",
            "Most workers in each partition. [default: one for each GPU and each CPU node]",
            most=MAX_WORKERS,
            example=8,
        ),
    ] = None
    out: Out = None
    n: Samples = None
    limit: Limit = None
    column: Column = None
    template: PromptTemplate = None
    template_text: TemplateText = None
    whole: Whole = False
    raw: Raw = False
    system: System = None
    max_new_tokens: MaxNewTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None
    stop: Stop = None
    engine: Annotated[
        str | None,
        word_option(
            "--engine",
            (*ENGINES, RAY),
            "What computes; ray: workers run on the Ray cluster of RAY_ADDRESS. [default: auto]",
        ),
    ] = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    parallel: Parallel = None
    threads: Threads = None
    hosts: Hosts = None
    settings: Settings = None
    lease: Annotated[
        float | None,
        number_option(
            "--lease",
            "Seconds of silence after which a worker is taken for dead. [default: 60]",
            most=MAX_LEASE_SECONDS,
            example=60,
        ),
    ] = None
    fresh: Annotated[
        bool,
        switch_option("--fresh", "Begin again: forget earlier answers and replace the output."),
    ] = False
    dry_run: Annotated[
        bool,
        switch_option("--dry-run", "Show where workers would run and what is expected of them."),
    ] = False
    check: Check = True
    stats: Annotated[
        Path | None,
        path_option("--stats", "Write the statistics there too, as JSON.", example="stats.json"),
    ] = None
    as_json: Json = False


def read_engine(word: str | None) -> str | None:
    """One of the engines, or `ray`."""
    if word is None:
        return None
    plain = word.strip().lower()
    if plain == "llama":
        return "llama.cpp"
    return choices.read_word(plain, (*ENGINES, RAY), option="--engine")
