"""Rendezvous: where the nodes of one job meet."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import UsageError

DEFAULT_PORT = 29_500
"""torchrun's own."""
MAX_RESTARTS = 20
"""Times a job of several nodes starts again by itself after a node was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The meeting point, and how this node reaches it."""

    endpoint: str
    """`host:port`; torchrun opens the store on that host."""
    node_rank: int | None = None
    """Names this node's lock where several share a host name; ranks are dealt by torchrun."""
    local_address: str | None = None
    """Under which the other nodes reach this one. None: its host name."""
    interface: str | None = None
    """Network device for NCCL and gloo. None: they choose."""
    max_restarts: int = MAX_RESTARTS
    is_here: bool | None = None
    """Whether the endpoint is this machine. None: torchrun guesses, by the host's name alone."""


def parse_endpoint(text: str) -> str:
    """`host` or `host:port` as `host:port`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host, port = text.strip(), str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(
            f"`--rendezvous {text}` is not HOST:PORT.", remedy=f"--rendezvous node1:{DEFAULT_PORT}"
        )
    return f"{host}:{port}"


def probe_is_here(endpoint: str) -> bool | None:
    """Whether an address of the endpoint is this machine's own; None where it has no address.

    torchrun asks which addresses the host's name stands for, and so does not know the second
    network of a machine, nor one whose name stands for 127.0.1.1.
    """
    host = endpoint.rpartition(":")[0]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # A pod starts before the cluster's name service knows it, and knows itself already.
        return True if host.partition(".")[0] == socket.gethostname() else None
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: Any) -> bool:
    """A socket can be bound to no address but one's own."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True
