"""Options of the verbs that train, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tightfit.cli.flags.options import (
    MAX_TOP,
    count_option,
    number_option,
    path_option,
    switch_option,
    text_option,
)

MAX_STEPS = 10**9
MAX_LEARNING_RATE = 10.0

Data = Annotated[Path | None, path_option("--data", "Rows to train on.", example="train.jsonl")]
MaxSteps = Annotated[
    int | None,
    count_option(
        "--max-steps", "Optimizer steps, in place of epochs.", most=MAX_STEPS, example=100
    ),
]
LearningRate = Annotated[
    float | None,
    number_option(
        "--lr",
        "Peak learning rate. [default: 2e-4, full 2e-5]",
        most=MAX_LEARNING_RATE,
        example=2e-4,
    ),
]
TrainingSeed = Annotated[
    str | None, text_option("--seed", "N", "Order and dropout. [default: 0]", example="17")
]
PlanNumber = Annotated[
    int,
    count_option("--plan", "Take the Nth plan of the list. [default: 1]", most=MAX_TOP, example=2),
]
MemoryLimit = Annotated[
    str | None,
    text_option(
        "--memory-limit", "SIZE", "Use no more than this per GPU, like 20GiB.", example="20GiB"
    ),
]
LogTo = Annotated[
    str | None,
    text_option(
        "--log-to",
        "A,B",
        "tensorboard, wandb, mlflow, or none. [default: tensorboard]",
        example="tensorboard",
    ),
]
Fresh = Annotated[
    bool, switch_option("--fresh", "Start over; what the folder holds is moved aside.")
]
Again = Annotated[bool, switch_option("--again", "Train once more although this run is finished.")]
