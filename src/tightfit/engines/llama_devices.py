"""Devices that llama.cpp computes on: local GPUs, CPU threads, and other hosts over RPC.

llama.cpp ends its process when an RPC host does not answer, so hosts are probed first, and the
process that started it (`llama_process.py`) reports a lost host.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
import struct
import sys
from pathlib import Path

import psutil

from tightfit.core.errors import SetupError, UsageError
from tightfit.hardware.machine import read_machine
from tightfit.runtime.llama_cpp import (
    HOW_TO_BUILD,
    Protocol,
    find_rpc_function,
    load_library,
    load_rpc,
)


def list_gpus() -> tuple[str, ...]:
    """GPUs that this build of llama.cpp can use, as it names them: `CUDA0`, `Metal`, ..."""
    import xllamacpp

    kinds = xllamacpp.ggml_backend_dev_type
    graphic = (kinds.GGML_BACKEND_DEVICE_TYPE_GPU, kinds.GGML_BACKEND_DEVICE_TYPE_IGPU)
    return tuple(
        str(device["name"]) for device in xllamacpp.get_device_info() if device["type"] in graphic
    )


def choose_threads(asked: int | None) -> int:
    """The physical cores this process may use.

    A second thread on one core only makes the others wait: llama.cpp's threads meet after
    every operation. OMP_NUM_THREADS, where set, is taken as the user's word.
    """
    if asked is not None:
        return asked
    stated = os.environ.get("OMP_NUM_THREADS", "").strip()
    if stated.isascii() and stated.isdigit() and 0 < int(stated[:6]) <= 512:
        return int(stated)
    usable = read_machine().num_usable_cores
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


# The handshake with an RPC host, done before llama.cpp connects.

HANDSHAKE_SECONDS = 5.0
_HELLO_COMMAND = 14
"""The same in every release. Source: `RPC_CMD_HELLO` in ggml-rpc.cpp."""
_CAPABILITIES_BYTES = 24
_LENGTH = struct.Struct("<Q")
_REPLY = struct.Struct(f"<BBBx{_CAPABILITIES_BYTES}x")


def probe_host(address: str, ours: Protocol | None) -> None:
    """Raise where a host cannot be used. `ours` is None where our protocol is not known."""
    theirs = _handshake(address)
    if ours is not None and not ours.understands(theirs):
        raise SetupError(
            f"The rpc-server at {address} is of another llama.cpp release: it has protocol "
            f"{theirs}, this machine {ours}.",
            remedy="install the same xllamacpp there and here, then on both " + HOW_TO_BUILD,
        )


def explain_start(address: str) -> str:
    """How to start a server at this address."""
    host, _, port = address.rpartition(":")
    return (
        f"on {host}, if its network is private, for anyone may use it: "
        f"python -m tightfit.engines.llama_rpc_server --address {host} --port {port}"
    )


def _handshake(address: str) -> Protocol:
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET) as connection:
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            connection.connect((host, int(port)))
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
            raise SetupError(
                f"No llama.cpp rpc-server can be reached at {address}: {reason}.",
                remedy=explain_start(address),
            ) from error
        try:
            # Source: `negotiate_hello` in ggml-rpc.cpp; no capabilities but TCP.
            question = bytes([_HELLO_COMMAND]) + _LENGTH.pack(_CAPABILITIES_BYTES)
            connection.sendall(question + bytes(_CAPABILITIES_BYTES))
            with connection.makefile("rb") as reader:
                (length,) = _LENGTH.unpack(reader.read(_LENGTH.size))
                if length != _REPLY.size:
                    raise ValueError("another kind of answer")
                major, minor, _ = _REPLY.unpack(reader.read(_REPLY.size))
            return Protocol(major=major, minor=minor)
        except TimeoutError as error:
            raise SetupError(
                f"{address} takes connections but does not answer: its rpc-server serves another "
                "process, one at a time, or the port belongs to another program.",
                remedy="wait for the other process, or name the server's own port",
            ) from error
        except (OSError, ValueError, struct.error) as error:  # struct: the connection was closed
            raise SetupError(
                f"The program at {address} does not answer as llama.cpp's rpc-server of this "
                "release does.",
                remedy=explain_start(address),
            ) from error


# llama.cpp's RPC backend calls abort() from a thread of its own when a connection breaks, which
# nothing in that process can catch: its parent says what happened.


def describe_lost_host(hosts: tuple[str, ...]) -> SetupError:
    """An error that names the host that no longer answers."""
    for host in hosts:
        try:
            probe_host(host, None)
        except SetupError as error:
            return SetupError(
                f"A host was lost during computation. {error.problem}",
                remedy=f"{explain_start(host)}; then run the same command again",
            )
    return SetupError(
        f"llama.cpp gave up, as it does when a connection breaks; {', '.join(hosts)} can be "
        "reached again.",
        remedy="run the same command again",
    )


# Hosts as devices of llama.cpp's RPC backend.

DEFAULT_RPC_PORT = 50052
MAX_HOSTS = 16
"""llama.cpp spreads a model over as many devices. Source: `llama_max_devices` in llama.cpp."""

_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(:(?P<port>[0-9]{1,5}))?"
)
"""Names and IPv4: llama.cpp takes what follows the first colon as the port."""


def read_hosts(text: str | None) -> tuple[str, ...]:
    """`a:50052,b` as addresses with a port each."""
    if text is None:
        return ()
    addresses = [_read_address(part.strip()) for part in text.split(",") if part.strip()]
    twice = next((one for one in addresses if addresses.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"`--hosts` names {twice} twice.", remedy="name each host once")
    if not 0 < len(addresses) <= MAX_HOSTS:
        raise UsageError(
            f"`--hosts` names {len(addresses)} hosts; 1 to {MAX_HOSTS} can be used.",
            remedy=f"--hosts node1:{DEFAULT_RPC_PORT},node2:{DEFAULT_RPC_PORT}",
        )
    return tuple(addresses)


def _read_address(text: str) -> str:
    parts = _ADDRESS.fullmatch(text)
    port = int(parts["port"] or DEFAULT_RPC_PORT) if parts else 0
    if parts is None or not 0 < port < 65536:
        raise UsageError(
            f"`--hosts`: {text[:60]!r} is no address.",
            remedy=f"--hosts node1:{DEFAULT_RPC_PORT},node2:{DEFAULT_RPC_PORT}",
        )
    return f"{parts['host']}:{port}"


def add_hosts(hosts: tuple[str, ...]) -> None:
    """Make the hosts' devices known to llama.cpp, before a model is loaded."""
    if not hosts:
        return
    protocol = load_rpc()
    for host in hosts:
        probe_host(host, protocol)
    library, pointer = load_library(), ctypes.c_void_p
    # As llama.cpp's own `--rpc` does it. Source: `add_rpc_devices` in its common/arg.cpp.
    library.ggml_backend_register.restype = None
    library.ggml_backend_register.argtypes = [pointer]
    add_server = ctypes.CFUNCTYPE(pointer, ctypes.c_char_p)(
        find_rpc_function("ggml_backend_rpc_add_server")
    )
    for host in hosts:
        devices = add_server(host.encode())
        if not devices:
            raise SetupError(
                f"The rpc-server at {host} offers no device.", remedy=explain_start(host)
            )
        library.ggml_backend_register(devices)


# Keepalive: a host that lost power or its cable sends nothing, and llama.cpp would wait for ever.

IDLE_SECONDS, INTERVAL_SECONDS, NUM_PROBES = 10, 5, 4
"""A host is given up after 30 seconds. One that computes still answers at TCP level."""


def enable_keepalive(hosts: tuple[str, ...]) -> None:
    """Let the kernel close connections whose host no longer answers.

    llama.cpp does not expose its sockets; they are found by their peer address.
    """
    if sys.platform != "linux":
        return
    addresses = (host.rpartition(":") for host in hosts)
    peers = {(socket.gethostbyname(name), int(port)) for name, _, port in addresses}
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            is_socket = stat.S_ISSOCK(entry.stat().st_mode)
        except OSError:  # closed since, as is the descriptor of the listing itself
            continue
        if is_socket:
            _set_keepalive(int(entry.name), peers)


def _set_keepalive(number: int, peers: set[tuple[str, int]]) -> None:
    with socket.socket(fileno=os.dup(number)) as connection:
        try:
            is_ours = connection.family == socket.AF_INET and connection.getpeername() in peers
        except OSError:  # not connected
            return
        if is_ours:
            limit = IDLE_SECONDS + INTERVAL_SECONDS * NUM_PROBES
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit * 1000)
