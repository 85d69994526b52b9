"""What `tightfit submit` accepts. None: a recipe, site.yaml or the planner says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.completion import complete_job
from tightfit.cli.flags.kubernetes_options import As, Context, Namespace, Stage, WriteTo
from tightfit.cli.flags.options import (
    MAX_WORLD_SIZE,
    EffectiveBatch,
    Epochs,
    EvalRows,
    Json,
    Network,
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
    PlanNumber,
    TrainingSeed,
)

EXAMPLES = """\b
Examples:
  tightfit submit recipe.yaml --on slurm:gpu
  tightfit submit recipe.yaml --on slurm:gpu --dry-run         shows plan and script only
  tightfit submit recipe.yaml --on slurm:gpu --nodes 2 --time-limit 12:00:00 --no-follow
  tightfit submit runs/mine --follow                           follows its job again
  tightfit submit recipe.yaml --on k8s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFlags:
    """Plan for a cluster, submit the job, follow it, and report.

    The plan is made over what the cluster says it has. Data is encoded here, into the run's
    folder, which every node must see. The batch script stays in that folder. Ctrl-C asks whether
    to cancel the job. Account, modules, container and the like are in ~/.config/tightfit/site.yaml
    (docs/site.example.yaml).
    """

    job: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE.YAML|MODEL|PLAN.JSON|RUN",
            help="A recipe; a folder with weights, cached hub id or GGUF file; a saved plan; or "
            "the folder of a run, to follow its job or to go on with it.",
            autocompletion=complete_job,
            callback=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ]
    on: Annotated[
        str | None,
        text_option("--on", "CLUSTER", "slurm:PARTITION, slurm or k8s.", example="slurm:gpu"),
    ] = None
    data: Data = None
    eval: EvalRows = None
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
            "--output",
            "Folder of the run, seen by every node. [default: runs/MODEL-METHOD-N]",
            example="runs/mine",
        ),
    ] = None
    log_to: LogTo = None
    fresh: Fresh = False
    again: Again = False
    nodes: Annotated[
        int | None,
        count_option(
            "--nodes",
            "Nodes to use. [default: as few as it fits on]",
            most=MAX_WORLD_SIZE,
            example=2,
        ),
    ] = None
    time_limit: Annotated[
        str | None,
        text_option(
            "--time-limit",
            "TIME",
            "As Slurm writes it. [default: from the predicted time]",
            example="12:00:00",
        ),
    ] = None
    account: Annotated[
        str | None, text_option("--account", "NAME", "Whom to charge.", example="proj042")
    ] = None
    qos: Annotated[
        str | None, text_option("--qos", "NAME", "Quality of service.", example="normal")
    ] = None
    constraint: Annotated[
        str | None,
        text_option("--constraint", "FEATURES", "What nodes must have.", example="ib"),
    ] = None
    reservation: Annotated[
        str | None, text_option("--reservation", "NAME", "Nodes set aside.", example="course")
    ] = None
    requeue: Annotated[
        bool,
        switch_option(
            "--requeue/--no-requeue",
            "Save, queue again and resume at the time limit, when preempted, and after the loss "
            "of a node. [default: on]",
        ),
    ] = True
    kind: As = None
    write: WriteTo = None
    context: Context = None
    namespace: Namespace = None
    stage: Stage = False
    follow: Annotated[
        bool | None,
        switch_option("--follow/--no-follow", "Watch the job until it ends. [default: on]"),
    ] = None
    dry_run: Annotated[
        bool, switch_option("--dry-run", "Show plan and script; submit nothing.")
    ] = False
    as_json: Json = False
