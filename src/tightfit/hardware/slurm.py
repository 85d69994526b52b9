"""What a Slurm cluster has and what is free, read from `sinfo` (Slurm 20 to 25)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tightfit.core.errors import NotFoundError, SetupError, UserError
from tightfit.core.text import did_you_mean
from tightfit.core.units import MIB, parse_time_limit
from tightfit.hardware.command import RunCommand, run_command
from tightfit.hardware.inventory import (
    ClusterNode,
    Inventory,
    NodeGpus,
    NodePool,
    NodeState,
)

# What `sinfo` prints, as Slurm 20 to 25 print it: nodes, GRES, states and what jobs hold.

NODES_COMMAND = ("sinfo", "-h", "-N", "-o", "%N|%R|%a|%G|%m|%c|%t|%l|%d|%f")
"""Node, partition, is it up, GRES, MiB of memory, CPUs, state, limit, MiB of disk, features."""
_COLUMNS = {
    "NodeList": 64,
    "GresUsed": 256,
    "AllocMem": 24,
    "CPUsState": 40,
    "SocketCoreThread": 24,
    "Reason": 200,
}
DETAILS_COMMAND = (
    *("sinfo", "-h", "-N", "-O"),
    ",".join(f"{name}:{width}" for name, width in _COLUMNS.items()),
)
"""GRES and memory in use. Only -O knows them, and only in columns of fixed width."""
ALL_PARTITIONS = "-a"
"""Also those that are hidden from this user."""

_STATES = {
    "idle": NodeState.IDLE,
    "mix": NodeState.MIXED,
    "alloc": NodeState.ALLOCATED,
    "comp": NodeState.ALLOCATED,
    "drain": NodeState.DRAINED,
    "drng": NodeState.DRAINED,
    **dict.fromkeys(
        ("down", "fail", "failg", "futr", "inval", "unk", "err", "error"), NodeState.DOWN
    ),
}
"""By sinfo's short words. Others (maint, resv, plnd, pow_dn, blocked) keep nodes for a while."""
_FLAGS = "*~#!%$@^-+"
_FLAG_UNREACHABLE = "*"
_FLAGS_BUSY = "!%$@^-"
"""Powering down, in maintenance, rebooting, planned for another job. `~` and `#` wake up for us."""
_PARENTHESES = re.compile(r"\([^)]*(?:\)|$)")
_PARTS = re.compile(r"((?:[^,(]|\([^)]*(?:\)|$))+)")
_SHARES = re.compile(r"([0-9]+)/[0-9]+")
_SHARED_GRES = ("shard", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gres:
    """GPUs of one type on one node."""

    kind: str | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDetails:
    """What jobs hold on a node. None: not stated."""

    held: tuple[Gres, ...] = ()
    num_shared_gpus: int = 0
    """GPUs of which jobs hold a part (shards, MPS): no job can have them whole."""
    allocated_mib: int | None = None
    num_idle_cores: int | None = None
    threads_per_core: int = 1
    reason: str = ""


def parse_nodes(text: str) -> list[tuple[NodePool, ClusterNode]]:
    """Lines of NODES_COMMAND: a partition, and a node in it."""
    nodes = []
    for line in filter(str.strip, text.splitlines()):
        fields = line.strip().split("|", 9)
        if len(fields) != 10:
            raise SetupError(
                f"sinfo printed a line of another shape: `{line.strip()[:120]}`.",
                remedy=f"run by hand: {shlex.join(NODES_COMMAND)}",
            )
        name, partition, available, gres, memory, cores, state, limit, disk, features = fields
        words = (word.strip() for word in features.split(","))
        known = tuple(word for word in words if word and word != "(null)")
        pool = NodePool(
            name=partition.rstrip("*"), max_seconds=_limit(limit), is_open=available == "up"
        )
        node = ClusterNode(
            name=name,
            pools=(pool.name,),
            devices=tuple(
                NodeGpus(
                    kind=one.kind,
                    label=one.kind or "gpu",
                    hints=known,
                    count=one.count,
                    num_free=None,
                )
                for one in parse_gres(gres)
                if one.count > 0
            ),
            memory_bytes=_accounted_bytes(memory),
            num_cores=_whole_number(cores) or None,
            disk_bytes=_accounted_bytes(disk),
            features=known,
            state=read_state(state.casefold()),
            state_word=state.casefold(),
        )
        nodes.append((pool, node))
    return nodes


def parse_details(text: str) -> dict[str, NodeDetails]:
    """Lines of DETAILS_COMMAND by node; missing columns are None."""
    found = {}
    for line in filter(str.strip, text.splitlines()):
        columns, start = {}, 0
        for name, width in _COLUMNS.items():
            columns[name] = line[start : start + width].strip()
            start += width
        allocated, cores = columns["AllocMem"], columns["CPUsState"].split("/")
        threads = columns["SocketCoreThread"].rpartition(":")[2]
        reason = columns["Reason"]
        found[columns["NodeList"]] = NodeDetails(
            held=parse_gres(columns["GresUsed"]),
            num_shared_gpus=count_shared(columns["GresUsed"]),
            allocated_mib=_whole_number(allocated) if allocated.isdigit() else None,
            num_idle_cores=_whole_number(cores[1]) if len(cores) == 4 else None,
            threads_per_core=max(1, _whole_number(threads)),
            reason="" if reason.casefold() in ("none", "(null)") else reason,
        )
    return found


def parse_gres(text: str) -> tuple[Gres, ...]:
    """`gpu:v100:4(S:0-1),mps:400`, `gpu:4`, `gpu:(null):2`, `(null)`: the GPUs in it."""
    found: list[Gres] = []
    for part in _PARENTHESES.sub("", text).split(","):
        name, *rest = part.strip().removeprefix("gres/").split(":")
        if name != "gpu":
            continue
        count = rest.pop() if rest and rest[-1].isdigit() else "1"
        kind = ":".join(word for word in rest if word and word != "no_consume")
        found.append(Gres(kind=kind or None, count=_whole_number(count)))
    return tuple(found)


def count_shared(text: str) -> int:
    """GPUs of which `shard:a100:3(3/8,0/8)` says that a part is held."""
    most = 0
    for part in _PARTS.findall(text):
        if part.strip().partition(":")[0] in _SHARED_GRES:
            held = [share for share in _SHARES.findall(part) if int(share) > 0]
            most = max(most, len(held))
    return most


def read_state(word: str) -> NodeState:
    """`idle`, `mix-`, `down*`, `drng@` as one of our states."""
    plain = word.rstrip(_FLAGS)
    found = _STATES.get(plain, NodeState.RESERVED)
    if _FLAG_UNREACHABLE in word and found is not NodeState.DRAINED:
        return NodeState.DOWN
    is_busy = any(flag in word for flag in _FLAGS_BUSY)
    return NodeState.RESERVED if is_busy and found is NodeState.IDLE else found


def _whole_number(text: str) -> int:
    digits = re.match(r"[0-9]{1,12}", text.strip())
    return int(digits.group()) if digits else 0


def _accounted_bytes(mib: str) -> int | None:
    """0 or 1 MiB means that Slurm was not configured to account for it."""
    return _whole_number(mib) * MIB if _whole_number(mib) > 1 else None


def _limit(text: str) -> float | None:
    try:
        return parse_time_limit(text)
    except UserError:
        return None


TIMEOUT_SECONDS = 20.0


def probe_slurm_inventory(
    partition: str | None = None, *, run: RunCommand = run_command
) -> Inventory:
    """Every node that Slurm shows. A partition that is hidden is found by its name."""
    nodes = parse_nodes(run(NODES_COMMAND, TIMEOUT_SECONDS))
    options: tuple[str, ...] = ()
    if partition is not None and all(pool.name != partition for pool, _ in nodes):
        everything = parse_nodes(run((*NODES_COMMAND, ALL_PARTITIONS), TIMEOUT_SECONDS))
        if any(pool.name == partition for pool, _ in everything):
            nodes, options = everything, (ALL_PARTITIONS,)
    try:
        details = parse_details(run((*DETAILS_COMMAND, *options), TIMEOUT_SECONDS))
    except SetupError:
        details = None
    return build_inventory(nodes, details=details, partition=partition)


def build_inventory(
    lines: Sequence[tuple[NodePool, ClusterNode]],
    *,
    details: Mapping[str, NodeDetails] | None,
    partition: str | None = None,
) -> Inventory:
    """Each node once with all its partitions."""
    if not lines:
        raise SetupError("Slurm shows no nodes to this user.", remedy="sinfo    (what you may use)")
    pools = {pool.name: pool for pool, _ in lines}
    names = sorted(pools)
    if partition is not None and partition not in names:
        raise NotFoundError(
            f"Slurm has no partition `{partition[:60]}`.{did_you_mean(partition[:60], names)}",
            remedy=f"choose one of: {', '.join(names[:20])}",
        )
    nodes: dict[str, ClusterNode] = {}
    for pool, node in lines:
        seen = nodes.setdefault(node.name, node)
        nodes[node.name] = replace(seen, pools=tuple(sorted({*seen.pools, pool.name})))
    warning = "sinfo does not say which GPUs are in use; only idle nodes count as free."
    inventory = Inventory(
        source="slurm",
        pools=tuple(pools[name] for name in names),
        nodes=tuple(_add_details(node, details) for node in nodes.values()),
        warnings=() if details is not None else (warning,),
    )
    return inventory if partition is None else inventory.only(partition)


def _add_details(node: ClusterNode, details: Mapping[str, NodeDetails] | None) -> ClusterNode:
    """The node with what jobs hold of it."""
    known = (details or {}).get(node.name) or NodeDetails()
    knows_use = node.name in (details or {})
    free = None
    if node.memory_bytes is not None and known.allocated_mib is not None:
        free = max(0, node.memory_bytes - known.allocated_mib * MIB)
    reason = known.reason or ("it does not answer" if _FLAG_UNREACHABLE in node.state_word else "")
    return replace(
        node,
        devices=tuple(
            replace(one, num_free=_free_gpus(one, node.state, known, knows_use=knows_use))
            for one in node.devices
        ),
        free_memory_bytes=free,
        num_free_cores=known.num_idle_cores,
        threads_per_core=known.threads_per_core,
        reason="" if node.state.takes_jobs else reason,
    )


def _free_gpus(gpus: NodeGpus, state: NodeState, known: NodeDetails, *, knows_use: bool) -> int:
    if state is not NodeState.IDLE and not (state is NodeState.MIXED and knows_use):
        return 0
    if known.num_idle_cores == 0:
        return 0  # a job needs a core beside its GPU
    by_kind: dict[str | None, int] = {}
    for one in known.held:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + one.count
    # Where the type is not configured, Slurm may still report use under a name it detected,
    # and where it is, use of GPUs that were asked for without one.
    held = by_kind.get(gpus.kind, 0)
    if gpus.kind is None:
        held = sum(by_kind.values())
    elif gpus.kind not in by_kind:
        held = by_kind.get(None, 0)
    return max(0, gpus.count - held - known.num_shared_gpus)
