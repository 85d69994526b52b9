"""The nodes of a staging: their agents, which blocks each has, who sends to whom."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

from tightfit.clusters.agents import (
    AgentGoneError,
    RemoteAgent,
    after_setup,
    answer_request,
    settle,
)
from tightfit.clusters.nodes import NODES_VARIABLE, expand_nodes, node_prefix
from tightfit.clusters.site import Site
from tightfit.clusters.staging import CopyMethod
from tightfit.clusters.staging.agent import Agent, Answer
from tightfit.clusters.staging.cost import FAN_OUT, CopyLoad
from tightfit.clusters.staging.store import Layout, from_ranges
from tightfit.clusters.staging.transfer import make_token
from tightfit.core.child_process import Message
from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.core.import_path import module_words
from tightfit.core.units import GIB, MIB
from tightfit.hardware.command import RunCommand, run_command
from tightfit.hardware.slurm import probe_slurm_inventory

AGENT_MODULE = "tightfit.clusters.staging.agent"
AGENT_BYTES = GIB
"""Of the agent itself: Python and the blocks in flight."""
SILENT_SECONDS = 45.0
"""An agent reports its progress every second; one that has not for so long is lost."""
START_SECONDS = 90.0
"""For ssh or srun, Python and its imports on a busy node."""
END_SECONDS = 5.0


def find_nodes(
    *,
    nodes: str | None,
    on: str | None,
    site: Site,
    environ: Mapping[str, str],
    num_bytes: int = 0,
    run: RunCommand = run_command,
) -> tuple[tuple[str, ...], str]:
    """The nodes, and the words before a command that is to run on one of them.

    Those that are named, or those of the job or partition; none for this machine alone.
    """
    if nodes is not None and on is not None:
        raise UsageError("`--nodes` and `--on` both name nodes.", remedy="keep one of them")
    if nodes is None and on is None:
        return (), ""
    kind, _, partition = (on or "slurm").partition(":")
    if kind.strip().lower() != "slurm":
        raise UsageError(
            f"`--on {kind[:60]}` is not known here.", remedy="--on slurm:PARTITION, or --nodes a,b"
        )
    partition = partition.strip()
    if not partition:
        listed = nodes or environ.get(NODES_VARIABLE)
        if not listed:
            raise UsageError(
                "`--on slurm` without a partition means the nodes of this job, and this is none.",
                remedy="--on slurm:PARTITION",
            )
        return expand_nodes(listed), node_prefix(site, environ)
    inventory = probe_slurm_inventory(partition, run=run)
    found = tuple(node.name for node in inventory.nodes if node.state.takes_jobs)
    if not found:
        raise NotFoundError(
            f"No node of the partition {partition} takes jobs now.",
            remedy=f"sinfo --partition {partition}",
        )
    return found, site.run_on_node or _srun_prefix(partition, site, num_bytes)


def _srun_prefix(partition: str, site: Site, num_bytes: int) -> str:
    """A small job on each node; the memory is for the copy, which counts as the job's."""
    words = ["srun", f"--partition={partition}", "--nodes=1", "--ntasks=1", "--quiet"]
    words += [f"--mem={-(-(num_bytes + AGENT_BYTES) // MIB)}M", "--immediate=60"]
    words += ["--job-name=tightfit-stage"]
    for option in ("account", "qos", "reservation"):
        value = getattr(site.slurm, option)
        words += [f"--{option}={value}"] if value else []
    return " ".join([*map(shlex.quote, words), "--nodelist={node}"])


def agent_command(site: Site) -> list[str]:
    """The words that start a node's agent, after the site's own lines."""
    return after_setup(site, [site.python or sys.executable, *module_words(AGENT_MODULE)])


class StagingNode(Protocol):
    """One node."""

    node: str

    @property
    def num_stored_bytes(self) -> int: ...

    def ask(self, op: str, **arguments: Any) -> Future[Answer]: ...

    def is_silent(self) -> bool: ...

    def close(self) -> None: ...


class LocalNode:
    """This machine, without a process of its own."""

    def __init__(self) -> None:
        self.node = "this machine"
        self._agent = Agent()

    @property
    def num_stored_bytes(self) -> int:
        return self._agent.num_stored_bytes

    def ask(self, op: str, **arguments: Any) -> Future[Answer]:
        future: Future[Answer] = Future()

        def work() -> None:
            reply = answer_request(self._agent.handlers, {"do": op, "given": arguments})
            settle(future, reply, node=self.node)

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
        self._agent = RemoteAgent(node, command, prefix=prefix, on_news=self._note_progress)

    def _note_progress(self, message: Message) -> None:
        self.num_stored_bytes = int(message.get("progress", self.num_stored_bytes))

    def ask(self, op: str, **arguments: Any) -> Future[Answer]:
        return self._agent.ask(op, **arguments)

    def is_silent(self) -> bool:
        return time.monotonic() - self._agent.last_message_at > SILENT_SECONDS

    def close(self) -> None:
        self._agent.close(seconds=END_SECONDS)


Arguments = Callable[[StagingNode], dict[str, Any]]
"""A request's arguments for one node."""


def ask_each(
    members: Sequence[StagingNode], op: str, arguments: Arguments | None
) -> list[tuple[StagingNode, Answer | Exception]]:
    """The same request to all at once, and each node's answer or error.

    An answer may take however long, as long as the node shows that it lives.
    """
    asked = [
        (member, member.ask(op, **(arguments(member) if arguments else {}))) for member in members
    ]
    found: list[tuple[StagingNode, Answer | Exception]] = []
    for member, future in asked:
        while not wait([future], timeout=1.0).done and not member.is_silent():
            pass
        if not future.done():
            silent = f"{member.node} has been silent for {SILENT_SECONDS:.0f} s"
            found.append((member, AgentGoneError(silent)))
            continue
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        found.append((member, error or future.result()))
    return found


def ask_all(
    members: Sequence[StagingNode], op: str, arguments: Arguments | None = None
) -> dict[str, Answer]:
    """All answers; raises the first error."""
    answers = {}
    for member, answer in ask_each(members, op, arguments):
        if isinstance(answer, AgentGoneError):
            raise SetupError(f"{answer}.", remedy="leave out nodes that are down: --nodes a,b")
        if isinstance(answer, Exception):
            raise answer
        answers[member.node] = answer
    return answers


def start_agents(nodes: Iterable[str], *, prefix: str, command: Sequence[str]) -> list[StagingNode]:
    """Agents on all nodes, each of which has answered; all that do not are named at once."""
    members: list[StagingNode] = []
    try:
        for node in nodes:
            members.append(RemoteNode(node, prefix=prefix, command=command))
        asked = {member.node: member.ask("hello") for member in members}
        wait(asked.values(), timeout=START_SECONDS)
        lost = [
            str(future.exception())
            if future.done()
            else f"{node} gave no answer in {START_SECONDS:.0f} s"
            for node, future in asked.items()
            if not future.done() or future.exception() is not None
        ]
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


_COPYING = ("read", "relay")


class StagingGroup:
    """The nodes of one staging, in the order in which they pass blocks on."""

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

    @property
    def can_all_read(self) -> bool:
        return all(member.node in self.readers for member in self.members)

    def missing(self, member: StagingNode) -> set[int]:
        return set(range(self.layout.num_blocks)) - self.have[member.node]

    def order(self) -> None:
        """The node that has most first. It must be able to serve every block, so a node that
        reads the source precedes one that does not."""
        self.members.sort(
            key=lambda member: (
                member.node not in self.readers and bool(self.missing(member)),
                -len(self.have[member.node]),
            )
        )

    def ask(
        self,
        op: str,
        arguments: Arguments | None = None,
        members: Sequence[StagingNode] | None = None,
    ) -> dict[str, Answer]:
        """All at once. A node that is lost, or has no more room while others copy, is left out
        from then on; any other error is raised."""
        found = ask_each(self.members if members is None else members, op, arguments)
        answers = {m.node: answer for m, answer in found if not isinstance(answer, Exception)}
        for member, answer in found:
            if not isinstance(answer, Exception):
                continue
            # A disk that fills up or fails on one node must not cost the others their copy.
            is_local = op in _COPYING and isinstance(answer, SetupError) and answers
            if not isinstance(answer, AgentGoneError) and not is_local:
                raise answer
            self.lost[member.node] = str(answer).rstrip(".")
            self.members.remove(member)
        if not self.members:
            raise SetupError(
                f"All nodes are lost: {'; '.join(self.lost.values())}.",
                remedy="start this again: it continues where it stopped",
            )
        return answers

    def measure_load(self) -> CopyLoad:
        """How much has to be moved now, and how far."""
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
        """Each node's children as address, port and token; all but the first node listen."""
        if len(self.members) < 2:
            return {member.node: [] for member in self.members}
        tokens = {member.node: make_token() for member in self.members}
        first, second = self.members[0].node, self.members[1].node
        places = self.ask(
            "listen",
            lambda member: {
                "token": tokens[member.node],
                "interface": self.interface,
                "peer": second if member.node == first else first,
            },
        )
        nodes = [member.node for member in self.members]
        targets = [[places[node]["address"], places[node]["port"], tokens[node]] for node in nodes]
        return {
            node: [targets[child] for child in list_children(how, index, len(nodes))]
            for index, node in enumerate(nodes)
        }

    def note(self, replies: dict[str, Answer]) -> None:
        """The blocks that the nodes report to have."""
        for node, reply in replies.items():
            self.have[node] = from_ranges(reply["have"])


def list_children(how: CopyMethod, index: int, num_nodes: int) -> list[int]:
    """The nodes that node `index` sends to."""
    fan_out = {CopyMethod.CHAIN: 1, CopyMethod.TREE: FAN_OUT}.get(how, 0)
    below = range(fan_out * index + 1, fan_out * index + 1 + fan_out)
    return [child for child in below if child < num_nodes]
