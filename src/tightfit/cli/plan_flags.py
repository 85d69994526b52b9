"""The options of `tightfit plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_job
from tightfit.cli.options import Json, On, count_option, word_option


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """A job as far as the user stated it; a recipe states the rest."""

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
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Plans to show.")] = 5
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
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Hold one choice fixed, e.g. --set sharding=zero3. Repeatable.",
            show_default=False,
        ),
    ] = None
    as_json: Json = False
