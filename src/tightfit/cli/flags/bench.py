"""What `tightfit bench` accepts. None: not given, so a recipe or the planner says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.completion import complete_job
from tightfit.cli.flags.options import (
    MAX_TOP,
    EffectiveBatch,
    Json,
    On,
    PlanMethod,
    SeqLen,
    Settings,
    Template,
    count_option,
    number_option,
    path_option,
    refuse_empty,
    switch_option,
)
from tightfit.cli.flags.training_options import MAX_STEPS, MemoryLimit

EXAMPLES = """\b
Examples:
  tightfit bench recipe.yaml
  tightfit bench ./SmolLM2-135M --data train.jsonl --method lora --on here
  tightfit bench recipe.yaml --top 5 --chart plans.png --out plans.json
  tightfit bench Llama-3.1-8B --random-weights --seq-len 4096 --steps 10
  tightfit bench plan.json
  tightfit bench recipe.yaml --method lora --all-levers --minutes 30
"""
DEFAULT_STEPS = 20
DEFAULT_WARM_UP = 3
DEFAULT_LEVERS = 50
MAX_MINUTES = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """Run a plan for a few steps here; predicted beside measured.

    Each plan runs in processes of its own, as `train` would run it. Nothing is kept but the
    figures. Without data, rows are random tokens of full length.
    """

    job: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE.YAML|MODEL|PLAN.JSON|RUN",
            help="A recipe; a folder with weights, cached hub id or GGUF file; with "
            "--random-weights also a catalogue name; a saved plan or a run, for its plan alone.",
            autocompletion=complete_job,
            callback=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ]
    data: Annotated[
        Path | None,
        path_option("--data", "Rows to measure with.", example="train.jsonl"),
    ] = None
    on: On = None
    method: PlanMethod = None
    seq_len: SeqLen = None
    effective_batch: EffectiveBatch = None
    template: Template = None
    settings: Settings = None
    steps: Annotated[
        int,
        count_option(
            "--steps",
            f"Steps to measure. [default: {DEFAULT_STEPS}]",
            most=MAX_STEPS,
            example=DEFAULT_STEPS,
        ),
    ] = DEFAULT_STEPS
    warm_up: Annotated[
        int,
        count_option(
            "--warm-up",
            f"Steps before them that do not count. [default: {DEFAULT_WARM_UP}]",
            most=MAX_STEPS,
            example=DEFAULT_WARM_UP,
        ),
    ] = DEFAULT_WARM_UP
    top: Annotated[
        int | None,
        count_option(
            "--top",
            f"Measure the planner's first N plans. [default: 1; {DEFAULT_LEVERS} with "
            "--all-levers]",
            most=MAX_TOP,
            example=5,
        ),
    ] = None
    all_levers: Annotated[
        bool,
        switch_option(
            "--all-levers", "Measure every legal setting of the levers, best predicted first."
        ),
    ] = False
    minutes: Annotated[
        float | None,
        number_option(
            "--minutes", "Start no further plan after this long.", most=MAX_MINUTES, example=30
        ),
    ] = None
    random_weights: Annotated[
        bool,
        switch_option(
            "--random-weights", "Draw the weights: the model's shape is enough, as for a catalogue "
            "name.",
        ),
    ] = False  # fmt: skip
    synthetic: Annotated[
        bool,
        switch_option(
            "--synthetic", "Random tokens in place of the data's, in rows as long as its own."
        ),
    ] = False
    memory_limit: MemoryLimit = None
    out: Annotated[
        Path | None,
        path_option(
            "--out", "Write the figures as JSON, anew after each plan.", example="plans.json"
        ),
    ] = None
    chart: Annotated[
        Path | None,
        path_option(
            "--chart", "Draw predicted and measured speeds into a .png file.", example="plans.png"
        ),
    ] = None
    as_json: Json = False
