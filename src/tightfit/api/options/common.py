"""Options that several verbs share, and how options are declared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from tightfit.api.options import choices
from tightfit.api.options.choices import complete_hardware
from tightfit.api.options.declare import Option
from tightfit.core.settings import list_settings

MAX_EFFECTIVE_BATCH = 10**7
MAX_EPOCHS = 10_000
MAX_TOP = 1000
"""Bounds of a recipe and of what is printed; those of settings stand in `core/settings.py`."""


def setting_option(name: str) -> Any:
    """The option of a setting, as its declaration in `core/settings.py` says."""
    declared = list_settings()[name]
    option, help = declared.option, declared.setting.help
    if declared.words:
        return word_option(option, declared.words, help)
    if declared.most is not None:
        return count_option(
            option, help, most=declared.most, example=int(declared.setting.example or 1)
        )
    return switch_option(f"{option}/--no-{option.removeprefix('--')}", help)


def word_option(name: str, words: tuple[str, ...], help: str) -> Any:
    """An option that takes one of a few words; the words stand in the help and in the shell."""
    return Option(
        name,
        help=help,
        metavar="|".join(words),
        complete=choices.offer(words),
        read=refuse_empty(name, "|".join(words)),
        show_default=False,
    )


def count_option(name: str, help: str, *, most: int, example: int) -> Any:
    """An option that takes a whole number from 1."""

    def read(value: str | None) -> int | None:
        return None if value is None else choices.read_whole(value, name, most, example)

    return Option(name, help=help, metavar="N", read=read, show_default=False)


def number_option(name: str, help: str, *, most: float, example: float) -> Any:
    """An option that takes a number above 0."""

    def read(value: str | None) -> float | None:
        return None if value is None else choices.read_positive(value, name, most, example)

    return Option(name, help=help, metavar="X", read=read, show_default=False)


def path_option(name: str, help: str, *, example: str) -> Any:
    """An option that takes a file."""
    check = refuse_empty(name, example)

    def read(value: str | None) -> Path | None:
        return None if value is None else Path(check(value) or "")

    return Option(name, help=help, metavar="FILE", read=read, show_default=False)


def text_option(name: str, metavar: str, help: str, *, example: str) -> Any:
    """An option that takes any text but none."""
    return Option(
        name, help=help, metavar=metavar, read=refuse_empty(name, example), show_default=False
    )


def refuse_empty(name: str, example: str) -> Callable[[str | None], str | None]:
    """A callback: an empty value is mostly a shell variable that nobody set."""

    def check(value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise choices.empty_value(name, example)
        return value

    return check


def switch_option(names: str, help: str) -> Any:
    """An option that is on, off, or not stated."""
    return Option(names, help=help, show_default=False)


Trace = Annotated[
    bool | None,
    switch_option(
        "--trace/--no-trace",
        "Run the very step on fake tensors and replay its allocations. [default: plan does, where "
        "torch is installed]",
    ),
]
On = Annotated[
    str | None,
    Option(
        "--on",
        metavar="HARDWARE",
        help="4xV100-32GB, '2n x 4xA100-40GB', here, cpu, slurm, slurm:PARTITION, k8s or a YAML "
        "file.",
        complete=complete_hardware,
        read=refuse_empty("--on", "4xV100-32GB"),
        show_default=False,
    ),
]
Network = Annotated[
    str | None,
    text_option(
        "--network",
        "SPEED",
        "Between nodes, one direction: 100Gb/s (bits) or 12.5GB/s (bytes). [default: 10Gb/s]",
        example="100Gb/s",
    ),
]
SeqLen = Annotated[
    int | None,
    setting_option("seq_len"),
]
PlanMethod = Annotated[
    str | None, word_option("--method", choices.PLAN_METHODS, "What is trained. [default: auto]")
]
Epochs = Annotated[
    float | None,
    number_option("--epochs", "Passes over the data. [default: 1]", most=MAX_EPOCHS, example=3),
]
EffectiveBatch = Annotated[
    int | None,
    count_option(
        "--effective-batch",
        "Sequences per optimizer step, over all GPUs. [default: 16]",
        most=MAX_EFFECTIVE_BATCH,
        example=16,
    ),
]
Template = Annotated[
    str | None,
    text_option(
        "--template",
        "NAME|FILE",
        "Chat template in place of the tokenizer's own.",
        example="chatml",
    ),
]
EvalRows = Annotated[
    str | None,
    text_option(
        "--eval",
        "FILE|FRACTION",
        "Rows to evaluate on: a file, or the share held back, like 0.05.",
        example="0.05",
    ),
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Fix any field of the strategy, e.g. --set packing=true. Repeatable.",
        show_default=False,
    ),
]
