"""Hardware as a user says it: `here`, `cpu`, `slurm[:NAME]`, `k8s`, a cluster YAML, or words."""

from __future__ import annotations

from pathlib import Path

from tightfit.core.errors import UsageError
from tightfit.hardware.cpu import probe_cpu, read_cpu_words
from tightfit.hardware.types import Cluster
from tightfit.hardware.words import EXAMPLES, parse_words


def resolve_hardware(text: str) -> Cluster:
    """Find out what the text means and look there. Words are read where nothing else matches."""
    said = text.strip()
    word, colon, partition = said.partition(":")
    if said.casefold() == "here":
        from tightfit.hardware.local import probe_here

        return probe_here()
    num_processes = read_cpu_words(said)
    if num_processes is not None:
        return probe_cpu(num_processes)
    if word.casefold() == "slurm":
        from tightfit.hardware.slurm import probe_slurm

        if colon and not partition.strip():
            raise UsageError("`slurm:` names no partition.", remedy="--on slurm or --on slurm:NAME")
        return probe_slurm(partition.strip() or None)
    if said.casefold() in ("k8s", "kubernetes"):
        from tightfit.hardware.kubernetes import probe_kubernetes

        return probe_kubernetes()
    if said.casefold().endswith((".yaml", ".yml")):
        from tightfit.hardware.cluster_file import read_cluster_file

        return read_cluster_file(Path(said).expanduser())
    if not said:
        raise UsageError(
            "No hardware was named.",
            remedy=f"--on here, --on cpu, --on slurm, --on k8s, or {EXAMPLES}",
        )
    return parse_words(said)
