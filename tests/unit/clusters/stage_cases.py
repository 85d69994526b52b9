"""Staging in one process: agents as threads, each with a place of its own, on real sockets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from stage_lab import make_model
from tightfit.clusters.agents import AgentGoneError
from tightfit.clusters.staging import CopyMethod
from tightfit.clusters.staging.agent import Answer
from tightfit.clusters.staging.nodes import LocalNode
from tightfit.clusters.staging.stage import Stager, StageRequest, StageResult

BLOCK = 1 << 20


class Thread(LocalNode):
    """A node that stages to its own folder, and may be told to die."""

    def __init__(self, node: str, place: Path) -> None:
        super().__init__()
        self.node = node
        self.place = place
        self.place.mkdir(parents=True, exist_ok=True)
        self.asked: list[str] = []
        self.dies_at = ""

    def ask(self, op: str, **arguments: Any) -> Future[Answer]:
        self.asked.append(op)
        if op == self.dies_at:
            self._agent.close()
            lost: Future[Answer] = Future()
            lost.set_exception(AgentGoneError(f"{self.node} is lost"))
            return lost
        if "to" in arguments:
            arguments["to"] = str(self.place)
        return super().ask(op, **arguments)


def make_source(folder: Path, *, num_blocks: int = 24) -> Path:
    folder.mkdir()
    make_model(folder, num_blocks * BLOCK - 12345)
    return folder


def make_nodes(folder: Path, names: str = "abcd") -> list[Thread]:
    return [Thread(name, folder / f"node-{name}") for name in names]


def stage(
    source: Path, nodes: Sequence[LocalNode], how: CopyMethod | None = None, **more: Any
) -> StageResult:
    request = StageRequest(
        source=source, to=Path("/dev/shm"), how=how, interface="lo", leave_bytes=0, **more
    )
    try:
        return Stager(request, nodes).run()
    finally:
        for node in nodes:
            node.close()


def digest(folder: Path) -> dict[str, str]:
    """Names and contents of all files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip_byte(path: Path, offset: int) -> None:
    """Change one byte and leave size and times as they are."""
    import os

    facts = path.stat()
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
