"""Hardware as a user says it: `here`, `cpu`, `slurm[:NAME]`, `k8s`, a cluster YAML, or words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import UsageError
from tightfit.hardware.types import Cluster
from tightfit.hardware.words import HARDWARE_EXAMPLES, parse_hardware, read_cpu_words

if TYPE_CHECKING:
    from tightfit.hardware.inventory import Inventory

_SCHEDULERS = ("slurm", "k8s", "kubernetes")


def resolve_hardware(text: str) -> Cluster:
    """Find out what the text means and look there. Words are read where nothing else matches."""
    said = text.strip()
    if said.casefold() == "here":
        from tightfit.hardware.local import probe_here

        return probe_here()
    num_processes = read_cpu_words(said)
    if num_processes is not None:
        from tightfit.hardware.local import probe_cpu

        return probe_cpu(num_processes)
    inventory = probe_inventory(said)
    if inventory is not None:
        from tightfit.hardware.inventory import plannable_cluster

        return plannable_cluster(inventory)
    if said.casefold().endswith((".yaml", ".yml")):
        from tightfit.hardware.cluster_file import read_cluster_file

        return read_cluster_file(Path(said).expanduser())
    if not said:
        raise UsageError(
            "No hardware was named.",
            remedy=f"--on here, --on cpu, --on slurm, --on k8s, or {HARDWARE_EXAMPLES}",
        )
    return parse_hardware(said)


def probe_inventory(text: str) -> Inventory | None:
    """Every node of the scheduler that the text names; None where it names none."""
    word, colon, pool = (part.strip() for part in text.strip().partition(":"))
    if word.casefold() not in _SCHEDULERS:
        return None
    if colon and not pool:
        raise UsageError(
            f"`{word}:` names no part of it.", remedy=f"--on {word} or --on {word}:NAME"
        )
    if word.casefold() == "slurm":
        from tightfit.hardware.slurm import probe_slurm_inventory

        return probe_slurm_inventory(pool or None)
    from tightfit.hardware.kubernetes import probe_kubernetes_inventory

    return probe_kubernetes_inventory(pool or None)
