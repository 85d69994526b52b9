"""What `tightfit hardware` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.completion import complete_gpu
from tightfit.cli.flags.options import Json, On, refuse_empty

EXAMPLES = """\b
Examples:
  tightfit hardware                       every GPU of the catalogue
  tightfit hardware a100                  those whose name contains a word
  tightfit hardware T4                    one card, each number with its source
  tightfit hardware --on here             this machine
  tightfit hardware --on slurm            a Slurm cluster: partitions, what is free, what is down
  tightfit hardware --on slurm:gpu --each every node of one partition
  tightfit hardware --on '6xT4 + 2xRTX-6000' --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFlags:
    """List, search or show GPUs, or a cluster with --on.

    With --on, shows a machine or cluster as tightfit understands it; of Slurm and Kubernetes
    also what is free now, and why some nodes take no jobs.
    """

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORD|NAME]",
            help="A word to search for, or the name of one GPU.",
            autocompletion=complete_gpu,
            callback=refuse_empty("NAME", "T4"),
            show_default=False,
        ),
    ] = None
    on: On = None
    each: Annotated[
        bool,
        typer.Option("--each", help="With --on slurm or k8s: every node, not only the kinds."),
    ] = False
    as_json: Json = False
