"""What to request from Slurm for a plan: nodes by constraint, GPUs by GRES, cores, memory, time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tightfit.clusters.requirements import (
    count_restarts,
    count_slices,
    estimate_memory_request,
    estimate_run_seconds,
    round_limit,
)
from tightfit.core.errors import UsageError
from tightfit.hardware.inventory import ClusterNode, Inventory
from tightfit.planning.plan import Plan

_SIMPLE = re.compile(r"[\w.:=+-]+(?:\s*[&|]\s*[\w.:=+-]+)*")


def filter_nodes(inventory: Inventory, constraint: str | None) -> Inventory:
    """The inventory without nodes that lack the features.

    Leaves out brackets, counts and negation: those are for Slurm alone to judge.
    """
    if constraint is None or not _SIMPLE.fullmatch(constraint.strip()):
        return inventory
    nodes = tuple(node for node in inventory.nodes if _has_features(node.features, constraint))
    if not nodes:
        held = sorted({word for node in inventory.nodes for word in node.features})
        known = f"choose among: {', '.join(held[:20])}" if held else "its nodes have none"
        raise UsageError(
            f"No node of {inventory.source} has the features `{constraint.strip()}`.",
            remedy=f"--constraint with a feature that nodes have, here or in site.yaml; {known}",
        )
    return replace(inventory, nodes=nodes)


def _has_features(features: Collection[str], constraint: str) -> bool:
    """Slurm binds `&` and `|` alike, from left to right."""
    first, *rest = re.split(r"([&|])", constraint)
    found = first.strip() in features
    for sign, word in zip(rest[::2], rest[1::2], strict=True):
        is_held = word.strip() in features
        found = (found or is_held) if sign == "|" else (found and is_held)
    return found


# Which words make Slurm hand out the GPUs that the plan was made for.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """A GRES type, or a feature where the type does not tell; both None where any GPU does."""

    kind: str | None = None
    constraint: str | None = None


def find_gpu_request(
    inventory: Inventory, *, partition: str, gpu_name: str, gpus_per_node: int
) -> GpuRequest:
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
        return GpuRequest()
    # Typed before untyped, then the most nodes: one job can ask for one type only.
    kind = max(counted, key=lambda word: (word is not None, counted[word], word or ""))
    if names_of[kind] == {gpu_name}:
        return GpuRequest(kind=kind)
    return GpuRequest(kind=kind, constraint=_distinguishing_feature(nodes, gpu_name))


def _distinguishing_feature(nodes: Sequence[ClusterNode], gpu_name: str) -> str | None:
    """A feature that every node with the GPU has, and no node without it."""

    def has_it(node: ClusterNode) -> bool:
        return any(devices.name == gpu_name for devices in node.devices)

    wanted = [set(node.features) for node in nodes if has_it(node)]
    other = [set(node.features) for node in nodes if not has_it(node)]
    telling = set.intersection(*wanted).difference(*other)
    return min(telling, key=lambda word: (len(word), word), default=None)


# What to ask Slurm for, from the plan: cores, memory, time, and how many slices of it.

CORES_PER_GPU = 4
"""Where Slurm does not tell how many a node has."""
MAX_WARN_FRACTION = 0.25
"""Of the time limit: a warning before a short limit must leave time to train in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResources:
    """Per node, save for the time."""

    cores: int
    memory_bytes: int | None
    """None where Slurm accounts for no memory."""
    seconds: float | None
    """The time limit to ask for. None: the partition's own."""
    predicted_seconds: float | None
    """The whole run with its margins; None where its length is not known."""
    num_slices: int
    """Starts that it takes to get through, where each ends at the time limit."""
    max_requeues: int
    warn_seconds: int


def find_resources(
    plan: Plan, *, max_seconds: float | None, asked_seconds: float | None, warn: int
) -> JobResources:
    """`max_seconds` is the partition's limit, `asked_seconds` the user's own."""
    predicted = estimate_run_seconds(plan)
    seconds = asked_seconds
    if seconds is None and predicted is not None:
        seconds = round_limit(predicted)
    if seconds is None or (max_seconds is not None and seconds > max_seconds):
        seconds = max_seconds
    warned = warn if seconds is None else int(min(warn, max(seconds * MAX_WARN_FRACTION, 1)))
    slices = count_slices(predicted, limit=seconds, warn_seconds=warned)
    return JobResources(
        cores=_count_cores(plan),
        memory_bytes=_find_memory(plan),
        seconds=seconds,
        predicted_seconds=predicted,
        num_slices=slices,
        max_requeues=count_restarts(slices),
        warn_seconds=warned,
    )


def _count_cores(plan: Plan) -> int:
    """The GPUs' share of the node's cores."""
    node, used = plan.hardware.node, plan.strategy.gpus_per_node
    if node.num_cores is None:
        return CORES_PER_GPU * used
    return max(1, node.num_cores * used // node.num_gpus)


def _find_memory(plan: Plan) -> int | None:
    most = plan.hardware.node.host_memory_bytes
    return None if most is None else estimate_memory_request(plan, most_bytes=most)
