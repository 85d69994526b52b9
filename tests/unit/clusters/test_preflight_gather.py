"""What a round makes of the answers of nodes that are slow or silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.clusters.preflight.gather import (
    NUM_SMALL,
    AgentCommand,
    AgentPool,
    Collector,
    PreflightRequest,
)
from tightfit.clusters.preflight.observations import ListenerPorts, NodeAddress, NodeFacts, NodePair

NODES = ("a", "b", "c")


class ScriptedCrew(AgentPool):
    """Has sent and received what it was told; the other nodes are silent."""

    def __init__(self, sent: dict[str, int], received: dict[str, dict[str, int]]) -> None:
        super().__init__(NODES)
        self.sent, self.received = sent, received

    def ask(
        self, question: str, seconds: float, given: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        assert given is not None
        assert seconds > 0
        if question == "datagrams":
            return {node: self.sent[node] for node in given if node in self.sent}
        return {node: self._tell(node, given[node]) for node in given if node in self.received}

    def _tell(self, node: str, request: Mapping[str, Any]) -> list[dict[str, int]]:
        came = {sender: self.received[node].get(NODES[sender], 0) for sender in request["senders"]}
        return [{"sender": at, "num_small": num, "num_large": 4} for at, num in came.items()]


def spray(
    sent: dict[str, int], received: dict[str, dict[str, int]]
) -> dict[NodePair, float | None]:
    """What is lost between every two nodes."""
    request = PreflightRequest(
        nodes=NODES, start=AgentCommand(prefix="", argv=(), env={}), port=29_500
    )
    gathering = Collector(request, lambda _: None)
    gathering.pool = ScriptedCrew(sent, received)
    observed = gathering.observed
    for at, node in enumerate(NODES):
        observed.facts[node] = NodeFacts(hostname=node, python="3.11", packages={})
        observed.addresses[node] = NodeAddress(
            node=node, address=f"10.0.0.{at}", device="eth0", mtu=1500
        )
        observed.ports[node] = ListenerPorts(tcp_port=1, udp_port=2)
    gathering._send_datagrams()
    return {(a, b): observed.lost_fraction((a, b)) for a in NODES for b in NODES if a != b}


def test_loss_is_held_against_what_each_source_says_it_sent() -> None:
    sent = {"a": NUM_SMALL, "b": 150, "c": 100}
    received = {"a": {"b": 150, "c": 80}, "b": {"a": NUM_SMALL, "c": 100}, "c": {"a": 0, "b": 150}}

    assert spray(sent, received) == {
        ("a", "b"): 0.0, ("a", "c"): 1.0, ("b", "a"): 0.0,
        ("b", "c"): 0.0, ("c", "a"): 0.2, ("c", "b"): 0.0,
    }  # fmt: skip


def test_a_node_that_did_not_answer_tells_nothing_of_loss() -> None:
    """Neither as a source, b, which may still be sending, nor as a target, c."""
    sent = {"a": NUM_SMALL, "c": NUM_SMALL}
    received = {"a": {"b": 20, "c": NUM_SMALL}, "b": {"a": NUM_SMALL}}

    assert spray(sent, received) == {
        ("a", "b"): 0.0, ("a", "c"): None, ("b", "a"): None,
        ("b", "c"): None, ("c", "a"): 0.0, ("c", "b"): 1.0,
    }  # fmt: skip
