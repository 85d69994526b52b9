"""The nodes of a staging: agents, which blocks each has, which are lost, who sends to whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from tightfit.clusters.agents import AgentLine, RemoteAgent
from tightfit.clusters.staging.agent import Agent, Answer, answer
from tightfit.clusters.staging.blocks import Layout, from_ranges
from tightfit.clusters.staging.cost import FAN_OUT, CopyLoad, CopyMethod
from tightfit.clusters.staging.transfer import make_token
from tightfit.core import errors as error_types
from tightfit.core.errors import SetupError, UserError

SILENT_SECONDS = 45.0
"""An agent says how far it is every second; one that has not for so long is lost."""
START_SECONDS = 90.0
"""For ssh or srun, Python and its imports on a busy node."""
END_SECONDS = 5.0


class NodeLostError(Exception):
    """A node's agent has ended or cannot be reached."""


class StagingNode(Protocol):
    """One node."""

    node: str

    @property
    def num_stored_bytes(self) -> int: ...

    def ask(self, op: str, **arguments: Any) -> Future[Answer]: ...

    def is_silent(self) -> bool: ...

    def close(self) -> None: ...


class LocalNode:
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
            _set_answer(future, answer(self._agent, {"op": op, "arguments": arguments}), self.node)

        threading.Thread(target=work, daemon=True).start()
        return future

    def is_silent(self) -> bool:
        return False

    def close(self) -> None:
        self._agent.close()


class RemoteNode:
    """A node with an agent on it."""

    def __init__(self, node: str, *, prefix: str, command: Sequence[str]) -> None:
        self.node = node
        self.num_stored_bytes = 0
        self._heard = time.monotonic()
        self._remote = RemoteAgent(node, command, prefix=prefix, on_news=self._note_progress)

    def ask(self, op: str, **arguments: Any) -> Future[Answer]:
        future: Future[Answer] = Future()

        def pass_on(done: Future[AgentLine]) -> None:
            self._heard = time.monotonic()
            if done.exception() is None:
                _set_answer(future, done.result(), self.node)
            else:
                future.set_exception(NodeLostError(f"{self.node} is lost{self._remote.last_words}"))

        self._remote.ask({"op": op, "arguments": arguments}).add_done_callback(pass_on)
        return future

    def _note_progress(self, line: AgentLine) -> None:
        self._heard = time.monotonic()
        self.num_stored_bytes = int(line.get("progress", self.num_stored_bytes))

    def is_silent(self) -> bool:
        return time.monotonic() - self._heard > SILENT_SECONDS

    def close(self) -> None:
        self._remote.close(seconds=END_SECONDS)


def _set_answer(future: Future[Answer], reply: Answer, node: str) -> None:
    if "reply" in reply:
        future.set_result(reply["reply"])
    elif "error" in reply:
        error = reply["error"]
        kind = getattr(error_types, str(error["kind"]), UserError)
        future.set_exception(kind(f"{node}: {error['problem']}", remedy=error["remedy"]))
    else:
        future.set_exception(RuntimeError(f"the agent on {node} failed: {reply.get('bug')}"))


def wait_for(member: StagingNode, future: Future[Answer]) -> Answer:
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
    members: Sequence[StagingNode],
    op: str,
    arguments: Callable[[StagingNode], dict[str, Any]] | None = None,
) -> dict[str, Answer]:
    """The same request to all of them at once; raises the first error, or loss."""
    asked = [
        (member, member.ask(op, **(arguments(member) if arguments else {}))) for member in members
    ]
    try:
        return {member.node: wait_for(member, future) for member, future in asked}
    except NodeLostError as error:
        raise SetupError(
            f"{error}.", remedy="leave out nodes that are down: --nodes a,b"
        ) from error


def start_agents(nodes: Iterable[str], *, prefix: str, command: Sequence[str]) -> list[StagingNode]:
    """Agents on all nodes, each of which has answered; all that do not are named at once."""
    members: list[StagingNode] = []
    try:
        for node in nodes:
            members.append(RemoteNode(node, prefix=prefix, command=command))
        asked = [(member.node, member.ask("hello")) for member in members]
        end = time.monotonic() + START_SECONDS
        lost = []
        for node, future in asked:
            try:
                future.result(timeout=max(0.0, end - time.monotonic()))
            except NodeLostError as error:
                lost.append(str(error))
            except FutureTimeoutError:
                lost.append(f"{node} gave no answer in {START_SECONDS:.0f} s")
        if lost:
            raise SetupError(
                f"Some nodes cannot be reached: {'; '.join(lost)}.",
                remedy="say how a command runs on a node: --run-with 'ssh {node}'; leave out "
                "nodes that are down: --nodes a,b",
            )
    except BaseException:
        stop_agents(members)
        raise
    return members


def stop_agents(members: Iterable[StagingNode]) -> None:
    for member in members:
        member.close()


# The nodes at work on one staging: who has which blocks, who is lost, who feeds whom.

_COPYING = ("read", "relay")


class StagingGroup:
    """Members in the order in which they pass blocks on; whoever has most comes first."""

    def __init__(
        self, members: Sequence[StagingNode], layout: Layout, interface: str | None
    ) -> None:
        self.members = list(members)
        self.layout = layout
        self.interface = interface
        self.have: dict[str, set[int]] = {}
        self.lost: dict[str, str] = {}
        self.readers: set[str] = set()
        """Nodes that see the source."""

    @property
    def is_filled(self) -> bool:
        return not any(self.missing(member) for member in self.members)

    def missing(self, member: StagingNode) -> set[int]:
        return set(range(self.layout.num_blocks)) - self.have[member.node]

    def order(self) -> None:
        """The first must be able to serve every block, so one that reads the source goes before."""
        self.members.sort(
            key=lambda member: (
                member.node not in self.readers and bool(self.missing(member)),
                -len(self.have[member.node]),
            )
        )

    def ask(
        self,
        op: str,
        arguments: Callable[[StagingNode], dict[str, Any]] | None = None,
        members: Sequence[StagingNode] | None = None,
    ) -> dict[str, Answer]:
        """All at once. A node that is lost, or has no more room while others copy, is left out
        from then on; any other error is raised."""
        asked = [
            (member, member.ask(op, **(arguments(member) if arguments else {})))
            for member in (self.members if members is None else members)
        ]
        replies: dict[str, Answer] = {}
        errors: list[tuple[StagingNode, Exception]] = []
        for member, future in asked:
            try:
                replies[member.node] = wait_for(member, future)
            except NodeLostError as error:
                self.lost[member.node] = str(error)
                self.members.remove(member)
            except Exception as error:
                errors.append((member, error))
        self._raise_or_lose(op, errors, is_alone=not replies)
        if not self.members:
            raise SetupError(
                f"All nodes are lost: {'; '.join(self.lost.values())}.",
                remedy="start this again: it goes on where it stopped",
            )
        return replies

    def _raise_or_lose(
        self, op: str, errors: Sequence[tuple[StagingNode, Exception]], *, is_alone: bool
    ) -> None:
        """A disk that fills up or fails on one node must not cost the others their copy."""
        for _, error in errors:
            if is_alone or op not in _COPYING or not isinstance(error, SetupError):
                raise error
        for member, error in errors:
            self.lost[member.node] = str(error).rstrip(".")
            self.members.remove(member)

    def measure_load(self) -> CopyLoad:
        """What has to be moved now, and how far."""
        lacking = [self.missing(member) for member in self.members]
        relayed: set[int] = set().union(*lacking[1:])
        return CopyLoad(
            num_nodes=len(self.members),
            direct_bytes=max(self.layout.measure(blocks) for blocks in lacking),
            head_bytes=self.layout.measure(lacking[0]),
            relay_bytes=self.layout.measure(relayed),
            block_bytes=self.layout.block_bytes,
            checked_bytes=self.layout.measure(range(self.layout.num_blocks)),
        )

    def wire_up(self, how: CopyMethod) -> dict[str, list[list[Any]]]:
        """Each node's children as address, port and token; everybody but the first listens."""
        if len(self.members) < 2:
            return {member.node: [] for member in self.members}
        tokens = {member.node: make_token() for member in self.members}
        first = self.members[0].node
        places = self.ask(
            "listen",
            lambda member: {
                "token": tokens[member.node],
                "interface": self.interface,
                "peer": self.members[1].node if member.node == first else first,
            },
        )
        nodes = [member.node for member in self.members]
        return {
            nodes[place]: [
                [places[nodes[k]]["address"], places[nodes[k]]["port"], tokens[nodes[k]]]
                for k in list_children(how, place, len(nodes))
            ]
            for place in range(len(nodes))
        }

    def note(self, replies: dict[str, Answer]) -> None:
        """What the nodes say they have."""
        for node, state in replies.items():
            self.have[node] = from_ranges(state["have"])


def list_children(how: CopyMethod, place: int, num_nodes: int) -> list[int]:
    """Places of those that the node at `place` sends to."""
    if how is CopyMethod.CHAIN:
        below = range(place + 1, place + 2)
    elif how is CopyMethod.TREE:
        below = range(FAN_OUT * place + 1, FAN_OUT * place + 1 + FAN_OUT)
    else:
        below = range(0)
    return [child for child in below if child < num_nodes]
