"""The nodes of a staging as seen from the one who asks: requests out, answers or a loss back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from tightfit.core import errors
from tightfit.core.errors import EnvironmentFaultError, UserError
from tightfit.launch.agents.remote import Line, RemoteAgent
from tightfit.launch.stage.agent import Agent, Answer, answer

SILENT_SECONDS = 45.0
"""An agent says how far it is every second; one that has not for so long is lost."""
START_SECONDS = 90.0
"""For ssh or srun, Python and its imports on a busy node."""
END_SECONDS = 5.0


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
    """A node with an agent on it."""

    def __init__(self, node: str, *, prefix: str, command: Sequence[str]) -> None:
        self.node = node
        self.num_stored_bytes = 0
        self._heard = time.monotonic()
        self._remote = RemoteAgent(node, command, prefix=prefix, on_news=self._note_progress)

    def ask(self, op: str, **arguments: Any) -> Future[Answer]:
        future: Future[Answer] = Future()

        def pass_on(done: Future[Line]) -> None:
            self._heard = time.monotonic()
            if done.exception() is None:
                _settle(future, done.result(), self.node)
            else:
                future.set_exception(NodeLostError(f"{self.node} is lost{self._remote.last_words}"))

        self._remote.ask({"op": op, "arguments": arguments}).add_done_callback(pass_on)
        return future

    def _note_progress(self, line: Line) -> None:
        self._heard = time.monotonic()
        self.num_stored_bytes = int(line.get("progress", self.num_stored_bytes))

    def is_silent(self) -> bool:
        return time.monotonic() - self._heard > SILENT_SECONDS

    def close(self) -> None:
        self._remote.close(seconds=END_SECONDS)


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
