"""What the nodes reported in a preflight, and the address at which each is reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Interface, ip_address, ip_interface

from pydantic import BaseModel, ConfigDict

PROTOCOL = 4
"""Counts changes that an agent of another version would not understand."""


class Message(BaseModel):
    """A newer agent may report more than is known here."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NetworkDevice(Message):
    """One network device."""

    name: str
    is_up: bool
    mtu: int
    bits_per_second: float = 0.0
    """0: the device does not report its speed."""
    addresses: tuple[str, ...] = ()
    """With the length of the network's prefix: `10.0.0.1/24`."""


class NodeFacts(Message):
    """A node's versions, devices and limits."""

    hostname: str
    python: str
    packages: dict[str, str | None]
    """None: not installed."""
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    """As the driver names them."""
    devices: tuple[NetworkDevice, ...] = ()
    memory_bytes: int = 0
    free_memory_bytes: int = 0
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    disk_free_bytes: int = 0
    """Where temporary files go."""
    num_cores: int = 1
    max_open_files: int = 0
    """0: no limit."""
    max_locked_bytes: int | None = None
    """None: no limit."""
    has_infiniband: bool = False


class NameLookup(Message):
    """One name as one node resolves it."""

    name: str
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None


class ListenerPorts(Message):
    """Where a node listens during the preflight."""

    tcp_port: int
    udp_port: int
    rendezvous_error: str | None = None
    """Why the rendezvous port cannot be opened; None also if it was not requested."""


class Route(Message):
    """How a node would send to an address."""

    address: str
    source: str | None = None
    device: str | None = None
    reverse_seconds: float = 0.0
    """How long the lookup of the address's name took."""


class ConnectionOutcome(str, Enum):
    """How a connection went."""

    OK = "ok"
    REFUSED = "refused"
    """The host answered: nothing listens there."""
    TIMEOUT = "timeout"
    """Nobody answered: a firewall, or lost packets."""
    UNREACHABLE = "unreachable"
    """There is no route to that address."""
    STALLED = "stalled"
    """Connected, but data or its acknowledgement did not come through."""


class ConnectionProbe(Message):
    """One connection to another node, with data both ways."""

    node: str
    address: str
    port: int
    outcome: ConnectionOutcome
    detail: str = ""
    rtt_seconds: float | None = None

    @property
    def is_ok(self) -> bool:
        return self.outcome is ConnectionOutcome.OK


class StreamResult(Message):
    """A second or so of data in one direction, as far as it was acknowledged."""

    node: str
    bytes_per_second: float
    resent_fraction: float = 0.0
    error: str | None = None


class DatagramCount(Message):
    """Datagrams that came from another node."""

    sender: int
    num_small: int
    num_large: int
    num_dropped: int = 0
    """Of all senders together: reached the listener's host and found no room there."""


class FolderStep(Message):
    """One step with the shared folder."""

    is_done: bool
    seconds: float = 0.0
    detail: str = ""
    won: tuple[str, ...] = ()
    """Of the races for one name: those that this node won."""
    wrote: str = ""
    """Its own file, before it was renamed."""


class TorchFacts(Message):
    """What torch itself sees."""

    version: str | None = None
    num_gpus: int = 0
    gpu_names: tuple[str, ...] = ()
    import_seconds: float = 0.0
    error: str | None = None


class AllReduceResult(Message):
    """All-reduce over all nodes, as training does it."""

    backend: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    """Of one all-reduce of `num_bytes`."""
    latency_seconds: float = 0.0
    """Of one of a few bytes."""
    bus_bytes_per_second: float = 0.0
    """What crossed each link: 2(n-1)/n of the payload, over the time."""
    error: str | None = None


# Everything that was observed.

NodePair = tuple[str, str]
"""From which node to which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where one node is reached."""

    node: str
    address: str
    device: str
    mtu: int
    bits_per_second: float = 0.0


NodeAddresses = dict[str, NodeAddress]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a node's clock is ahead of this machine's."""

    offset_seconds: float
    error_seconds: float
    """Half of the shortest round trip: the offset is known no better."""


@dataclass(slots=True, kw_only=True)
class FolderObservations:
    """The steps with the shared folder, by node."""

    path: str
    planted: FolderStep | None = None
    found: dict[str, FolderStep] = field(default_factory=dict)
    raced: dict[str, FolderStep] = field(default_factory=dict)
    renamed: dict[str, FolderStep] = field(default_factory=dict)
    grown: dict[str, FolderStep] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Observations:
    """Filled round by round; what is missing was not answered, or not asked for lack of time."""

    nodes: tuple[str, ...]
    port: int
    interface: str | None = None
    """As the user asked for."""
    absent: dict[str, str] = field(default_factory=dict)
    """Nodes whose agent does not run, and why."""
    silent: dict[tuple[str, str], str] = field(default_factory=dict)
    """Node and request that was not answered, and why."""
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    lookups: dict[str, list[NameLookup]] = field(default_factory=dict)
    clocks: dict[str, ClockOffset] = field(default_factory=dict)
    requested: NodeAddresses = field(default_factory=dict)
    """On the device that the user asked for."""
    defaults: NodeAddresses = field(default_factory=dict)
    """Without regard to it."""
    addresses: NodeAddresses = field(default_factory=dict)
    """Those of the two that are to be used."""
    ports: dict[str, ListenerPorts] = field(default_factory=dict)
    routes: dict[str, dict[str, Route]] = field(default_factory=dict)
    """By node, then by address."""
    probes: dict[NodePair, ConnectionProbe] = field(default_factory=dict)
    requested_probes: dict[NodePair, ConnectionProbe] = field(default_factory=dict)
    """At the `requested` addresses, where those differ."""
    port_probes: dict[str, ConnectionProbe] = field(default_factory=dict)
    """At the rendezvous port of the first node, by the node that connected."""
    sent: dict[str, int] = field(default_factory=dict)
    """Small datagrams to each target, as the sender reports."""
    received: dict[NodePair, DatagramCount] = field(default_factory=dict)
    """Only where both nodes answered; then also where nothing arrived."""
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
        return pair in self.probes and self.probes[pair].is_ok

    def lost_fraction(self, pair: NodePair) -> float | None:
        """At least so much is lost between the nodes; 1.0: nothing arrives. None: unknown."""
        received, sent = self.received.get(pair), self.sent.get(pair[0])
        if received is None or not sent:
            return None
        return max(0, sent - received.num_small - received.num_dropped) / sent


# The address at which each node is reached.


def host_of(node: str) -> str:
    """`me@host` is ssh's name of a node; the network knows `host`."""
    return node.rpartition("@")[2]


def addresses_on(facts: Mapping[str, NodeFacts], device: str) -> NodeAddresses:
    """Of the nodes that have this device, up and with an address."""
    found: NodeAddresses = {}
    for node, node_facts in facts.items():
        for owner, address in _list_addresses(node_facts):
            if owner.name == device and owner.is_up and node not in found:
                found[node] = _make_address(node, owner, address)
    return found


def choose_addresses(
    facts: Mapping[str, NodeFacts], lookups: Mapping[str, Sequence[NameLookup]]
) -> NodeAddresses:
    """By the nodes' names if each of them leads to its node; else by a shared network."""
    named: NodeAddresses = {}
    for node, node_facts in facts.items():
        own = {address: device for device, address in _list_addresses(node_facts)}
        resolved = (
            address
            for peer, answers in lookups.items()
            for answer in answers
            if peer != node and answer.name == host_of(node)
            for address in answer.addresses
        )
        match = next((address for address in resolved if address in own), None)
        if match is not None:
            named[node] = _make_address(node, own[match], match)
    if len(named) == len(facts):
        return named
    shared = _find_shared_network(facts)
    return shared if len(shared) == len(facts) else {**shared, **named}


def _find_shared_network(facts: Mapping[str, NodeFacts]) -> NodeAddresses:
    """The fastest network on which every node has its own address."""
    networks: dict[str, NodeAddresses] = {}
    for node, node_facts in facts.items():
        for device in node_facts.devices:
            for text in device.addresses if device.is_up else ():
                entry = ip_interface(text)
                if isinstance(entry, IPv4Interface) and not entry.ip.is_loopback:
                    members = networks.setdefault(str(entry.network), {})
                    members.setdefault(node, _make_address(node, device, str(entry.ip)))
    whole = [
        members
        for members in networks.values()
        if len({member.address for member in members.values()}) == len(facts)
    ]

    def slowest(members: NodeAddresses) -> float:
        return min(member.bits_per_second for member in members.values())

    return max(whole, key=slowest, default={})


def _list_addresses(facts: NodeFacts) -> Iterator[tuple[NetworkDevice, str]]:
    """Those that other nodes could connect to, IPv4 first."""
    found = [
        (device, text.partition("/")[0]) for device in facts.devices for text in device.addresses
    ]
    for device, address in sorted(found, key=lambda item: ":" in item[1]):
        if not ip_address(address).is_loopback and not ip_address(address).is_link_local:
            yield device, address


def _make_address(node: str, device: NetworkDevice, address: str) -> NodeAddress:
    return NodeAddress(
        node=node,
        address=address,
        device=device.name,
        mtu=device.mtu,
        bits_per_second=device.bits_per_second,
    )
