"""`--network`: the speed between nodes, stated by hand, or said to be assumed."""

from __future__ import annotations

from collections.abc import Iterable

from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.text import shorten
from tightfit.core.units import parse_link_speed
from tightfit.estimate.communication import UNSTATED_NETWORK
from tightfit.hardware.types import Cluster


def state_network(cluster: Cluster, text: str | None) -> Cluster:
    """The cluster with the network that `--network` names; as found where it names none."""
    if text is None:
        return cluster
    try:
        speed = parse_link_speed(text)
    except InvalidInputError as fault:
        raise UsageError(
            f"`--network {shorten(text)}` is not a network speed between 1 Mb/s and 100 Tb/s.",
            remedy="--network 100Gb/s    (b for bits; 12.5GB/s is the same in bytes)",
        ) from fault
    return cluster.model_copy(update={"network_bytes_per_second": speed})


def note_network(cluster: Cluster, notes: Iterable[str]) -> tuple[str, ...]:
    """The notes, with one on the assumed network wherever several nodes could have been used.

    A plan on one node may have won only because the network was taken to be slow.
    """
    is_spread = any(group.num_nodes > 1 for group in cluster.groups)
    if cluster.network_bytes_per_second is not None or not is_spread:
        return tuple(notes)
    return tuple(dict.fromkeys((*notes, UNSTATED_NETWORK)))
