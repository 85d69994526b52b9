"""What `tightfit preflight` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tightfit.cli.flags.options import Json, count_option, text_option

MAX_NODES = 256
MAX_PORT = 65_534
MAX_GPUS = 64

EXAMPLES = """\b
Examples:
  tightfit preflight --nodes gpu01,gpu02 --shared /home/me/runs
  tightfit preflight --nodes 'gpu[01-04]' --interface ib0 --run-with 'ssh {node}'
  tightfit preflight --on slurm:gpu --num-nodes 2 --gpus-per-node 4
  tightfit preflight                         inside a Slurm job: its own nodes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFlags:
    """Check the nodes of a job, and the ways between them, in under a minute.

    Names, the rendezvous port, the network device, loss in each direction, bandwidth by TCP and by
    all-reduce, clocks, versions, GPUs and the shared folder; each fault with its remedy. At the
    end: the options that `tightfit train` is to be given on each node. Nothing is left running.

    The exit code tells the worst finding: 0 for remarks, 6 for faults.
    """

    nodes: Annotated[
        str | None,
        text_option(
            "--nodes",
            "A,B",
            "The nodes; the first is where they meet. [default: those of this Slurm job]",
            example="gpu[01-02]",
        ),
    ] = None
    run_with: Annotated[
        str | None,
        text_option(
            "--run-with",
            "PREFIX",
            "Runs a command on {node}. [default: srun in a Slurm job, else ssh]",
            example="'ssh {node}'",
        ),
    ] = None
    interface: Annotated[
        str | None,
        text_option(
            "--interface",
            "NAME",
            "Network device that is to be used. [default: the one that leads to the others]",
            example="ib0",
        ),
    ] = None
    port: Annotated[
        int | None,
        count_option(
            "--port",
            "Rendezvous port on the first node. [default: 29500]",
            most=MAX_PORT,
            example=29500,
        ),
    ] = None
    shared: Annotated[
        str | None,
        text_option(
            "--shared",
            "FOLDER",
            "A folder that all nodes are to share, as for runs. [default: `runs` of site.yaml]",
            example="/home/me/runs",
        ),
    ] = None
    on: Annotated[
        str | None,
        text_option(
            "--on",
            "slurm:PARTITION",
            "Take nodes of this partition for a few minutes, by salloc.",
            example="slurm:gpu",
        ),
    ] = None
    num_nodes: Annotated[
        int | None,
        count_option("--num-nodes", "How many; with --on. [default: 2]", most=MAX_NODES, example=2),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        count_option(
            "--gpus-per-node", "GPUs to ask Slurm for; with --on.", most=MAX_GPUS, example=4
        ),
    ] = None
    as_json: Json = False
