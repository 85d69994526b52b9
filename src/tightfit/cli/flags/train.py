"""What `tightfit train` accepts. None: not given, so a recipe or the planner says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.completion import complete_job
from tightfit.cli.flags.options import (
    MAX_WORLD_SIZE,
    EffectiveBatch,
    Epochs,
    EvalRows,
    Json,
    Network,
    On,
    PlanMethod,
    SeqLen,
    Settings,
    Template,
    count_option,
    path_option,
    refuse_empty,
    switch_option,
    text_option,
)
from tightfit.cli.flags.training_options import (
    Again,
    Data,
    Fresh,
    LearningRate,
    LogTo,
    MaxSteps,
    MemoryLimit,
    PlanNumber,
    TrainingSeed,
)

EXAMPLES = """\b
Examples:
  tightfit train recipe.yaml
  tightfit train recipe.yaml                 the same again: goes on where it stopped
  tightfit train ./SmolLM2-135M --data train.jsonl --on here --eval 0.05
  tightfit train recipe.yaml --method qlora --seq-len 4096 --dry-run
  tightfit train plan.json --data train.jsonl --output runs/mine
  tightfit train runs/mine                   goes on with a run by its folder
  tightfit train recipe.yaml --nodes 2 --rendezvous node1:29500     (on both nodes)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags:
    """Plan, show the plan, tune, and report.

    Data is encoded and checked before any process starts. Out of memory, the run goes on with
    the next smaller plan. Ctrl-C and SIGTERM save first; the same command resumes.
    """

    job: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE.YAML|MODEL|PLAN.JSON|RUN",
            help="A recipe; a folder with weights, cached hub id or GGUF file; a saved plan; or "
            "the folder of a run, to go on with it.",
            autocompletion=complete_job,
            callback=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ]
    data: Data = None
    eval: EvalRows = None
    on: On = None
    network: Network = None
    method: PlanMethod = None
    seq_len: SeqLen = None
    epochs: Epochs = None
    max_steps: MaxSteps = None
    lr: LearningRate = None
    effective_batch: EffectiveBatch = None
    template: Template = None
    seed: TrainingSeed = None
    settings: Settings = None
    plan: PlanNumber = 1
    output: Annotated[
        Path | None,
        path_option(
            "--output", "Folder of the run. [default: runs/MODEL-METHOD-N]", example="runs/mine"
        ),
    ] = None
    memory_limit: MemoryLimit = None
    log_to: LogTo = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen; start nothing.")
    ] = False
    fresh: Fresh = False
    again: Again = False
    nodes: Annotated[
        int,
        count_option(
            "--nodes", "Nodes that run this same command. [default: 1]", most=MAX_WORLD_SIZE,
            example=2,
        ),
    ] = 1  # fmt: skip
    rendezvous: Annotated[
        str | None,
        text_option(
            "--rendezvous", "HOST:PORT", "Where several nodes meet.", example="node1:29500"
        ),
    ] = None
    node_rank: Annotated[
        str | None,
        text_option("--node-rank", "N", "This node's number, where hosts share a name.",
                    example="0"),
    ] = None  # fmt: skip
    local_addr: Annotated[
        str | None,
        text_option(
            "--local-addr", "ADDRESS", "How other nodes reach this one.", example="10.0.0.2"
        ),
    ] = None
    interface: Annotated[
        str | None,
        text_option("--interface", "NAME", "Network device between nodes.", example="ib0"),
    ] = None
    as_planned: Annotated[
        bool,
        switch_option(
            "--as-planned", "Run a run folder's plan as it is, without a look at the hardware."
        ),
    ] = False
    as_json: Json = False
