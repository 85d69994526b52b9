"""What stands behind an address of `--hosts`, asked before llama.cpp does.

llama.cpp ends the whole process where a host does not answer as it should.
"""

from __future__ import annotations

import socket
import struct

from tightfit.core.errors import EnvironmentFaultError
from tightfit.runtime.rpc_library import HOW_TO_BUILD, Protocol

PATIENCE_SECONDS = 5.0
_HELLO_COMMAND = 14
"""The same in every release. Source: `RPC_CMD_HELLO` in ggml-rpc.cpp."""
_CAPABILITIES_BYTES = 24
_LENGTH = struct.Struct("<Q")
_REPLY = struct.Struct(f"<BBBx{_CAPABILITIES_BYTES}x")


def probe_host(address: str, ours: Protocol | None) -> None:
    """Raise what is wrong with a host, if anything. None: our protocol is not known."""
    theirs = _say_hello(address)
    if ours is not None and not ours.understands(theirs):
        raise EnvironmentFaultError(
            f"The rpc-server at {address} is of another llama.cpp release: it speaks protocol "
            f"{theirs}, this machine {ours}.",
            remedy="install the same xllamacpp there and here, then on both " + HOW_TO_BUILD,
        )


def how_to_start(address: str) -> str:
    """The command that has a host answer at this address."""
    host, _, port = address.rpartition(":")
    return (
        f"on {host}, if its network is private, for anyone may use it: "
        f"python -m tightfit.engines.llama.rpc_server --address {host} --port {port}"
    )


def _say_hello(address: str) -> Protocol:
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        try:
            connection.connect((host, int(port)))
        except OSError as fault:
            reason = "no answer" if isinstance(fault, TimeoutError) else fault.strerror
            raise EnvironmentFaultError(
                f"No llama.cpp rpc-server can be reached at {address}: {reason}.",
                remedy=how_to_start(address),
            ) from fault
        try:
            return _converse(connection)
        except TimeoutError as fault:
            raise EnvironmentFaultError(
                f"{address} takes connections but does not answer: its rpc-server serves another "
                "process, one at a time, or it is another program's port.",
                remedy="wait for the other process, or name the server's own port",
            ) from fault
        except (OSError, ValueError) as fault:
            raise EnvironmentFaultError(
                f"What listens at {address} does not speak as llama.cpp's rpc-server of this "
                "release.",
                remedy=how_to_start(address),
            ) from fault


def _converse(connection: socket.socket) -> Protocol:
    """Source: `negotiate_hello` in ggml-rpc.cpp; no capabilities but TCP."""
    question = bytes([_HELLO_COMMAND]) + _LENGTH.pack(_CAPABILITIES_BYTES)
    connection.sendall(question + bytes(_CAPABILITIES_BYTES))
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length != _REPLY.size:
        raise ValueError("another kind of answer")
    major, minor, _ = _REPLY.unpack(_receive(connection, _REPLY.size))
    return Protocol(major=major, minor=minor)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        more = connection.recv(num_bytes - len(received))
        if not more:
            raise ValueError("the connection was closed")
        received += more
    return received
