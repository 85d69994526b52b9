"""Listening sockets of the HTTP API and the compare page, and which addresses are loopback."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.core.errors import SetupError, UsageError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """A Host header without its port and an IPv6 address's brackets."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_same_origin(origin: str, host: str) -> bool:
    """Whether an Origin header names the server that a Host header names."""
    scheme, _, rest = origin.strip().lower().partition("://")
    return scheme in ("http", "https") and rest == host.strip().lower()


def is_of_other_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser says that another site's page made a request, also one without an Origin.

    That of an image, a script or a frame has none; a link that is followed is no such request.
    Another port of this machine is another page's too. Source: W3C, Fetch Metadata.
    """
    if headers.get(b"sec-fetch-site") not in (b"cross-site", b"same-site"):
        return False
    mode, target = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    return mode != b"navigate" or target not in (None, b"document")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSocket:
    """A socket that listens."""

    socket: socket.socket
    host: str
    """As it was asked for."""
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.address)

    @property
    def url(self) -> str:
        """For a client on this machine or, bound beyond it, on another one."""
        name = self.host
        if self.address in ("0.0.0.0", "::"):
            name = socket.gethostname()
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"


def bind_socket(host: str, port: int) -> BoundSocket:
    """Take the port before anything is loaded; 0 takes a free one."""
    host = host.strip("[]")
    try:
        family, _, _, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"`--host {host[:80]}` is not an address of this machine.",
            remedy="--host 127.0.0.1, or 0.0.0.0 for every network",
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise _cannot_bind(host, port, error) from error
    address, taken = listener.getsockname()[:2]
    return BoundSocket(socket=listener, host=host, address=str(address), port=int(taken))


def _cannot_bind(host: str, port: int, error: OSError) -> SetupError | UsageError:
    if error.errno == errno.EADDRINUSE:
        return SetupError(
            f"Port {port} of {host} is taken by another program.",
            remedy=f"--port {port + 1 if port < 65_535 else 0}, or --port 0 for a free one",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return SetupError(
            f"Port {port} may only be opened by root.", remedy="--port 8000, or --port 0"
        )
    return UsageError(
        f"Cannot listen on {host}:{port}: {error.strerror or error}.",
        remedy="--host 127.0.0.1, or 0.0.0.0 for every network",
    )
