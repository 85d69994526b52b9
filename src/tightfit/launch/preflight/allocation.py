"""A preflight inside an allocation of its own: the words for `salloc`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.launch.preflight.salloc_options import keep_known
from tightfit.launch.site import Site

MINUTES = 3
"""The checks take less than one; the rest is for srun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Nodes to be had from Slurm for a few minutes."""

    partition: str | None
    num_nodes: int
    gpus_per_node: int = 0


def allocation_command(wanted: Allocation, words: Sequence[str], site: Site) -> list[str]:
    """`salloc ... words`: it runs them here, with the nodes' names in the environment.

    The site's raw options come first: of two that say the same salloc goes by the last.
    """
    slurm = site.slurm
    given = {
        "--job-name": "tightfit-preflight",
        "--partition": wanted.partition or slurm.partition,
        "--nodes": str(wanted.num_nodes),
        "--ntasks-per-node": "1",
        "--time": str(MINUTES),
        "--gpus-per-node": str(wanted.gpus_per_node) if wanted.gpus_per_node else None,
        "--account": slurm.account,
        "--qos": slurm.qos,
        "--constraint": slurm.constraint,
        "--reservation": slurm.reservation,
    }
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    return ["salloc", *keep_known(slurm.extra), *options, *words]
