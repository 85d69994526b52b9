"""What `sinfo` prints, as Slurm 20 to 25 print it: nodes, GRES, states and what jobs hold."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from tightfit.core.errors import EnvironmentFaultError, UserError
from tightfit.hardware.inventory import NodeState
from tightfit.hardware.time_limit import parse_time_limit

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
class SlurmNode:
    """One line: a node as a member of one partition."""

    name: str
    partition: str
    is_partition_up: bool
    gres: tuple[Gres, ...]
    memory_mib: int
    num_cores: int
    state: str
    max_seconds: float | None
    disk_mib: int
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDetails:
    """What jobs hold on a node. A None was not told."""

    held: tuple[Gres, ...] = ()
    num_shared_gpus: int = 0
    """GPUs of which jobs hold a part (shards, MPS): no job can have them whole."""
    allocated_mib: int | None = None
    num_idle_cores: int | None = None
    threads_per_core: int = 1
    reason: str = ""


def parse_nodes(text: str) -> list[SlurmNode]:
    """Lines of NODES_COMMAND."""
    nodes = []
    for line in filter(str.strip, text.splitlines()):
        fields = line.strip().split("|", 9)
        if len(fields) != 10:
            raise EnvironmentFaultError(
                f"sinfo printed a line of another shape: `{line.strip()[:120]}`.",
                remedy=f"run by hand: {shlex.join(NODES_COMMAND)}",
            )
        name, partition, available, gres, memory, cores, state, limit, disk, features = fields
        nodes.append(
            SlurmNode(
                name=name,
                partition=partition.rstrip("*"),
                is_partition_up=available == "up",
                gres=parse_gres(gres),
                memory_mib=_whole_number(memory),
                num_cores=_whole_number(cores),
                state=state.casefold(),
                max_seconds=_limit(limit),
                disk_mib=_whole_number(disk),
                features=_words(features),
            )
        )
    return nodes


def parse_details(text: str) -> dict[str, NodeDetails]:
    """Lines of DETAILS_COMMAND by node; columns that are missing are not told."""
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


def _limit(text: str) -> float | None:
    try:
        return parse_time_limit(text)
    except UserError:
        return None


def _words(features: str) -> tuple[str, ...]:
    if features.strip() in ("(null)", ""):
        return ()
    return tuple(word.strip() for word in features.split(",") if word.strip())
