"""The hardware of a job: named by `--on` or found here, its memory limit, its rendezvous."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tightfit.cli.flags.training import TrainFlags
from tightfit.cli.network import state_network
from tightfit.clusters.rendezvous import Rendezvous, parse_endpoint, probe_is_here
from tightfit.core.errors import InvalidInputError, SetupError, UsageError, UserError
from tightfit.core.text import shorten
from tightfit.core.training import MEMORY_VARIABLE
from tightfit.core.units import parse_bytes
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster, NodeGroup

# Which hardware is meant where `--on` was not given: this machine, else what the verb says.

DEFAULT_CARD = "RTX-4090"
"""What an estimate is made against where no GPU is here and none was named."""


def choose_cluster_or_card(on: str | None) -> tuple[Cluster, tuple[str, ...]]:
    """For an estimate, which is useful without any GPU: a common card, and a note that says so."""
    found = _find_cluster(on)
    if found is not None:
        return found, () if on else ("Estimated on this machine (--on was not given).",)
    cluster = resolve_hardware(DEFAULT_CARD)
    card = cluster.groups[0].node.gpu.name
    return cluster, (f"No GPU is here and --on was not given: estimated on one {card}.",)


def choose_cluster(on: str | None, *, command: str) -> Cluster:
    """For a plan, which is made for hardware that exists."""
    found = _find_cluster(on)
    if found is None:
        raise UsageError(
            "No GPU is here, and --on was not given.",
            remedy=f"{command} --on 4xV100-32GB    (--on cpu for this machine; --buy to be told "
            "what to rent)",
        )
    return found


def _find_cluster(on: str | None) -> Cluster | None:
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
    from tightfit.runs.measured_rates import apply_calibrations

    return apply_calibrations(cluster)


ELSEWHERE = ("slurm", "k8s", "kubernetes")


def find_hardware(flags: TrainFlags, on: str | None) -> Cluster:
    """This machine, or the part of it that `--on` names; times the nodes of the job."""
    said = on or "here"
    if said.partition(":")[0].strip().casefold() in ELSEWHERE:
        raise UsageError(
            f"`--on {shorten(said)}` is a cluster; `train` trains where it is started.",
            remedy=f"tightfit submit {shorten(flags.job)} --on {shorten(said)}    (as a job there)",
        )
    cluster = state_network(with_measured_rates(resolve_hardware(said)), flags.network)
    if cluster.source != "here":
        _refuse_absent(cluster, said)
    limit = read_limit(flags, os.environ)
    groups = tuple(
        _limited(group, limit).model_copy(update={"num_nodes": flags.nodes})
        for group in cluster.groups
    )
    return cluster.model_copy(update={"groups": groups})


def read_limit(flags: TrainFlags, environ: Mapping[str, str]) -> int | None:
    """Bytes per GPU, by the option or the variable."""
    if flags.memory_limit is None:
        text = environ.get(MEMORY_VARIABLE, "")
        return int(text) if text.isdecimal() and int(text) > 0 else None
    try:
        limit = parse_bytes(flags.memory_limit)
    except InvalidInputError as fault:
        raise UsageError(fault.problem, remedy="--memory-limit 20GiB") from fault
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


def read_rendezvous(flags: TrainFlags) -> Rendezvous | None:
    """Where the nodes meet; None for one node."""
    if flags.nodes == 1 and flags.rendezvous is None:
        return None
    if flags.rendezvous is None:
        raise UsageError(
            f"`--nodes {flags.nodes}` needs a place where the nodes meet.",
            remedy=f"--nodes {flags.nodes} --rendezvous FIRST-NODE:29500    (on every node)",
        )
    rank = flags.node_rank
    if rank is not None and not (rank.strip().isdecimal() and int(rank) < flags.nodes):
        raise UsageError(
            f"`--node-rank {shorten(rank)}` is not between 0 and {flags.nodes - 1}.",
            remedy="--node-rank 0",
        )
    endpoint = parse_endpoint(flags.rendezvous)
    number = None if rank is None else int(rank)
    is_here = probe_is_here(endpoint)
    return Rendezvous(
        endpoint=endpoint,
        # A second node on the same machine must not open the store once more.
        is_here=None if is_here and number else is_here,
        node_rank=number,
        local_address=flags.local_addr,
        interface=flags.interface,
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


def _refuse_absent(cluster: Cluster, said: str) -> None:
    """Words name cards that must be here."""
    here = resolve_hardware("here")
    held = {group.node.gpu.name: group.node.num_gpus for group in here.groups}
    for group in cluster.groups:
        if held.get(group.node.gpu.name, 0) < group.node.num_gpus:
            found = ", ".join(f"{count} x {name}" for name, count in held.items())
            raise SetupError(
                f"`--on {shorten(said)}` is not what this machine has ({found}).",
                remedy="--on here    (tightfit plan takes any hardware)",
            )
