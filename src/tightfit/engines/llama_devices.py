"""Devices that llama.cpp computes on: local GPUs, CPU threads, and other hosts over RPC.

llama.cpp ends the process when an RPC host does not answer, so hosts are probed first, and a
process that uses them runs under a guard process that reports a lost host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tightfit.core.child_process import end_with_parent
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


# The guard: a parent of the process that uses hosts. llama.cpp's RPC backend calls abort() from
# a thread of its own when a connection breaks, which nothing in that process can catch.

GUARD_VARIABLE = "TIGHTFIT_GUARD"
"""In the guarded process: its guard's process id."""
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


def join_guard() -> bool:
    """Whether this process runs under a guard; if so, it ends with it from now on."""
    guard = os.environ.get(GUARD_VARIABLE, "")
    if not guard.isdigit() or os.getppid() != int(guard):
        return False
    end_with_parent(int(guard))
    return True


def run_guarded(command: Sequence[str], hosts: tuple[str, ...]) -> int:
    """The command's exit code. Raises an error that names the host where one was lost."""
    environment = {**os.environ, GUARD_VARIABLE: str(os.getpid())}
    with subprocess.Popen(command, env=environment) as guarded, _forward_signals(guarded):
        code = guarded.wait()
    if code == -signal.SIGABRT:
        raise describe_lost_host(hosts)
    if code < 0:  # end by the same signal
        if -code not in (signal.SIGKILL, signal.SIGSTOP):  # which have no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


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
        remedy="run the same command again    (TIGHTFIT_DEBUG=1 shows llama.cpp's messages)",
    )


def silence_abort(library: Any) -> None:
    """Suppress llama.cpp's abort message and core dump: the guard reports what happened."""
    if GUARD_VARIABLE not in os.environ or os.environ.get("TIGHTFIT_DEBUG", "0") not in ("", "0"):
        return
    # A C function without effect: a Python callback could deadlock on the interpreter lock here.
    nothing = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
    library.ggml_set_abort_callback.argtypes = [ctypes.c_void_p]
    library.ggml_set_abort_callback(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextlib.contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A terminal sends Ctrl-C to both processes; every other signal reaches only this one."""

    def pass_on(number: int, _frame: object) -> None:
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        if number != signal.SIGINT or not has_terminal:
            process.send_signal(number)

    before = {number: signal.getsignal(number) for number in _FORWARDED_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    silence_abort(library)
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
