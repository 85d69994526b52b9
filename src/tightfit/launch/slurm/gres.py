"""Which words make Slurm hand out the GPUs that the plan was made for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.hardware.inventory import ClusterNode, Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWords:
    """A GRES type, or a feature where the type does not tell; both None where any GPU does."""

    kind: str | None = None
    constraint: str | None = None


def find_gpu_words(
    inventory: Inventory, *, partition: str, gpu_name: str, gpus_per_node: int
) -> GpuWords:
    """The words that single out `gpu_name` among the nodes of a partition."""
    nodes = [node for node in inventory.nodes if partition in node.pools and node.devices]
    names_of: dict[str | None, set[str]] = {}
    for devices in (held for node in nodes for held in node.devices):
        names_of.setdefault(devices.kind, set()).add(devices.name)
    counted = Counter(
        devices.kind
        for node in nodes
        for devices in node.devices
        if devices.name == gpu_name and devices.count >= gpus_per_node
    )
    if not counted:
        return GpuWords()
    # Typed before untyped, then the most nodes: one job can ask for one type only.
    kind = max(counted, key=lambda word: (word is not None, counted[word], word or ""))
    if names_of[kind] == {gpu_name}:
        return GpuWords(kind=kind)
    return GpuWords(kind=kind, constraint=_telling_feature(nodes, gpu_name))


def _telling_feature(nodes: Sequence[ClusterNode], gpu_name: str) -> str | None:
    """A feature that every node with the GPU has, and no node without it."""

    def has_it(node: ClusterNode) -> bool:
        return any(devices.name == gpu_name for devices in node.devices)

    wanted = [set(node.features) for node in nodes if has_it(node)]
    other = [set(node.features) for node in nodes if not has_it(node)]
    telling = set.intersection(*wanted).difference(*other)
    return min(telling, key=lambda word: (len(word), word), default=None)
