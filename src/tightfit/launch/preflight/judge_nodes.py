"""Findings about the nodes themselves: reached, of the same versions, with clocks and GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from tightfit.core.units import GIB, MIB, render_bytes, render_seconds
from tightfit.hardware.findings import Finding, Status
from tightfit.launch.preflight.seen import Seen

GRAVE_PACKAGES = ("tightfit", "torch", "torch's CUDA", "NCCL")
"""Two versions of these do not work together, or nobody knows; of others they mostly do."""
MAX_SKEW_SECONDS = 1.0
LITTLE_SHM_BYTES = 512 * MIB
"""NCCL keeps buffers there for the GPUs of a node; containers give 64 MiB."""
LITTLE_DISK_BYTES = 2 * GIB
FEW_OPEN_FILES = 4096
SLOW_IMPORT_SECONDS = 15.0
_TOLD = {
    "facts": "it does not tell what it is",
    "torch": "torch did not load",
    "open": "no port could be opened there",
    "routes": "it does not tell its routes",
    "knock": "it did not finish connecting to the others",
    "spray": "it did not finish sending datagrams",
    "heard": "it does not tell which datagrams reached it",
    "stream": "the stream from there did not end",
}
"""Questions whose silence is not judged elsewhere."""


def judge_nodes(seen: Seen) -> Iterator[Finding]:
    yield from _judge_presence(seen)
    yield from _judge_versions(seen)
    yield from _judge_clocks(seen)
    yield from _judge_gpus(seen)
    yield from _judge_machines(seen)


def _judge_presence(seen: Seen) -> Iterator[Finding]:
    for node, why in seen.absent.items():
        yield Finding(
            area="nodes",
            name=node,
            status=Status.FAULT,
            detail=f"the agent does not start there: {why}",
            remedy=f"see whether a command runs on {node}, and whether this Python and tightfit "
            "are there too    (--run-with 'ssh {node}' says how a command gets there)",
        )
    for (node, question), why in seen.silent.items():
        if question not in _TOLD:
            continue
        yield Finding(
            area="nodes",
            name=node,
            status=Status.WARNING,
            detail=f"{_TOLD[question]}: {why}",
            remedy=f"see what keeps {node} busy: uptime, dmesg",
        )
    if seen.present:
        told = f"{len(seen.present)} of {len(seen.nodes)} answer"
        yield Finding(area="nodes", name="agents", status=Status.OK, detail=told)


def _judge_versions(seen: Seen) -> Iterator[Finding]:
    if len(seen.present) < 2:
        return
    tables = {node: {**facts.packages, "Python": facts.python, "NVIDIA driver": facts.driver}
              for node, facts in seen.facts.items()}  # fmt: skip
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    has_any = False
    for name in names:
        versions = {node: table.get(name) for node, table in tables.items()}
        if len(set(versions.values())) == 1:
            continue
        has_any = True
        yield Finding(
            area="versions",
            name=name,
            status=Status.FAULT if name in GRAVE_PACKAGES else Status.WARNING,
            detail=_tell_apart(versions),
            remedy=_remedy_of(name, versions),
        )
    if not has_any:
        first = tables[seen.present[0]]
        told = ", ".join(f"{name} {first[name]}" for name in ("Python", "torch", "tightfit")
                         if first.get(name))  # fmt: skip
        yield Finding(area="versions", name="all", status=Status.OK, detail=f"the same: {told}")


def _tell_apart(versions: Mapping[str, str | None]) -> str:
    by_version: dict[str, list[str]] = defaultdict(list)
    for node, version in versions.items():
        by_version[version or "none"].append(node)
    return "differs: " + "; ".join(
        f"{version} on {list_nodes(nodes)}" for version, nodes in by_version.items()
    )


def _remedy_of(name: str, versions: Mapping[str, str | None]) -> str:
    known = [version for version in versions.values() if version is not None]
    if name in ("Python", "NVIDIA driver", "torch's CUDA", "NCCL") or not known:
        return f"use the same environment on all nodes, with one {name}"
    common = max(known, key=known.count)
    plain = common.partition("+")[0]
    return f"on the others: pip install {name}=={plain}    (or one environment that all nodes see)"


def list_nodes(nodes: list[str]) -> str:
    shown = ", ".join(nodes[:4])
    return shown if len(nodes) <= 4 else f"{shown} and {len(nodes) - 4} more"


def _judge_clocks(seen: Seen) -> Iterator[Finding]:
    if len(seen.clocks) < 2:
        return
    offsets = {node: clock.offset_seconds for node, clock in seen.clocks.items()}
    middle = sorted(offsets.values())[len(offsets) // 2]
    ahead, behind = max(offsets, key=offsets.__getitem__), min(offsets, key=offsets.__getitem__)
    skew = offsets[ahead] - offsets[behind]
    error = max(clock.error_seconds for clock in seen.clocks.values())
    if skew - 2 * error <= MAX_SKEW_SECONDS:
        told = f"at most {(skew + 2 * error) * 1e3:.1f} ms apart"
        yield Finding(area="clock", name="all", status=Status.OK, detail=told)
        return
    off = max(offsets, key=lambda node: abs(offsets[node] - middle))
    yield Finding(
        area="clock",
        name=off if len(offsets) > 2 else f"{behind} and {ahead}",
        status=Status.WARNING,
        detail=f"{ahead} is {render_seconds(skew)} ahead of {behind}: logs, leases and `make` "
        "will be confused by it",
        remedy=f"on {ahead} and {behind}: chronyc tracking    (start chronyd or systemd-timesyncd)",
    )


def _judge_gpus(seen: Seen) -> Iterator[Finding]:
    for node, facts in seen.torch.items():
        known = seen.facts[node].gpus if node in seen.facts else ()
        if facts.fault is not None:
            yield _gpu(node, Status.FAULT, f"torch does not load: {facts.fault}",
                       "pip install 'tightfit[train]'    (on that node)")  # fmt: skip
        elif known and facts.num_gpus == 0:
            yield _gpu(
                node,
                Status.FAULT,
                f"the driver shows {len(known)} GPUs, torch {facts.version} none of them",
                "pip install torch for CUDA, not newer than the driver supports: tightfit doctor",
            )
        elif facts.import_seconds > SLOW_IMPORT_SECONDS:
            yield _gpu(
                node,
                Status.WARNING,
                f"torch took {render_seconds(facts.import_seconds)} to load",
                "put the environment on a local disk, or into a container image",
            )
    kinds = {node: facts.gpu_names for node, facts in seen.torch.items() if facts.fault is None}
    if len(set(kinds.values())) > 1:
        told = "; ".join(f"{node}: {_name_gpus(names)}" for node, names in kinds.items())
        yield _gpu("all", Status.FAULT, f"the nodes differ: {told}",
                   "choose nodes of one kind: a job runs the same on each")  # fmt: skip
    elif kinds:
        names = next(iter(kinds.values()))
        yield _gpu("all", Status.OK if names else Status.INFO, f"torch sees {_name_gpus(names)}"
                   f"{' on each node' if names else ': training would use the CPUs'}")  # fmt: skip


def _name_gpus(names: tuple[str, ...]) -> str:
    return f"{len(names)}x{names[0]}" if names else "no GPU"


def _gpu(node: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="gpu", name=node, status=status, detail=detail, remedy=remedy)


def _judge_machines(seen: Seen) -> Iterator[Finding]:
    for node, facts in seen.facts.items():
        yield Finding(
            area="machine",
            name=node,
            status=Status.OK,
            detail=f"{facts.num_cores} cores, {render_bytes(facts.free_memory_bytes)} of "
            f"{render_bytes(facts.memory_bytes)} RAM free, /dev/shm "
            f"{render_bytes(facts.shm_free_bytes)} free, temporary files "
            f"{render_bytes(facts.disk_free_bytes)} free",
        )
        if facts.shm_bytes < LITTLE_SHM_BYTES and len(facts.gpus) > 1:
            yield _machine(
                node,
                f"/dev/shm has {render_bytes(facts.shm_bytes)}, and NCCL needs it between GPUs",
                "docker run --shm-size 8g, or a Memory emptyDir at /dev/shm",
            )
        if facts.disk_free_bytes < LITTLE_DISK_BYTES:
            yield _machine(
                node,
                f"{render_bytes(facts.disk_free_bytes)} free for temporary files",
                "export TMPDIR=/a/larger/disk",
            )
        if 0 < facts.max_open_files < FEW_OPEN_FILES:
            yield _machine(
                node,
                f"a process may open {facts.max_open_files} files; loaders and NCCL open many",
                "ulimit -n 65536    (before the job)",
            )
        if facts.has_infiniband and facts.max_locked_bytes is not None:
            yield _machine(
                node,
                f"a process may lock {render_bytes(facts.max_locked_bytes)} of memory; InfiniBand "
                "then fails or falls back to TCP",
                "ulimit -l unlimited    (in Slurm: LimitMEMLOCK=infinity for slurmd)",
            )


def _machine(node: str, detail: str, remedy: str) -> Finding:
    return Finding(area="machine", name=node, status=Status.WARNING, detail=detail, remedy=remedy)
