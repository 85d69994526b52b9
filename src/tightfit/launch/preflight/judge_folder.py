"""Findings about the shared folder: seen, written, renamed and raced for by all nodes."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.core.units import render_seconds
from tightfit.hardware.findings import Finding, Status
from tightfit.launch.preflight.folder import EXCLUSIVE, LINKED
from tightfit.launch.preflight.seen import FolderSeen, Seen

LONG_SECONDS = 1.0
_MEANING = {
    EXCLUSIVE: "creating a file exclusively",
    LINKED: "linking a file to a name",
}


def judge_folder(seen: Seen) -> Iterator[Finding]:
    folder = seen.folder
    if folder is None or not seen.present:
        return
    findings = [*_judge_sight(folder, seen), *_judge_races(folder), *_judge_delay(folder)]
    if not any(finding.status is Status.FAULT for finding in findings):
        delay = max((step.seconds for step in folder.grown.values()), default=0.0)
        told = (
            f"the same and writable on every node; exclusive create, link and rename work; "
            f"a change is seen after {render_seconds(delay)}"
        )
        findings.insert(0, _found(folder, Status.OK, told))
    yield from findings


def _judge_sight(folder: FolderSeen, seen: Seen) -> Iterator[Finding]:
    writable = "choose a folder that every node mounts and may write: --shared FOLDER"
    if folder.planted is None or not folder.planted.is_done:
        why = folder.planted.detail if folder.planted else "no answer: the file system may hang"
        yield _found(folder, Status.FAULT, f"{seen.head} cannot write there: {why}", writable)
        return
    for node in seen.present[1:]:
        step = folder.found.get(node)
        if step is None:
            told = f"{node} gives no answer about it: the file system may hang there"
            yield _found(folder, Status.FAULT, told, f"on {node}: ls {folder.path}; mount")
        elif not step.is_done:
            told = f"{node} does not see what {seen.head} writes there: {step.detail}"
            yield _found(
                folder,
                Status.FAULT,
                f"not shared: {told}",
                f"mount the same file system on {node}, or name one: --shared FOLDER    "
                f"(on {node}: df {folder.path})",
            )
    for node, step in folder.raced.items():
        if not step.is_done:
            told = f"{node} sees it, but cannot write and rename there: {step.detail}"
            yield _found(folder, Status.FAULT, told, writable)


def _judge_races(folder: FolderSeen) -> Iterator[Finding]:
    if not folder.raced or not all(step.is_done for step in folder.raced.values()):
        return
    for name, meaning in _MEANING.items():
        winners = [node for node, step in folder.raced.items() if name in step.won]
        if len(winners) != 1:
            yield _found(
                folder,
                Status.FAULT,
                f"{meaning}, which one node may win, succeeded on {len(winners)} nodes: leases "
                "would be given twice",
                "use another file system for runs and for `farm`: --shared FOLDER",
            )
    blind = [node for node, step in folder.renamed.items() if not step.is_done]
    if blind:
        told = f"{', '.join(blind)} does not see files under the names that others gave them"
        yield _found(folder, Status.FAULT, told, "mount it without caching of names (lookupcache)")


def _judge_delay(folder: FolderSeen) -> Iterator[Finding]:
    for node, step in folder.grown.items():
        if not step.is_done or step.seconds > LONG_SECONDS:
            more = "more than " if not step.is_done else ""
            yield _found(
                folder,
                Status.WARNING,
                f"{node} sees a changed file only after {more}{render_seconds(step.seconds)}",
                "mount with shorter attribute caching (NFS: actimeo=1), or expect slow hand-over "
                "between nodes",
            )


def _found(folder: FolderSeen, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="folder", name=folder.path, status=status, detail=detail, remedy=remedy)
