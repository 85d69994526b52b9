"""What `tightfit plan` accepts. None: not given, so a recipe or the planner says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_job
from tightfit.cli.flags.options import Json, On, Settings, count_option, word_option

EXAMPLES = """\b
Examples:
  tightfit plan Llama-2-7b --on 4xV100-32GB
  tightfit plan Qwen2.5-7B --on RTX-4090 --data train.jsonl --seq-len 4096 --save plan.json
  tightfit plan job.yaml --on slurm:gpu --explain
  tightfit plan Llama-3.1-70B --on '2n x 8xA100-80GB' --method full --json
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
            metavar="MODEL|RECIPE.YAML",
            help="Catalogue name, cached hub id, folder with config.json, GGUF file, or a recipe.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ]
    on: On = None
    seq_len: Annotated[
        int | None, count_option("--seq-len", "Tokens per sequence. [default: 2048]")
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Dataset; its real lengths drive padding, packing and time.",
            show_default=False,
        ),
    ] = None
    method: Annotated[
        str | None,
        word_option("--method", choices.PLAN_METHODS, "What is trained. [default: auto]"),
    ] = None
    epochs: Annotated[
        float | None,
        typer.Option(
            "--epochs", metavar="X", help="Passes over the data. [default: 1]", show_default=False
        ),
    ] = None
    effective_batch: Annotated[
        int | None,
        count_option("--effective-batch", "Sequences per optimizer step, over all GPUs."),
    ] = None
    top: Annotated[int, count_option("--top", "How many plans to show. [default: 5]")] = 5
    explain: Annotated[
        bool, typer.Option("--explain", help="List what was excluded and the reason of each.")
    ] = False
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Write the best plan as JSON.", show_default=False
        ),
    ] = None
    buy: Annotated[bool, typer.Option("--buy", help="The cheapest hardware that does the job.")] = (
        False
    )
    chart: Annotated[
        Path | None,
        typer.Option(
            "--chart",
            metavar="FILE",
            help="Draw memory by phase into a .png or .html file.",
            show_default=False,
        ),
    ] = None
    settings: Settings = None
    as_json: Json = False
