"""The nodes at work on one staging: who has which blocks, who is lost, who feeds whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tightfit.core.errors import EnvironmentFaultError
from tightfit.launch.stage.agent import Answer
from tightfit.launch.stage.blocks import Layout, from_ranges
from tightfit.launch.stage.cost import FAN_OUT, How, Load
from tightfit.launch.stage.crew import Member, NodeLostError, wait_for
from tightfit.launch.stage.wire import make_token

_COPYING = ("read", "relay")


class Team:
    """Members in the order in which they pass blocks on; whoever has most comes first."""

    def __init__(self, members: Sequence[Member], layout: Layout, interface: str | None) -> None:
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

    def missing(self, member: Member) -> set[int]:
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
        arguments: Callable[[Member], dict[str, Any]] | None = None,
        members: Sequence[Member] | None = None,
    ) -> dict[str, Answer]:
        """All at once. A node that is lost, or has no more room while others copy, is left out
        from then on; any other fault is raised."""
        asked = [
            (member, member.ask(op, **(arguments(member) if arguments else {})))
            for member in (self.members if members is None else members)
        ]
        told: dict[str, Answer] = {}
        faults: list[tuple[Member, Exception]] = []
        for member, future in asked:
            try:
                told[member.node] = wait_for(member, future)
            except NodeLostError as fault:
                self.lost[member.node] = str(fault)
                self.members.remove(member)
            except Exception as fault:
                faults.append((member, fault))
        self._raise_or_lose(op, faults, is_alone=not told)
        if not self.members:
            raise EnvironmentFaultError(
                f"All nodes are lost: {'; '.join(self.lost.values())}.",
                remedy="start this again: it goes on where it stopped",
            )
        return told

    def _raise_or_lose(
        self, op: str, faults: Sequence[tuple[Member, Exception]], *, is_alone: bool
    ) -> None:
        """A disk that fills up or fails on one node must not cost the others their copy."""
        for _, fault in faults:
            if is_alone or op not in _COPYING or not isinstance(fault, EnvironmentFaultError):
                raise fault
        for member, fault in faults:
            self.lost[member.node] = str(fault).rstrip(".")
            self.members.remove(member)

    def measure_load(self) -> Load:
        """What has to be moved now, and how far."""
        lacking = [self.missing(member) for member in self.members]
        relayed: set[int] = set().union(*lacking[1:])
        return Load(
            num_nodes=len(self.members),
            direct_bytes=max(self.layout.measure(blocks) for blocks in lacking),
            head_bytes=self.layout.measure(lacking[0]),
            relay_bytes=self.layout.measure(relayed),
            block_bytes=self.layout.block_bytes,
            checked_bytes=self.layout.measure(range(self.layout.num_blocks)),
        )

    def wire_up(self, how: How) -> dict[str, list[list[Any]]]:
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

    def note(self, told: dict[str, Answer]) -> None:
        """What the nodes say they have."""
        for node, answer in told.items():
            self.have[node] = from_ranges(answer["have"])


def list_children(how: How, place: int, num_nodes: int) -> list[int]:
    """Places of those that the node at `place` sends to."""
    if how is How.CHAIN:
        below = range(place + 1, place + 2)
    elif how is How.TREE:
        below = range(FAN_OUT * place + 1, FAN_OUT * place + 1 + FAN_OUT)
    else:
        below = range(0)
    return [child for child in below if child < num_nodes]
