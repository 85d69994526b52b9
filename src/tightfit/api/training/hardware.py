"""The hardware of a job: named by `--on` or found here, its memory limit, its rendezvous."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tightfit.api.options.training import BenchOptions, PlanOptions, TrainingOptions, TrainOptions
from tightfit.core.errors import InvalidInputError, SetupError, UsageError, UserError
from tightfit.core.strategy import MEMORY_VARIABLE
from tightfit.core.text import shorten
from tightfit.core.units import parse_bytes, parse_link_speed
from tightfit.estimation.communication import UNSTATED_NETWORK
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster, NodeGroup

if TYPE_CHECKING:
    from tightfit.clusters.nodes import Rendezvous

DEFAULT_CARD = "RTX-4090"
"""What an estimate is made against where no GPU is here and none was named."""


def choose_cluster_or_card(on: str | None) -> tuple[Cluster, tuple[str, ...]]:
    """For an estimate, which is useful without any GPU: a common card, and a note that says so."""
    found = find_cluster(on)
    if found is not None:
        return found, () if on else ("Estimated on this machine (--on was not given).",)
    cluster = resolve_hardware(DEFAULT_CARD)
    card = cluster.groups[0].node.gpu.name
    return cluster, (f"No GPU is here and --on was not given: estimated on one {card}.",)


def find_cluster(on: str | None) -> Cluster | None:
    """What was named, else the GPUs of this machine. Its CPU is used only where it is asked for:
    who plans on a laptop mostly plans for another machine."""
    if on is not None:
        return with_measured_rates(resolve_hardware(on))
    try:
        cluster = resolve_hardware("here")
    except UserError:
        return None
    return None if cluster.groups[0].node.gpu.is_cpu else with_measured_rates(cluster)


def with_measured_rates(cluster: Cluster) -> Cluster:
    """This machine by what `tightfit calibrate` found; hardware that is only named as it is."""
    if cluster.source != "here":
        return cluster
    from tightfit.runs.store import apply_calibrations

    return apply_calibrations(cluster)


def state_network(cluster: Cluster, text: str | None) -> Cluster:
    """The cluster with the network that `--network` names; as found where it names none."""
    if text is None:
        return cluster
    try:
        speed = parse_link_speed(text)
    except InvalidInputError as error:
        raise UsageError(
            f"`--network {shorten(text)}` is not a network speed between 1 Mb/s and 100 Tb/s.",
            remedy="--network 100Gb/s    (b for bits; 12.5GB/s is the same in bytes)",
        ) from error
    return cluster.model_copy(update={"network_bytes_per_second": speed})


def note_network(cluster: Cluster, notes: Iterable[str]) -> tuple[str, ...]:
    """The notes, with one on the assumed network wherever several nodes could have been used.

    A plan on one node may have won only because the network was taken to be slow.
    """
    is_spread = any(group.num_nodes > 1 for group in cluster.groups)
    if cluster.network_bytes_per_second is not None or not is_spread:
        return tuple(notes)
    return tuple(dict.fromkeys((*notes, UNSTATED_NETWORK)))


def find_hardware(
    options: TrainingOptions | BenchOptions, on: str | None, *, verb: str = "train"
) -> Cluster:
    """This machine, or the part of it that `--on` names; times the nodes of the job."""
    from tightfit.clusters.schedulers import BACKENDS

    named = on or "here"
    scheduler = named.partition(":")[0].strip().casefold()
    if scheduler in BACKENDS and scheduler != "here":
        submit = f"tightfit submit {shorten(options.job)} --on {shorten(named)}    (as a job there)"
        raise UsageError(
            f"`--on {shorten(named)}` is a cluster; `{verb}` runs where it is started.",
            remedy=submit if verb == "train" else "--on here",
        )
    cluster = with_measured_rates(resolve_hardware(named))
    cluster = state_network(cluster, getattr(options, "network", None))
    if cluster.source != "here":
        _refuse_absent(cluster, named)
    limit = read_limit(options, os.environ)
    num_nodes = getattr(options, "nodes", None) or 1
    groups = tuple(
        _limited(group, limit).model_copy(update={"num_nodes": num_nodes})
        for group in cluster.groups
    )
    return cluster.model_copy(update={"groups": groups})


def read_limit(options: object, environ: Mapping[str, str]) -> int | None:
    """Bytes per GPU, by the option or the variable."""
    stated: str | None = getattr(options, "memory_limit", None)
    if stated is None:
        text = environ.get(MEMORY_VARIABLE, "")
        return int(text) if text.isdecimal() and int(text) > 0 else None
    try:
        limit = parse_bytes(stated)
    except InvalidInputError as error:
        raise UsageError(error.problem, remedy="--memory-limit 20GiB") from error
    if limit < 1:
        raise UsageError("`--memory-limit 0` leaves no memory.", remedy="--memory-limit 20GiB")
    return limit


@contextmanager
def limiting(limit_bytes: int | None) -> Iterator[None]:
    """Workers inherit the limit; what runs in this process afterwards does not."""
    before = os.environ.get(MEMORY_VARIABLE)
    if limit_bytes is not None:
        os.environ[MEMORY_VARIABLE] = str(limit_bytes)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(MEMORY_VARIABLE, None)
        else:
            os.environ[MEMORY_VARIABLE] = before


def read_rendezvous(options: TrainOptions) -> Rendezvous | None:
    """Where the nodes meet; None for one node."""
    from tightfit.clusters.nodes import Rendezvous, parse_endpoint, probe_is_here

    if options.nodes == 1 and options.rendezvous is None:
        return None
    if options.rendezvous is None:
        raise UsageError(
            f"`--nodes {options.nodes}` needs an address where the nodes meet.",
            remedy=f"--nodes {options.nodes} --rendezvous FIRST-NODE:29500    (on every node)",
        )
    rank = options.node_rank
    if rank is not None and not (rank.strip().isdecimal() and int(rank) < options.nodes):
        raise UsageError(
            f"`--node-rank {shorten(rank)}` is not between 0 and {options.nodes - 1}.",
            remedy="--node-rank 0",
        )
    endpoint = parse_endpoint(options.rendezvous)
    number = None if rank is None else int(rank)
    is_here = probe_is_here(endpoint)
    return Rendezvous(
        endpoint=endpoint,
        # A second node on the same machine must not open the store once more.
        is_here=None if is_here and number else is_here,
        node_rank=number,
        local_address=options.local_addr,
        interface=options.interface,
    )


def limit_cluster(cluster: Cluster, options: PlanOptions) -> Cluster:
    """As much of each card as `--memory-limit` leaves."""
    limit = read_limit(options, {})
    return cluster.model_copy(
        update={"groups": tuple(_limited(group, limit) for group in cluster.groups)}
    )


def _limited(group: NodeGroup, limit: int | None) -> NodeGroup:
    if limit is None:
        return group
    node, gpu = group.node, group.node.gpu
    free = node.free_gpu_memory_bytes
    update = {
        "gpu": gpu.model_copy(update={"memory_bytes": min(gpu.memory_bytes, limit)}),
        "free_gpu_memory_bytes": None if free is None else min(free, limit),
    }
    return group.model_copy(update={"node": node.model_copy(update=update)})


def _refuse_absent(cluster: Cluster, named: str) -> None:
    """Words name cards that must be here."""
    here = resolve_hardware("here")
    present = {group.node.gpu.name: group.node.num_gpus for group in here.groups}
    for group in cluster.groups:
        if present.get(group.node.gpu.name, 0) < group.node.num_gpus:
            found = ", ".join(f"{count} x {name}" for name, count in present.items())
            raise SetupError(
                f"`--on {shorten(named)}` is not what this machine has ({found}).",
                remedy="--on here    (tightfit plan takes any hardware)",
            )
