"""The nodes of a staging as seen from the one who asks: requests out, answers or a loss back."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Protocol

from tightfit.core import errors
from tightfit.core.errors import EnvironmentFaultError, UserError
from tightfit.launch.nodes import start_on
from tightfit.launch.stage.agent import Agent, Answer, answer

SILENT_SECONDS = 45.0
"""An agent says how far it is every second; one that has not for so long is lost."""
START_SECONDS = 90.0
"""For ssh or srun, Python and its imports on a busy node."""


class NodeLostError(Exception):
    """A node's agent has ended or cannot be reached."""


class Member(Protocol):
    """One node."""

    node: str

    @property
    def num_stored_bytes(self) -> int: ...

    def ask(self, op: str, **arguments: Any) -> Future[Answer]: ...

    def is_silent(self) -> bool: ...

    def close(self) -> None: ...


class ThisMachine:
    """The node we are on, without a process of its own."""

    def __init__(self) -> None:
        self.node = "this machine"
        self._agent = Agent()

    @property
    def num_stored_bytes(self) -> int:
        return self._agent.num_stored_bytes

    def ask(self, op: str, **arguments: Any) -> Future[Answer]:
        future: Future[Answer] = Future()

        def work() -> None:
            _settle(future, answer(self._agent, {"op": op, "arguments": arguments}), self.node)

        threading.Thread(target=work, daemon=True).start()
        return future

    def is_silent(self) -> bool:
        return False

    def close(self) -> None:
        self._agent.close()


class OtherNode:
    """A node with an agent on it, at the other end of two pipes."""

    def __init__(self, node: str, *, prefix: str, command: Sequence[str]) -> None:
        self.node = node
        self.num_stored_bytes = 0
        self._words: deque[str] = deque(maxlen=5)
        self._waiting: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._next_id = 0
        self._is_lost = False
        self._heard = time.monotonic()
        self._process = start_on(node, command, prefix=prefix)
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._listen, self._overhear)
        ]
        for thread in reversed(self._threads):  # the first waits for the second
            thread.start()

    def ask(self, op: str, **arguments: Any) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            self._next_id += 1
            number = self._next_id
            self._waiting[number] = future
        request = {"id": number, "op": op, "arguments": arguments}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            self._lose()
        if self._is_lost:
            self._lose()
        return future

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard = time.monotonic()
            try:
                told = json.loads(line)
                number = told.get("id")
            except (ValueError, AttributeError):
                continue  # a login message
            if "progress" in told:
                self.num_stored_bytes = int(told["progress"])
                continue
            with self._lock:
                future = self._waiting.pop(number, None)
            if future is not None:
                _settle(future, told, self.node)
        for thread in self._threads[1:]:
            thread.join(timeout=1)
        self._is_lost = True
        self._lose()

    def is_silent(self) -> bool:
        return time.monotonic() - self._heard > SILENT_SECONDS

    def _overhear(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if text := line.decode(errors="replace").strip():
                self._words.append(text)

    def _lose(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        said = f": {self._words[-1][:300]}" if self._words else ""
        for future in waiting.values():
            with suppress(Exception):
                future.set_exception(NodeLostError(f"{self.node} is lost{said}"))

    def close(self) -> None:
        """The agent ends with its stdin; one that does not is ended."""
        with suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except Exception:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(timeout=5)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _settle(future: Future[Answer], told: Answer, node: str) -> None:
    if "told" in told:
        future.set_result(told["told"])
    elif "fault" in told:
        fault = told["fault"]
        kind = getattr(errors, str(fault["kind"]), UserError)
        future.set_exception(kind(f"{node}: {fault['problem']}", remedy=fault["remedy"]))
    else:
        future.set_exception(RuntimeError(f"the agent on {node} failed: {told.get('bug')}"))


def wait_for(member: Member, future: Future[Answer]) -> Answer:
    """Its answer, however long it takes, as long as the node shows that it lives."""
    while True:
        try:
            return future.result(timeout=1.0)
        except FutureTimeoutError:
            if future.done():
                raise
            if member.is_silent():
                raise NodeLostError(
                    f"{member.node} has been silent for {SILENT_SECONDS:.0f} s"
                ) from None


def ask_all(
    members: Sequence[Member], op: str, arguments: Callable[[Member], dict[str, Any]] | None = None
) -> dict[str, Answer]:
    """The same request to all of them at once; raises the first fault, or loss."""
    asked = [
        (member, member.ask(op, **(arguments(member) if arguments else {}))) for member in members
    ]
    try:
        return {member.node: wait_for(member, future) for member, future in asked}
    except NodeLostError as fault:
        raise EnvironmentFaultError(
            f"{fault}.", remedy="leave out nodes that are down: --nodes a,b"
        ) from fault


def open_crew(nodes: Iterable[str], *, prefix: str, command: Sequence[str]) -> list[Member]:
    """Agents on all nodes, each of which has answered; all that do not are named at once."""
    members: list[Member] = []
    try:
        for node in nodes:
            members.append(OtherNode(node, prefix=prefix, command=command))
        asked = [(member.node, member.ask("hello")) for member in members]
        end = time.monotonic() + START_SECONDS
        lost = []
        for node, future in asked:
            try:
                future.result(timeout=max(0.0, end - time.monotonic()))
            except NodeLostError as fault:
                lost.append(str(fault))
            except FutureTimeoutError:
                lost.append(f"{node} gave no answer in {START_SECONDS:.0f} s")
        if lost:
            raise EnvironmentFaultError(
                f"Some nodes cannot be reached: {'; '.join(lost)}.",
                remedy="say how a command runs on a node: --run-with 'ssh {node}'; leave out "
                "nodes that are down: --nodes a,b",
            )
    except BaseException:
        close_crew(members)
        raise
    return members


def close_crew(members: Iterable[Member]) -> None:
    for member in members:
        member.close()
