"""All that the nodes reported, and the address at which each is reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, ip_address, ip_interface

from tightfit.clusters.preflight.messages import (
    AllReduceResult,
    ConnectionOutcome,
    ConnectionProbe,
    DatagramCount,
    FolderStep,
    ListenerPorts,
    NameLookup,
    NetworkDevice,
    NodeFacts,
    Route,
    StreamResult,
    TorchFacts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where one node is reached."""

    node: str
    address: str
    device: str
    mtu: int
    bits_per_second: float = 0.0


NodeAddresses = dict[str, NodeAddress]


def host_of(node: str) -> str:
    """`me@host` is how ssh is node_facts; the network knows `host`."""
    return node.rpartition("@")[2]


def addresses_on(facts: Mapping[str, NodeFacts], device: str) -> NodeAddresses:
    """Of the nodes that have this device, up and with an address."""
    found = {}
    for node, node_facts in facts.items():
        for owner, address in _list_addresses(node_facts):
            if owner.name == device and owner.is_up:
                found[node] = _make_address(node, owner, address)
                break
    return found


def choose_addresses(
    facts: Mapping[str, NodeFacts], lookups: Mapping[str, Sequence[NameLookup]]
) -> NodeAddresses:
    """By the nodes' names where every one of them leads to its node; else by a shared network."""
    named = _by_name(facts, lookups)
    if len(named) == len(facts):
        return named
    shared = _by_network(facts)
    return shared if len(shared) == len(facts) else {**shared, **named}


def _by_name(
    facts: Mapping[str, NodeFacts], lookups: Mapping[str, Sequence[NameLookup]]
) -> NodeAddresses:
    found = {}
    for node, node_facts in facts.items():
        own = {address: device for device, address in _list_addresses(node_facts)}
        for peer, answers in lookups.items():
            known_addresses = [
                address
                for answer in answers
                if answer.name == host_of(node) and peer != node
                for address in answer.addresses
            ]
            match = next((address for address in known_addresses if address in own), None)
            if match is not None:
                found[node] = _make_address(node, own[match], match)
                break
    return found


def _by_network(facts: Mapping[str, NodeFacts]) -> NodeAddresses:
    """The fastest network on which every node has an address of its own."""
    networks: dict[str, NodeAddresses] = {}
    for node, node_facts in facts.items():
        for device in node_facts.devices:
            for text in device.addresses if device.is_up else ():
                place = ip_interface(text)
                if isinstance(place, IPv4Interface) and not place.ip.is_loopback:
                    node_address = _make_address(node, device, str(place.ip))
                    networks.setdefault(str(place.network), {}).setdefault(node, node_address)
    whole = [
        node_addresses
        for node_addresses in networks.values()
        if len({node_address.address for node_address in node_addresses.values()}) == len(facts)
    ]
    return max(whole, key=_slowest, default={})


def _slowest(node_addresses: NodeAddresses) -> float:
    return min(node_address.bits_per_second for node_address in node_addresses.values())


def _list_addresses(facts: NodeFacts) -> Iterator[tuple[NetworkDevice, str]]:
    """Those by which others could come in, IPv4 first."""
    found = [
        (device, text.partition("/")[0]) for device in facts.devices for text in device.addresses
    ]
    usable = [
        (device, address)
        for device, address in found
        if not ip_address(address).is_loopback and not ip_address(address).is_link_local
    ]
    yield from sorted(usable, key=lambda item: ":" in item[1])


def _make_address(node: str, device: NetworkDevice, address: str) -> NodeAddress:
    return NodeAddress(
        node=node,
        address=address,
        device=device.name,
        mtu=device.mtu,
        bits_per_second=device.bits_per_second,
    )


# All that the nodes node_facts, before anything is made of it.

NodePair = tuple[str, str]
"""From which node to which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a node's clock is ahead of this machine's."""

    offset_seconds: float
    error_seconds: float
    """Half of the shortest question and answer: the offset is known no better."""


@dataclass(slots=True, kw_only=True)
class FolderObservations:
    """What became of the shared folder, by node."""

    path: str
    planted: FolderStep | None = None
    found: dict[str, FolderStep] = field(default_factory=dict)
    raced: dict[str, FolderStep] = field(default_factory=dict)
    renamed: dict[str, FolderStep] = field(default_factory=dict)
    grown: dict[str, FolderStep] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Observations:
    """Filled round by round; what is missing was not answered, or not asked for want of time."""

    nodes: tuple[str, ...]
    port: int
    interface: str | None = None
    """As asked for."""
    absent: dict[str, str] = field(default_factory=dict)
    """Nodes whose agent does not run, and why."""
    silent: dict[tuple[str, str], str] = field(default_factory=dict)
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    lookups: dict[str, list[NameLookup]] = field(default_factory=dict)
    clocks: dict[str, ClockOffset] = field(default_factory=dict)
    requested: NodeAddresses = field(default_factory=dict)
    """On the device that was asked for."""
    defaults: NodeAddresses = field(default_factory=dict)
    """Without regard to it."""
    addresses: NodeAddresses = field(default_factory=dict)
    """Those of the two that are to be used."""
    ports: dict[str, ListenerPorts] = field(default_factory=dict)
    routes: dict[str, dict[str, Route]] = field(default_factory=dict)
    """By node, then by address."""
    probes: dict[NodePair, ConnectionProbe] = field(default_factory=dict)
    requested_probes: dict[NodePair, ConnectionProbe] = field(default_factory=dict)
    """At the node_addresses of the device that was asked for, where those are others."""
    port_probes: dict[str, ConnectionProbe] = field(default_factory=dict)
    """At the rendezvous port of the first node, by who knocked."""
    sent: dict[str, int] = field(default_factory=dict)
    """Small datagrams to each target, by the node that says so."""
    received: dict[NodePair, DatagramCount] = field(default_factory=dict)
    """Only where both nodes node_facts; then also where nothing came."""
    streams: dict[NodePair, StreamResult] = field(default_factory=dict)
    torch: dict[str, TorchFacts] = field(default_factory=dict)
    reduce: AllReduceResult | None = None
    no_all_reduce: str | None = None
    """Why no all-reduce was tried."""
    folder: FolderObservations | None = None
    seconds: float = 0.0

    @property
    def head(self) -> str:
        return self.nodes[0]

    @property
    def present(self) -> list[str]:
        return [node for node in self.nodes if node in self.facts]

    def is_open(self, pair: NodePair) -> bool:
        probe = self.probes.get(pair)
        return probe is not None and probe.outcome is ConnectionOutcome.OK

    def lost_fraction(self, pair: NodePair) -> float | None:
        """At least so much is lost on the way; 1.0: nothing arrives. None: not known."""
        received, sent = self.received.get(pair), self.sent.get(pair[0])
        if received is None or not sent:
            return None
        return max(0, sent - received.num_small - received.num_dropped) / sent
