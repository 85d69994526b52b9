"""What `tightfit stage` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.options import Json, refuse_empty, text_option, word_option

WAYS = ("auto", "all-read", "tree", "chain")

EXAMPLES = """\b
Examples:
  tightfit stage Llama-2-7b
  tightfit stage ./my-model --nodes gpu[01-16] --to /dev/shm
  tightfit stage ./my-model --on slurm:gpu --dry-run
  tightfit stage --list --nodes gpu[01-16]
  tightfit stage ./my-model --nodes gpu[01-16] --clean
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFlags:
    """Copy a model to the RAM disks of many nodes, the fastest way.

    Measures how fast one node reads the model, how fast all of them do at once, and how fast they
    pass it on to each other; then all read, or one reads and the others get it in a chain or a
    tree. Checks that it fits before it copies, and every block after. A copy that was interrupted
    goes on where it stopped, and one that is whole is left as it is.

    `generate`, `chat`, `serve`, `train` and `farm` use a copy by themselves while it is exactly the
    model they were asked for.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, a run, a cached hub id or a GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ] = None
    to: Annotated[
        str | None,
        text_option(
            "--to",
            "FOLDER",
            "A RAM disk or local disk that every node has. [default: the site's stage_to, else "
            "/dev/shm]",
            example="/dev/shm",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        text_option(
            "--nodes", "NAMES", "gpu[01-04],big01. [default: this machine]", example="gpu[01-04]"
        ),
    ] = None
    on: Annotated[
        str | None,
        text_option(
            "--on",
            "slurm:PARTITION",
            "The nodes of a Slurm partition, or with `slurm` those of the job this runs in.",
            example="slurm:gpu",
        ),
    ] = None
    how: Annotated[
        str | None, word_option("--how", WAYS, "auto measures and chooses. [default: auto]")
    ] = None
    leave: Annotated[
        str | None,
        text_option(
            "--leave",
            "SIZE",
            "Memory to leave for the job on each node. [default: 5% and at least 1 GiB]",
            example="64GiB",
        ),
    ] = None
    run_with: Annotated[
        str | None,
        text_option(
            "--run-with",
            "WORDS",
            "How a command runs on a node. [default: the site's run_on_node; srun in a job; else "
            "'ssh {node}']",
            example="'ssh {node}'",
        ),
    ] = None
    interface: Annotated[
        str | None,
        text_option(
            "--interface",
            "DEVICE",
            "Network device between the nodes. [default: the site's, else the way to each other]",
            example="ib0",
        ),
    ] = None
    verify: Annotated[
        bool, typer.Option("--verify", help="Read a copy that is there already back, too.")
    ] = False
    list_: Annotated[bool, typer.Option("--list", help="Show what is staged where.")] = False
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove MODEL's copies there, or all of yours without MODEL."),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check and measure, and tell the choice; with --clean, tell what would go.",
        ),
    ] = False
    as_json: Json = False
