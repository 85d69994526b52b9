"""Findings about the nodes and their shared folder: reached, same versions, clocks, GPUs, files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from tightfit.clusters.preflight.folder import EXCLUSIVE, LINKED
from tightfit.clusters.preflight.observations import FolderObservations, Observations
from tightfit.core.findings import Finding, Status
from tightfit.core.units import GIB, MIB, render_bytes, render_seconds

CRITICAL_PACKAGES = ("tightfit", "torch", "torch's CUDA", "NCCL")
"""Two versions of these do not work together, or nobody knows; of others they mostly do."""
MAX_SKEW_SECONDS = 1.0
LITTLE_SHM_BYTES = 512 * MIB
"""NCCL keeps buffers there for the GPUs of a node; containers give 64 MiB."""
LITTLE_DISK_BYTES = 2 * GIB
FEW_OPEN_FILES = 4096
SLOW_IMPORT_SECONDS = 15.0
_UNANSWERED = {
    "facts": "it does not tell what it is",
    "torch": "torch did not load",
    "open": "no port could be opened there",
    "routes": "it does not tell its routes",
    "connect": "it did not finish connecting to the others",
    "datagrams": "it did not finish sending datagrams",
    "received": "it does not tell which datagrams reached it",
    "stream": "the stream from there did not end",
}
"""Questions whose silence is not judged elsewhere."""


def check_nodes(observed: Observations) -> Iterator[Finding]:
    yield from _check_presence(observed)
    yield from _check_versions(observed)
    yield from _check_clocks(observed)
    yield from _check_gpus(observed)
    yield from _check_machines(observed)


def _check_presence(observed: Observations) -> Iterator[Finding]:
    for node, why in observed.absent.items():
        yield Finding(
            area="nodes",
            name=node,
            status=Status.FAULT,
            detail=f"the agent does not start there: {why}",
            remedy=f"see whether a command runs on {node}, and whether this Python and tightfit "
            "are there too    (--run-with 'ssh {node}' says how a command gets there)",
        )
    for (node, question), why in observed.silent.items():
        if question not in _UNANSWERED:
            continue
        yield Finding(
            area="nodes",
            name=node,
            status=Status.WARNING,
            detail=f"{_UNANSWERED[question]}: {why}",
            remedy=f"see what keeps {node} busy: uptime, dmesg",
        )
    if observed.present:
        text = f"{len(observed.present)} of {len(observed.nodes)} answer"
        yield Finding(area="nodes", name="agents", status=Status.OK, detail=text)


def _check_versions(observed: Observations) -> Iterator[Finding]:
    if len(observed.present) < 2:
        return
    tables = {node: {**facts.packages, "Python": facts.python, "NVIDIA driver": facts.driver}
              for node, facts in observed.facts.items()}  # fmt: skip
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
            status=Status.FAULT if name in CRITICAL_PACKAGES else Status.WARNING,
            detail=_describe_difference(versions),
            remedy=_remedy_of(name, versions),
        )
    if not has_any:
        first = tables[observed.present[0]]
        text = ", ".join(f"{name} {first[name]}" for name in ("Python", "torch", "tightfit")
                         if first.get(name))  # fmt: skip
        yield Finding(area="versions", name="all", status=Status.OK, detail=f"the same: {text}")


def _describe_difference(versions: Mapping[str, str | None]) -> str:
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


def _check_clocks(observed: Observations) -> Iterator[Finding]:
    if len(observed.clocks) < 2:
        return
    offsets = {node: clock.offset_seconds for node, clock in observed.clocks.items()}
    middle = sorted(offsets.values())[len(offsets) // 2]
    ahead, behind = max(offsets, key=offsets.__getitem__), min(offsets, key=offsets.__getitem__)
    skew = offsets[ahead] - offsets[behind]
    error = max(clock.error_seconds for clock in observed.clocks.values())
    if skew - 2 * error <= MAX_SKEW_SECONDS:
        text = f"at most {(skew + 2 * error) * 1e3:.1f} ms apart"
        yield Finding(area="clock", name="all", status=Status.OK, detail=text)
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


def _check_gpus(observed: Observations) -> Iterator[Finding]:
    for node, facts in observed.torch.items():
        known = observed.facts[node].gpus if node in observed.facts else ()
        if facts.error is not None:
            yield _gpu_finding(node, Status.FAULT, f"torch does not load: {facts.error}",
                       "pip install 'tightfit[train]'    (on that node)")  # fmt: skip
        elif known and facts.num_gpus == 0:
            yield _gpu_finding(
                node,
                Status.FAULT,
                f"the driver shows {len(known)} GPUs, torch {facts.version} none of them",
                "pip install torch for CUDA, not newer than the driver supports: tightfit doctor",
            )
        elif facts.import_seconds > SLOW_IMPORT_SECONDS:
            yield _gpu_finding(
                node,
                Status.WARNING,
                f"torch took {render_seconds(facts.import_seconds)} to load",
                "put the environment on a local disk, or into a container image",
            )
    kinds = {node: facts.gpu_names for node, facts in observed.torch.items() if facts.error is None}
    if len(set(kinds.values())) > 1:
        text = "; ".join(f"{node}: {_name_gpus(names)}" for node, names in kinds.items())
        yield _gpu_finding("all", Status.FAULT, f"the nodes differ: {text}",
                   "choose nodes of one kind: a job runs the same on each")  # fmt: skip
    elif kinds:
        names = next(iter(kinds.values()))
        yield _gpu_finding("all", Status.OK if names else Status.INFO,
                   f"torch sees {_name_gpus(names)}"
                   f"{' on each node' if names else ': training would use the CPUs'}")  # fmt: skip


def _name_gpus(names: tuple[str, ...]) -> str:
    return f"{len(names)}x{names[0]}" if names else "no GPU"


def _gpu_finding(node: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="gpu", name=node, status=status, detail=detail, remedy=remedy)


def _check_machines(observed: Observations) -> Iterator[Finding]:
    for node, facts in observed.facts.items():
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
            yield _machine_warning(
                node,
                f"/dev/shm has {render_bytes(facts.shm_bytes)}, and NCCL needs it between GPUs",
                "docker run --shm-size 8g, or a Memory emptyDir at /dev/shm",
            )
        if facts.disk_free_bytes < LITTLE_DISK_BYTES:
            yield _machine_warning(
                node,
                f"{render_bytes(facts.disk_free_bytes)} free for temporary files",
                "export TMPDIR=/a/larger/disk",
            )
        if 0 < facts.max_open_files < FEW_OPEN_FILES:
            yield _machine_warning(
                node,
                f"a process may open {facts.max_open_files} files; loaders and NCCL open many",
                "ulimit -n 65536    (before the job)",
            )
        if facts.has_infiniband and facts.max_locked_bytes is not None:
            yield _machine_warning(
                node,
                f"a process may lock {render_bytes(facts.max_locked_bytes)} of memory; InfiniBand "
                "then fails or falls back to TCP",
                "ulimit -l unlimited    (in Slurm: LimitMEMLOCK=infinity for slurmd)",
            )


def _machine_warning(node: str, detail: str, remedy: str) -> Finding:
    return Finding(area="machine", name=node, status=Status.WARNING, detail=detail, remedy=remedy)


# Findings about the shared folder: observed, written, renamed and raced for by all nodes.

LONG_SECONDS = 1.0
_MEANING = {
    EXCLUSIVE: "creating a file exclusively",
    LINKED: "linking a file to a name",
}


def check_folder(observed: Observations) -> Iterator[Finding]:
    folder = observed.folder
    if folder is None or not observed.present:
        return
    findings = [*_check_sight(folder, observed), *_check_races(folder), *_check_delay(folder)]
    if not any(finding.status is Status.FAULT for finding in findings):
        delay = max((step.seconds for step in folder.grown.values()), default=0.0)
        text = (
            f"the same and writable on every node; exclusive create, link and rename work; "
            f"a change is seen after {render_seconds(delay)}"
        )
        findings.insert(0, _folder_finding(folder, Status.OK, text))
    yield from findings


def _check_sight(folder: FolderObservations, observed: Observations) -> Iterator[Finding]:
    writable = "choose a folder that every node mounts and may write: --shared FOLDER"
    if folder.planted is None or not folder.planted.is_done:
        why = folder.planted.detail if folder.planted else "no answer: the file system may hang"
        yield _folder_finding(
            folder, Status.FAULT, f"{observed.head} cannot write there: {why}", writable
        )
        return
    for node in observed.present[1:]:
        step = folder.found.get(node)
        if step is None:
            text = f"{node} gives no answer about it: the file system may hang there"
            yield _folder_finding(folder, Status.FAULT, text, f"on {node}: ls {folder.path}; mount")
        elif not step.is_done:
            text = f"{node} does not see what {observed.head} writes there: {step.detail}"
            yield _folder_finding(
                folder,
                Status.FAULT,
                f"not shared: {text}",
                f"mount the same file system on {node}, or name one: --shared FOLDER    "
                f"(on {node}: df {folder.path})",
            )
    for node, step in folder.raced.items():
        if not step.is_done:
            text = f"{node} sees it, but cannot write and rename there: {step.detail}"
            yield _folder_finding(folder, Status.FAULT, text, writable)


def _check_races(folder: FolderObservations) -> Iterator[Finding]:
    if not folder.raced or not all(step.is_done for step in folder.raced.values()):
        return
    for name, meaning in _MEANING.items():
        winners = [node for node, step in folder.raced.items() if name in step.won]
        if len(winners) != 1:
            yield _folder_finding(
                folder,
                Status.FAULT,
                f"{meaning}, which one node may win, succeeded on {len(winners)} nodes: leases "
                "would be given twice",
                "use another file system for runs and for `farm`: --shared FOLDER",
            )
    blind = [node for node, step in folder.renamed.items() if not step.is_done]
    if blind:
        text = f"{', '.join(blind)} does not see files under the names that others gave them"
        yield _folder_finding(
            folder, Status.FAULT, text, "mount it without caching of names (lookupcache)"
        )


def _check_delay(folder: FolderObservations) -> Iterator[Finding]:
    for node, step in folder.grown.items():
        if not step.is_done or step.seconds > LONG_SECONDS:
            more = "more than " if not step.is_done else ""
            yield _folder_finding(
                folder,
                Status.WARNING,
                f"{node} sees a changed file only after {more}{render_seconds(step.seconds)}",
                "mount with shorter attribute caching (NFS: actimeo=1), or expect slow hand-over "
                "between nodes",
            )


def _folder_finding(
    folder: FolderObservations, status: Status, detail: str, remedy: str | None = None
) -> Finding:
    return Finding(area="folder", name=folder.path, status=status, detail=detail, remedy=remedy)
