"""What a Slurm cluster has: nodes, GPUs and limits from `sinfo`, as Slurm 20 to 25 print them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UserError
from tightfit.core.suggest import did_you_mean
from tightfit.core.units import MIB
from tightfit.hardware.commands import RunCommand, run_command
from tightfit.hardware.gpu_hints import Guess, guess_gpu
from tightfit.hardware.time_limit import parse_time_limit
from tightfit.hardware.types import Cluster, Node, NodeGroup

TIMEOUT_SECONDS = 20.0
NODES_COMMAND = ("sinfo", "-h", "-N", "-o", "%N|%R|%a|%G|%m|%c|%t|%l|%d|%f")
"""Node, partition, is it up, GRES, MiB of memory, CPUs, state, limit, MiB of disk, features."""
USED_COMMAND = ("sinfo", "-h", "-N", "-O", "NodeList:64,GresUsed:256")
"""GRES in use. Only -O knows it, and only in columns of fixed width."""

_NO_JOBS = {"down", "drain", "drng", "fail", "failg", "futr", "inval", "unk", "err", "error"}
_FLAGS = "*~#!%$@^-+"
_FLAG_UNREACHABLE = "*"
_FLAGS_BUSY = "!%$@^-"
"""Powering down, in maintenance, rebooting, planned for another job. `~` and `#` wake up for us."""
_PARENTHESES = re.compile(r"\([^)]*\)")


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

    @property
    def takes_jobs(self) -> bool:
        """Now or once the present ones end."""
        return self.state.rstrip(_FLAGS) not in _NO_JOBS and _FLAG_UNREACHABLE not in self.state

    @property
    def is_idle(self) -> bool:
        return (
            self.takes_jobs
            and self.state.rstrip(_FLAGS) == "idle"
            and not any(flag in self.state for flag in _FLAGS_BUSY)
        )

    @property
    def is_shared(self) -> bool:
        """Some of it is taken, some is not."""
        return self.takes_jobs and self.state.rstrip(_FLAGS) == "mix"


def probe_slurm(partition: str | None = None, *, run: RunCommand = run_command) -> Cluster:
    """Ask Slurm; only `partition` where one is named."""
    nodes = parse_nodes(run(NODES_COMMAND, TIMEOUT_SECONDS))
    try:
        used = parse_used(run(USED_COMMAND, TIMEOUT_SECONDS))
    except EnvironmentFaultError:
        used = None
    return build_cluster(nodes, used=used, partition=partition)


def parse_nodes(text: str) -> list[SlurmNode]:
    """Lines of NODES_COMMAND."""
    nodes = []
    for line in filter(str.strip, text.splitlines()):
        fields = line.strip().split("|", 9)
        if len(fields) != 10:
            raise EnvironmentFaultError(
                f"sinfo printed a line of another shape: `{line.strip()[:120]}`.",
                remedy=f"run by hand: {' '.join(NODES_COMMAND)}",
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


def parse_used(text: str) -> dict[str, dict[str | None, int]]:
    """Lines of USED_COMMAND: node to GPU type to how many of them jobs hold."""
    used: dict[str, dict[str | None, int]] = {}
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.strip().partition(" ")
        used[name] = {gres.kind: gres.count for gres in parse_gres(rest.strip())}
    return used


def parse_gres(text: str) -> tuple[Gres, ...]:
    """`gpu:v100:4(S:0-1),mps:400`, `gpu:4`, `gpu:a100_1g.5gb:7` or `(null)`: the GPUs in it."""
    found: list[Gres] = []
    for part in _PARENTHESES.sub("", text).split(","):
        name, *rest = part.strip().split(":")
        if name != "gpu":
            continue
        count = rest.pop() if rest and rest[-1].isdigit() else "1"
        found.append(Gres(kind=":".join(rest) or None, count=_whole_number(count)))
    return tuple(found)


def build_cluster(
    nodes: Sequence[SlurmNode],
    *,
    used: Mapping[str, Mapping[str | None, int]] | None,
    partition: str | None = None,
) -> Cluster:
    """Groups by partition, GPU type and count. Memory, cores and disk are a group's smallest."""
    chosen = _only(nodes, partition)
    warnings: list[str] = []
    members = _members(chosen, warnings)
    kinds_in: dict[str, set[tuple[str | None, int]]] = defaultdict(set)
    for name, kind, count in members:
        kinds_in[name].add((kind, count))
    groups = []
    for (name, kind, count), inside in sorted(members.items(), key=_order):
        guess = guess_gpu(kind, inside[0].features)
        warnings += [f"Partition {name}: {note}" for note in guess.warnings]
        label = name if len(kinds_in[name]) == 1 else f"{name}/{count}x{kind or 'gpu'}"
        group = _group(label, Gres(kind=kind, count=count), inside, guess=guess, used=used)
        if group is not None:
            groups.append(group)
    if not groups:
        raise _no_gpus(partition, warnings)
    warnings += _shared_nodes(members)
    if used is None:
        warnings.append("sinfo does not tell which GPUs are in use; only idle nodes count as free.")
    source = f"slurm:{partition}" if partition else "slurm"
    return Cluster(groups=tuple(groups), source=source, warnings=tuple(dict.fromkeys(warnings)))


_Key = tuple[str, str | None, int]


def _order(item: tuple[_Key, object]) -> tuple[str, str, int]:
    partition, kind, count = item[0]
    return partition, kind or "", count


def _only(nodes: Sequence[SlurmNode], partition: str | None) -> list[SlurmNode]:
    if not nodes:
        raise EnvironmentFaultError(
            "Slurm shows no nodes to this user.", remedy="sinfo    (what you may use)"
        )
    if partition is None:
        return list(nodes)
    chosen = [node for node in nodes if node.partition == partition]
    if not chosen:
        names = sorted({node.partition for node in nodes})
        raise NotFoundError(
            f"Slurm has no partition `{partition[:60]}`.{did_you_mean(partition[:60], names)}",
            remedy=f"choose one of: {', '.join(names[:20])}",
        )
    return chosen


def _members(nodes: Sequence[SlurmNode], warnings: list[str]) -> dict[_Key, list[SlurmNode]]:
    """Usable GPU nodes by group; what is left out goes to `warnings`."""
    members: dict[_Key, list[SlurmNode]] = defaultdict(list)
    without: dict[str, list[str]] = defaultdict(list)
    closed: dict[str, None] = {}
    broken: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        if not node.gres:
            without[node.partition].append(node.name)
        elif not node.is_partition_up:
            closed[node.partition] = None
        elif not node.takes_jobs:
            broken[node.partition].append(f"{node.name} ({node.state})")
        else:
            for gres in node.gres:
                if gres.count > 0:
                    members[(node.partition, gres.kind, gres.count)].append(node)
    warnings += [
        f"Partition {name}: {_list(names)} without GPUs left out."
        for name, names in without.items()
    ]
    warnings += [f"Partition {name} takes no jobs at present; left out." for name in closed]
    warnings += [
        f"Partition {name}: {_list(names)} taking no jobs left out."
        for name, names in broken.items()
    ]
    return members


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more nodes"


def _group(
    name: str,
    gres: Gres,
    nodes: Sequence[SlurmNode],
    *,
    guess: Guess,
    used: Mapping[str, Mapping[str | None, int]] | None,
) -> NodeGroup | None:
    if guess.gpu is None:
        return None
    free = [_free_gpus(node, gres, used) for node in nodes]
    says_nvlink = any("nvlink" in feature.casefold() for feature in nodes[0].features)
    node = Node(
        gpu=guess.gpu,
        num_gpus=1 if guess.is_slice else gres.count,
        host_memory_bytes=_smallest((node.memory_mib for node in nodes), unit=MIB),
        num_cores=_smallest((node.num_cores for node in nodes), unit=1),
        disk_bytes=_smallest((node.disk_mib for node in nodes), unit=MIB),
        has_nvlink=True if says_nvlink and guess.gpu.nvlink_bytes_per_second else None,
    )
    return NodeGroup(
        name=name,
        node=node,
        num_nodes=len(nodes),
        num_free_nodes=sum(count >= node.num_gpus for count in free),
        num_free_gpus=sum(free),
        max_seconds=nodes[0].max_seconds,
    )


def _free_gpus(
    node: SlurmNode, gres: Gres, used: Mapping[str, Mapping[str | None, int]] | None
) -> int:
    if not (node.is_idle or (node.is_shared and used is not None)):
        return 0
    taken = (used or {}).get(node.name, {})
    # Where the type is not configured, Slurm may still report use under a name it detected.
    held = taken.get(gres.kind, sum(taken.values()) if gres.kind is None else 0)
    return max(0, gres.count - held)


def _smallest(amounts: Iterable[int], *, unit: int) -> int | None:
    """None where Slurm was not told (0 or 1): it then accounts for none of it."""
    smallest = min(amounts)
    return smallest * unit if smallest > 1 else None


def _shared_nodes(members: Mapping[_Key, Sequence[SlurmNode]]) -> list[str]:
    partitions: dict[str, set[str]] = defaultdict(set)
    for (partition, _, _), nodes in members.items():
        for node in nodes:
            partitions[node.name].add(partition)
    shared = sorted({tuple(sorted(names)) for names in partitions.values() if len(names) > 1})
    return [
        f"Partitions {' and '.join(names)} share nodes; they are listed in each."
        for names in shared
    ]


def _no_gpus(partition: str | None, warnings: Sequence[str]) -> EnvironmentFaultError:
    where = f"Partition {partition}" if partition else "This Slurm cluster"
    detail = f" {' '.join(warnings[:3])}" if warnings else ""
    return EnvironmentFaultError(
        f"{where} has no GPU node that can be planned for.{detail}",
        remedy="name another partition, or say the hardware in words: --on 4xV100-32GB",
    )


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
