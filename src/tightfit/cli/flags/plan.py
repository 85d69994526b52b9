"""What `tightfit plan` accepts. None: not given, so a recipe or the planner says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.completion import complete_job
from tightfit.cli.flags.options import (
    MAX_TOP,
    EffectiveBatch,
    Epochs,
    Json,
    Network,
    On,
    PlanMethod,
    SeqLen,
    Settings,
    Trace,
    count_option,
    path_option,
    refuse_empty,
)

EXAMPLES = """\b
Examples:
  tightfit plan Llama-2-7b --on 4xV100-32GB
  tightfit plan Qwen2.5-7B --on RTX-4090 --data train.jsonl --seq-len 4096 --save plan.json
  tightfit plan job.yaml --on slurm:gpu --explain
  tightfit plan Llama-3.1-70B --on '2n x 8xA100-80GB' --network 100Gb/s --json
  tightfit plan plan.json
  tightfit plan Llama-3.1-8B --method full --buy --chart memory.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The best ways to run a job on given hardware, and why.

    Searches method, precision, sharding, offload, micro-batch, checkpointing, kernels, optimizer
    and node count. Best first: what fits comes before what is tight, then the faster, where
    full tuning, quantized weights and extra packages must be clearly faster to come first.
    """

    job: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RECIPE.YAML|PLAN.JSON",
            help="Catalogue name, cached hub id, folder with config.json or GGUF file; a recipe; "
            "or a saved plan, to be shown again.",
            autocompletion=complete_job,
            callback=refuse_empty("MODEL", "Llama-2-7b"),
            show_default=False,
        ),
    ]
    on: On = None
    network: Network = None
    seq_len: SeqLen = None
    data: Annotated[
        Path | None,
        path_option(
            "--data",
            "Dataset; its real lengths drive padding, packing and time.",
            example="train.jsonl",
        ),
    ] = None
    method: PlanMethod = None
    epochs: Epochs = None
    effective_batch: EffectiveBatch = None
    top: Annotated[
        int, count_option("--top", "How many plans to show. [default: 5]", most=MAX_TOP, example=5)
    ] = 5
    explain: Annotated[
        bool, typer.Option("--explain", help="List what was excluded and the reason of each.")
    ] = False
    save: Annotated[
        Path | None, path_option("--save", "Write the best plan as JSON.", example="plan.json")
    ] = None
    buy: Annotated[bool, typer.Option("--buy", help="The cheapest hardware that does the job.")] = (
        False
    )
    chart: Annotated[
        Path | None,
        path_option(
            "--chart", "Draw memory by phase into a .png or .html file.", example="memory.html"
        ),
    ] = None
    settings: Settings = None
    trace: Trace = None
    as_json: Json = False
