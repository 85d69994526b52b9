"""Options that several verbs share, each written once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_hardware


def word_option(name: str, words: tuple[str, ...], help: str) -> Any:
    """An option that takes one of a few words; the words stand in the help and in the shell."""
    return typer.Option(
        name,
        help=help,
        metavar="|".join(words),
        autocompletion=choices.offer(words),
        show_default=False,
    )


def count_option(name: str, help: str, *, most: int | None = None) -> Any:
    """An option that takes a whole number from 1."""
    return typer.Option(name, help=help, metavar="N", min=1, max=most, show_default=False)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="HARDWARE",
        help="4xV100-32GB, '2n x 4xA100-40GB', here, slurm, slurm:PARTITION, k8s or a cluster YAML.",
        autocompletion=complete_hardware,
        show_default=False,
    ),
]
