"""What an agent tells of its node, as it stands in a line of JSON."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict

PROTOCOL = 3
"""Counts changes that an agent of another version would not understand."""


class Message(BaseModel):
    """A newer agent may tell more than is known here."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NetworkDevice(Message):
    """One network device."""

    name: str
    is_up: bool
    mtu: int
    bits_per_second: float = 0.0
    """0: the device does not tell."""
    addresses: tuple[str, ...] = ()
    """With the length of the network's prefix: `10.0.0.1/24`."""


class NodeFacts(Message):
    """What a node is, without a look at any other."""

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
    """Where a node listens while it is looked at."""

    tcp_port: int
    udp_port: int
    rendezvous_error: str | None = None
    """Why the rendezvous port cannot be had; None also where it was not asked for."""


class Route(Message):
    """Which way a node would take to an address."""

    address: str
    source: str | None = None
    device: str | None = None
    reverse_seconds: float = 0.0
    """What the lookup of the address's name took."""


class ConnectionOutcome(str, Enum):
    """How a connection went."""

    OK = "ok"
    REFUSED = "refused"
    """The host answered: nothing listens there."""
    TIMEOUT = "timeout"
    """Nobody answered: a firewall, or packets that are lost."""
    UNREACHABLE = "unreachable"
    """There is no way to that address."""
    STALLED = "stalled"
    """Connected, but data or its acknowledgement did not come through."""


class ConnectionProbe(Message):
    """One connection to another node, with data both ways."""

    node: str
    address: str
    port: int
    outcome: ConnectionOutcome
    detail: str = ""
    seconds: float = 0.0
    rtt_seconds: float | None = None


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
    """Of all senders together: what reached the listener's host and found no room there."""


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
    cuda: str | None = None
    nccl: str | None = None
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
