"""Options that several verbs share, each written once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_hardware
from tightfit.core.errors import UsageError

MAX_COUNT = 2**31 - 1
"""More is a slip of the keyboard; the rooms have tighter bounds of their own."""


def word_option(name: str, words: tuple[str, ...], help: str) -> Any:
    """An option that takes one of a few words; the words stand in the help and in the shell."""
    return typer.Option(
        name,
        help=help,
        metavar="|".join(words),
        autocompletion=choices.offer(words),
        show_default=False,
    )


def count_option(name: str, help: str) -> Any:
    """An option that takes a whole number from 1."""

    def check(value: int | None) -> int | None:
        if value is not None and not 1 <= value <= MAX_COUNT:
            raise UsageError(
                f"`{name} {value}` is not between 1 and {MAX_COUNT:,}.", remedy=f"{name} 1, or more"
            )
        return value

    return typer.Option(name, help=help, metavar="N", callback=check, show_default=False)


def switch_option(names: str, help: str) -> Any:
    """An option that is on, off, or not stated."""
    return typer.Option(names, help=help, show_default=False)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="HARDWARE",
        help="4xV100-32GB, '2n x 4xA100-40GB', here, slurm, slurm:PARTITION, k8s or a YAML file.",
        autocompletion=complete_hardware,
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Fix any field of the strategy, e.g. --set packing=true. Repeatable.",
        show_default=False,
    ),
]
