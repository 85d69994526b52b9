"""Resolve the model's files, the nodes, and how they are reached, from the options of `stage`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tightfit.clusters.nodes import NODES_VARIABLE, expand_nodes, node_prefix
from tightfit.clusters.site import Site
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.units import GIB, MIB
from tightfit.hardware.commands import RunCommand, run_command
from tightfit.hardware.slurm import probe_slurm_inventory
from tightfit.runtime.artefacts import find_artefact
from tightfit.runtime.staged import RAM_DISK, VARIABLE

AGENT_MODULE = "tightfit.clusters.staging.agent"
_AGENT_BYTES = GIB
"""Of the agent itself: Python and the blocks that are on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccess:
    """The nodes, and the words before a command that is to run on one of them."""

    nodes: tuple[str, ...]
    prefix: str


def locate_source(name: str) -> Path:
    """The folder or GGUF file that a model's name means; of an adapter the model it needs."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return found[0]
    artefact = find_artefact(name)
    return artefact.base or artefact.path


def choose_target(said: str | None, site: Site, environ: Mapping[str, str]) -> Path:
    """--to, TIGHTFIT_STAGE's first, the site's, or the RAM disk."""
    named = environ.get(VARIABLE, "").split(os.pathsep)[0].strip()
    text = said or (named if named.lower() != "none" else "") or site.stage_to or str(RAM_DISK)
    place = Path(text).expanduser()
    if not place.is_absolute():
        raise UsageError(
            f"`--to {text}` is not the same folder on every node.",
            remedy="--to with its whole path, like /dev/shm",
        )
    return place


def find_nodes(
    *,
    nodes: str | None,
    on: str | None,
    site: Site,
    environ: Mapping[str, str],
    num_bytes: int = 0,
    run: RunCommand = run_command,
) -> NodeAccess:
    """Those named; those of the job or partition; none for this machine alone."""
    if nodes is not None and on is not None:
        raise UsageError("`--nodes` and `--on` both name nodes.", remedy="keep one of them")
    if nodes is not None:
        return NodeAccess(nodes=expand_nodes(nodes), prefix=node_prefix(site, environ))
    if on is None:
        return NodeAccess(nodes=(), prefix="")
    kind, _, partition = on.partition(":")
    if kind.strip().lower() != "slurm":
        raise UsageError(
            f"`--on {on[:60]}` is not known here.", remedy="--on slurm:PARTITION, or --nodes a,b"
        )
    partition = partition.strip()
    if not partition:
        listed = environ.get(NODES_VARIABLE)
        if not listed:
            raise UsageError(
                "`--on slurm` without a partition means the nodes of this job, and this is none.",
                remedy="--on slurm:PARTITION",
            )
        return NodeAccess(nodes=expand_nodes(listed), prefix=node_prefix(site, environ))
    found = _list_partition(partition, run)
    if site.run_on_node is not None:
        return NodeAccess(nodes=found, prefix=site.run_on_node)
    return NodeAccess(nodes=found, prefix=_srun(partition, site, num_bytes))


def _list_partition(partition: str, run: RunCommand) -> tuple[str, ...]:
    inventory = probe_slurm_inventory(partition, run=run)
    found = tuple(node.name for node in inventory.nodes if node.state.takes_jobs)
    if not found:
        raise NotFoundError(
            f"No node of the partition {partition} takes jobs now.",
            remedy=f"sinfo --partition {partition}",
        )
    return found


def _srun(partition: str, site: Site, num_bytes: int) -> str:
    """A small job on each node; the memory is for the copy, which counts as the job's."""
    words = ["srun", f"--partition={partition}", "--nodes=1", "--ntasks=1", "--quiet"]
    words += [f"--mem={-(-(num_bytes + _AGENT_BYTES) // MIB)}M", "--immediate=60"]
    words += ["--job-name=tightfit-stage"]
    for option in ("account", "qos", "reservation"):
        value = getattr(site.slurm, option)
        words += [f"--{option}={value}"] if value else []
    return " ".join([*map(shlex.quote, words), "--nodelist={node}"])


def agent_command(site: Site) -> list[str]:
    """The words that start a node's agent, after the site's own lines."""
    words = [site.python or sys.executable, "-m", AGENT_MODULE]
    if not site.setup:
        return words
    return ["bash", "-c", "\n".join([*site.setup, f"exec {shlex.join(words)}"])]
