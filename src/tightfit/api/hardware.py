"""`hardware`: search the GPU catalogue, or describe a machine or cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.api.call import accepts_keywords
from tightfit.api.options.catalogue import HardwareOptions
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.hardware.catalogue import GpuRecord, describe_gpu, list_gpus, match_gpu, search_gpus
from tightfit.hardware.inventory import Inventory
from tightfit.hardware.resolve import probe_inventory, resolve_hardware
from tightfit.hardware.types import Cluster, Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareResult:
    """What was asked for; the other fields are empty."""

    gpus: tuple[Gpu, ...] = ()
    record: GpuRecord | None = None
    """One card, each number with its source."""
    cluster: Cluster | None = None
    inventory: Inventory | None = None
    """Of a scheduler's cluster: every node and what is free."""


@accepts_keywords(HardwareOptions)
def hardware(options: HardwareOptions) -> HardwareResult:
    """The catalogue, the cards whose name contains a word, one card, or what `on` means."""
    if options.each and options.on is None:
        raise UsageError(
            "--each lists the nodes of a cluster.", remedy="tightfit hardware --on slurm --each"
        )
    if options.on is not None and options.name is not None:
        raise UsageError(
            "A GPU name and --on ask for two different things.",
            remedy=f"tightfit hardware {options.name}, or tightfit hardware --on {options.on}",
        )
    if options.on is not None:
        return _describe_cluster(options.on, each=options.each)
    if options.name is None:
        return _list(list_gpus())
    return _search(options.name)


def _search(word: str) -> HardwareResult:
    """One card if the word names one, else all that contain it."""
    found = search_gpus(word)
    try:
        match = match_gpu(word)
    except NotFoundError:
        inside = [gpu for gpu in found if _folded(word) in _folded(gpu.name)]
        if not inside:
            raise
        return _list(inside)
    if match.others and len(found) > 1:
        return _list(found)
    return HardwareResult(record=describe_gpu(match.gpu.name))


def _list(gpus: Sequence[Gpu]) -> HardwareResult:
    return HardwareResult(gpus=tuple(gpus))


def _folded(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _describe_cluster(text: str, *, each: bool) -> HardwareResult:
    inventory = probe_inventory(text)
    if inventory is not None:
        return HardwareResult(inventory=inventory)
    if each:
        raise UsageError(
            "--each lists the nodes of a cluster that runs Slurm or Kubernetes.",
            remedy="tightfit hardware --on slurm --each, or without --each",
        )
    return HardwareResult(cluster=resolve_hardware(text))
