"""Options that several verbs share, and what the shell offers for names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tightfit.core.options import (
    Argument,
    offer,
    setting_option,
    switch_option,
    text_option,
    word_option,
)
from tightfit.core.settings import RecipeMethod, words_of
from tightfit.core.trainers import TRAINERS

MAX_TOP = 1000
OnForecast = Callable[..., None]
"""Loosely typed: the forecasts are pydantic models, which `--help` must not load."""


# What the shell offers for names: models and hardware, from the offline catalogue. A shell never
# sees an error from here.

_COUNT_BEFORE_NAME = re.compile(r"^((?:\d+\s*n\s*x\s*)?\d+\s*x\s*)(.*)$", re.IGNORECASE)


def complete_model(incomplete: str) -> list[str]:
    """Catalogue names, with and without the owner."""
    try:
        from tightfit.models.resolve import list_models

        names = [row.model for row in list_models()]
    except Exception:
        return []
    short = [name.rsplit("/", 1)[-1] for name in names]
    return _starting_with(incomplete, [*short, *names])


def complete_gpu(incomplete: str) -> list[str]:
    """GPU names as one word."""
    try:
        from tightfit.hardware.catalogue import gpu_names

        return _starting_with(incomplete, [name.replace(" ", "-") for name in gpu_names()])
    except Exception:
        return []


def complete_hardware(incomplete: str) -> list[str]:
    """`here`, `slurm`, `k8s`, GPU names; after `4x` or `2n x 4x` the names behind the count."""
    counted = _COUNT_BEFORE_NAME.match(incomplete)
    if counted is not None:
        head, rest = counted.groups()
        return [head + name for name in complete_gpu(rest)]
    words = ["here", "slurm", "slurm:", "k8s"]
    return [*_starting_with(incomplete, words), *complete_gpu(incomplete)]


def complete_job(incomplete: str) -> list[str]:
    """A model, or a recipe file in this folder."""
    recipes = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
    return [*_starting_with(incomplete, sorted(recipes)), *complete_model(incomplete)]


def _starting_with(incomplete: str, names: list[str]) -> list[str]:
    fold = incomplete.lower()
    return [name for name in dict.fromkeys(names) if name.lower().startswith(fold)]


def model_argument(metavar: str, help: str, *, example: str = "runs/sql") -> Argument:
    """A model by position; messages name it by the first word of `metavar`."""
    return Argument(
        name=metavar.strip("[].").split("|")[0],
        metavar=metavar,
        help=help,
        complete=complete_model,
        example=example,
    )


On = Annotated[
    str | None,
    text_option(
        "HARDWARE",
        "4xV100-32GB, '2n x 4xA100-40GB', here, cpu, slurm, slurm:PARTITION, k8s or a YAML file.",
        example="4xV100-32GB",
        complete=complete_hardware,
    ),
]
Network = Annotated[
    str | None,
    text_option(
        "SPEED",
        "Between nodes, one direction: 100Gb/s (bits) or 12.5GB/s (bytes). [default: 10Gb/s]",
        example="100Gb/s",
    ),
]
Method = Annotated[
    str | None, word_option(words_of(RecipeMethod), "What is trained. [default: auto]")
]
Objective = Annotated[str | None, setting_option("objective")]
SeqLen = Annotated[int | None, setting_option("seq_len")]
Epochs = Annotated[float | None, setting_option("epochs")]
EffectiveBatch = Annotated[int | None, setting_option("effective_batch")]
Template = Annotated[str | None, setting_option("template")]
EvalRows = Annotated[
    str | None,
    text_option(
        "FILE|FRACTION",
        "Rows to evaluate on: a file, or the share held back, like 0.05.",
        example="0.05",
    ),
]
Tools = Annotated[
    str | None,
    text_option(
        "FILE", "JSON schemas of the tools that rows without a list may call.", example="tools.json"
    ),
]
Trainer = Annotated[
    str | None,
    text_option(
        "NAME",
        "As another trainer runs it: " + ", ".join(one.name for one in TRAINERS) + "; NAME@VERSION "
        "for an earlier one.",
        example="trl",
        complete=offer(one.name for one in TRAINERS),
    ),
]
Settings = Annotated[
    list[str] | None,
    text_option(
        "KEY=VALUE",
        "Fix any field of the strategy, e.g. --set packing=true. Repeatable.",
        name="--set",
    ),
]
Trace = Annotated[
    bool,
    switch_option(
        "Run the very step on fake tensors and replay its allocations: exact, and takes minutes."
    ),
]
Json = Annotated[bool, switch_option("Print one JSON document and nothing else.", name="--json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the command line alone has; a verb with more of it has a class `VerbOutput`."""

    as_json: Json = False
