"""What a Slurm cluster has and what of it is free, as `sinfo` tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightfit.core.errors import EnvironmentFaultError, NotFoundError
from tightfit.core.suggest import did_you_mean
from tightfit.core.units import MIB
from tightfit.hardware.commands import RunCommand, run_command
from tightfit.hardware.inventory import ClusterNode, Devices, Inventory, NodeState, Pool
from tightfit.hardware.plannable import plan_over
from tightfit.hardware.slurm_text import (
    ALL_PARTITIONS,
    DETAILS_COMMAND,
    NODES_COMMAND,
    Gres,
    NodeDetails,
    SlurmNode,
    parse_details,
    parse_nodes,
    read_state,
)
from tightfit.hardware.types import Cluster

TIMEOUT_SECONDS = 20.0


def probe_slurm(partition: str | None = None, *, run: RunCommand = run_command) -> Cluster:
    """What can be planned for; only `partition` where one is named."""
    return plan_over(probe_slurm_inventory(partition, run=run))


def probe_slurm_inventory(
    partition: str | None = None, *, run: RunCommand = run_command
) -> Inventory:
    """Every node that Slurm shows. A partition that is hidden is found by its name."""
    nodes = parse_nodes(run(NODES_COMMAND, TIMEOUT_SECONDS))
    options: tuple[str, ...] = ()
    if partition is not None and all(node.partition != partition for node in nodes):
        everything = parse_nodes(run((*NODES_COMMAND, ALL_PARTITIONS), TIMEOUT_SECONDS))
        if any(node.partition == partition for node in everything):
            nodes, options = everything, (ALL_PARTITIONS,)
    try:
        details = parse_details(run((*DETAILS_COMMAND, *options), TIMEOUT_SECONDS))
    except EnvironmentFaultError:
        details = None
    return build_inventory(nodes, details=details, partition=partition)


def build_inventory(
    nodes: Sequence[SlurmNode],
    *,
    details: Mapping[str, NodeDetails] | None,
    partition: str | None = None,
) -> Inventory:
    """Each node once with all its partitions."""
    if not nodes:
        raise EnvironmentFaultError(
            "Slurm shows no nodes to this user.", remedy="sinfo    (what you may use)"
        )
    names = sorted({node.partition for node in nodes})
    if partition is not None and partition not in names:
        raise NotFoundError(
            f"Slurm has no partition `{partition[:60]}`.{did_you_mean(partition[:60], names)}",
            remedy=f"choose one of: {', '.join(names[:20])}",
        )
    lines: dict[str, list[SlurmNode]] = {}
    pools: dict[str, Pool] = {}
    for node in nodes:
        lines.setdefault(node.name, []).append(node)
        pools[node.partition] = Pool(
            name=node.partition, max_seconds=node.max_seconds, is_open=node.is_partition_up
        )
    told = () if details is not None else (_UNKNOWN_USE,)
    inventory = Inventory(
        source="slurm",
        pools=tuple(pools[name] for name in names),
        nodes=tuple(_node(members, details) for members in lines.values()),
        warnings=told,
    )
    return inventory if partition is None else inventory.only(partition)


_UNKNOWN_USE = "sinfo does not tell which GPUs are in use; only idle nodes count as free."


def _node(lines: Sequence[SlurmNode], details: Mapping[str, NodeDetails] | None) -> ClusterNode:
    line = lines[0]
    known = (details or {}).get(line.name)
    state = read_state(line.state)
    memory = _told(line.memory_mib)
    allocated = known.allocated_mib if known is not None else None
    return ClusterNode(
        name=line.name,
        pools=tuple(sorted({one.partition for one in lines})),
        devices=_devices(line, state, known, knows_use=details is not None),
        memory_bytes=None if memory is None else memory * MIB,
        free_memory_bytes=None
        if memory is None or allocated is None
        else max(0, memory - allocated) * MIB,
        num_cores=_told(line.num_cores, least=1),
        num_free_cores=known.num_idle_cores if known is not None else None,
        threads_per_core=known.threads_per_core if known is not None else 1,
        disk_bytes=None if line.disk_mib <= 1 else line.disk_mib * MIB,
        features=line.features,
        state=state,
        state_word=line.state,
        reason=_reason(state, line, known),
    )


def _told(amount: int, *, least: int = 2) -> int | None:
    """None where Slurm was not told (0, or 1 MiB): it then accounts for none of it."""
    return amount if amount >= least else None


def _reason(state: NodeState, line: SlurmNode, known: NodeDetails | None) -> str:
    if state.takes_jobs:
        return ""
    if known is not None and known.reason:
        return known.reason
    return "it does not answer" if "*" in line.state else ""


def _devices(
    line: SlurmNode, state: NodeState, known: NodeDetails | None, *, knows_use: bool
) -> tuple[Devices, ...]:
    return tuple(
        Devices(
            kind=gres.kind,
            label=gres.kind or "gpu",
            hints=line.features,
            count=gres.count,
            num_free=_free_gpus(gres, state, known, knows_use=knows_use),
        )
        for gres in line.gres
        if gres.count > 0
    )


def _free_gpus(gres: Gres, state: NodeState, known: NodeDetails | None, *, knows_use: bool) -> int:
    if state is not NodeState.IDLE and not (state is NodeState.MIXED and knows_use):
        return 0
    if known is None:
        return gres.count if state is NodeState.IDLE else 0
    if known.num_idle_cores == 0:
        return 0  # a job needs a core beside its GPU
    by_kind: dict[str | None, int] = {}
    for one in known.held:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + one.count
    # Where the type is not configured, Slurm may still report use under a name it detected,
    # and where it is, use of GPUs that were asked for without one.
    held = by_kind.get(gres.kind, 0)
    if gres.kind is None:
        held = sum(by_kind.values())
    elif gres.kind not in by_kind:
        held = by_kind.get(None, 0)
    return max(0, gres.count - held - known.num_shared_gpus)
