"""What `tightfit generate` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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
    path_option,
    switch_option,
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

EXAMPLES = """\b
Examples:
  tightfit generate runs/sql --prompts questions.txt --out answers.jsonl
  tightfit generate model.gguf --prompts rows.jsonl --n 4 --temperature 0.8 --seed 1
  tightfit generate ./my-model --prompts rows.csv --template-text 'Summarize: {article}' --dry-run
  cat questions.txt | tightfit generate ./my-model --prompts - --out answers.jsonl --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    """Answer every prompt of a file, once each.

    Prompts: text with one in each line, or JSON, JSON Lines, CSV and Parquet rows in the formats
    that `train` reads; a row's own answer is not sent. Answers stand in the prompts' order, one
    row for each prompt and sample, in a form that `tightfit train` reads.

    A run that was interrupted, even by kill -9, goes on with the same command. Prompts that cannot
    be answered are listed in OUT.failed.jsonl, and the exit code is then 1. At the end: tokens per
    second, latencies, memory, bandwidth and FLOPs against the device's limits, and what held the
    run back.
    """

    model: Model
    prompts: Prompts = None
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
    engine: Engine_ = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    parallel: Parallel = None
    threads: Threads = None
    hosts: Hosts = None
    settings: Settings = None
    fresh: Annotated[
        bool,
        switch_option("--fresh", "Begin again: forget earlier answers and replace the output."),
    ] = False
    dry_run: Annotated[
        bool,
        switch_option("--dry-run", "Show the first prompts as they are sent, and the prediction."),
    ] = False
    check: Check = True
    stats: Annotated[
        Path | None,
        path_option("--stats", "Write the statistics there too, as JSON.", example="stats.json"),
    ] = None
    as_json: Json = False
