"""What an agent measures on its node: versions, devices and limits; names, routes, connections,
datagrams and streams to the other nodes. Loads no torch.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tightfit.clusters.preflight.messages import (
    ConnectionOutcome,
    ConnectionProbe,
    DatagramCount,
    ListenerPorts,
    NameLookup,
    NetworkDevice,
    NodeFacts,
    Route,
    StreamResult,
)
from tightfit.core.version import __version__

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes")
_BUILD = re.compile(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def probe_facts() -> NodeFacts:
    memory = psutil.virtual_memory()
    shm = _usage("/dev/shm")
    driver, gpus = _probe_gpus()
    return NodeFacts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        packages=probe_packages(),
        driver=driver,
        gpus=gpus,
        devices=probe_devices(),
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        disk_free_bytes=_usage(tempfile.gettempdir())[1],
        num_cores=len(os.sched_getaffinity(0)),
        max_open_files=_limit(resource.RLIMIT_NOFILE) or 0,
        max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
    )


def probe_packages() -> dict[str, str | None]:
    """Versions by their metadata; tightfit's is the one that runs."""
    found: dict[str, str | None] = {"tightfit": __version__}
    for name in PACKAGES:
        found[name] = _version(name)
    found["torch's CUDA"] = _read_torch_build()
    found["NCCL"] = next(
        (v for v in map(_version, ("nvidia-nccl-cu13", "nvidia-nccl-cu12")) if v is not None), None
    )
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_torch_build() -> str | None:
    """torch/version.py says for which CUDA it was built; reading is cheaper than importing."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        found = _BUILD.search(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, ValueError):
        return None
    return found[1] if found else "none"


def probe_devices() -> tuple[NetworkDevice, ...]:
    stats = psutil.net_if_stats()
    return tuple(
        NetworkDevice(
            name=name,
            is_up=name in stats and stats[name].isup,
            mtu=stats[name].mtu if name in stats else 0,
            bits_per_second=_speed(stats[name].speed if name in stats else 0),
            addresses=tuple(
                _with_prefix(entry.address, entry.netmask)
                for entry in entries
                if entry.family in (socket.AF_INET, socket.AF_INET6)
            ),
        )
        for name, entries in psutil.net_if_addrs().items()
    )


def _speed(megabits: int) -> float:
    """Devices that do not know their speed tell 0, -1 or 65535."""
    return megabits * 1e6 if 0 < megabits < 65_535 or megabits > 65_535 else 0.0


def _with_prefix(address: str, netmask: str | None) -> str:
    plain = address.partition("%")[0]
    if not netmask:
        return plain
    if ":" in netmask:
        bits = sum(bin(int(part or "0", 16)).count("1") for part in netmask.split(":"))
        return f"{plain}/{bits}"
    return f"{plain}/{ip_network(f'0.0.0.0/{netmask}').prefixlen}"


def _probe_gpus() -> tuple[str | None, tuple[str, ...]]:
    from tightfit.hardware.nvml import read_driver

    reading = read_driver()
    return reading.driver_version, tuple(gpu.name for gpu in reading.gpus)


def _usage(path: str) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


# Counts datagrams by sender, apart from those that its own socket had no room for.

DATAGRAM = struct.Struct("!4sHB")
"""Mark, the sender's number, whether it is large."""
MARK = b"tfpf"
ROOM_BYTES = 16 << 20
"""For what all senders send while this process gets no CPU; the kernel may grant less."""
DRAIN_SECONDS = 1.0
"""Of a socket into which somebody else never stops sending."""
_MEMINFO, _MEMINFO_FIELDS = 55, struct.Struct("=9I")
"""Linux's SO_MEMINFO: what the kernel tells of a socket's memory, the number of drops last."""


class DatagramCounter:
    """A UDP socket on every address of the host, read by a thread until the process ends."""

    def __init__(self, *, room_bytes: int = ROOM_BYTES) -> None:
        self._received: Counter[tuple[int, bool]] = Counter()
        self._turn = threading.Lock()
        self._overflows_before = _read_host_overflows()
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
        self.socket.bind(("", 0))

    def start(self) -> None:
        threading.Thread(target=self._count, daemon=True).start()

    def tell(self, senders: Sequence[int]) -> list[DatagramCount]:
        """Of each sender, none left out, once all that has reached this host is counted."""
        self._drain()  # the thread may be late on a busy node
        num_dropped = self._count_drops()
        return [
            DatagramCount(
                sender=sender,
                num_small=self._received[(sender, False)],
                num_large=self._received[(sender, True)],
                num_dropped=num_dropped,
            )
            for sender in senders
        ]

    def _count(self) -> None:
        with suppress(OSError):
            while True:
                self.socket.recv(1, socket.MSG_PEEK)  # waits, and leaves it there
                self._drain()

    def _drain(self) -> None:
        """In turns, so that whoever comes after finds counted what the other has read."""
        with self._turn, suppress(BlockingIOError):
            end = time.monotonic() + DRAIN_SECONDS
            while time.monotonic() < end:
                data = self.socket.recv(65_536, socket.MSG_DONTWAIT)
                if len(data) >= DATAGRAM.size:
                    mark, sender, is_large = DATAGRAM.unpack_from(data)
                    if mark == MARK:
                        self._received[(sender, bool(is_large))] += 1

    def _count_drops(self) -> int:
        """Datagrams that arrived and found no room, whoever sent them.

        The kernel's count of a socket has those with a wrong checksum in it, which are the
        network's fault; that of the host has not, but has those of every other socket.
        """
        try:
            reply = self.socket.getsockopt(socket.SOL_SOCKET, _MEMINFO, _MEMINFO_FIELDS.size)
            at_socket = int(_MEMINFO_FIELDS.unpack(reply)[-1])
        except (OSError, struct.error):  # before Linux 4.12
            return 0
        return min(at_socket, _read_host_overflows() - self._overflows_before)


def _read_host_overflows() -> int:
    """Datagrams for which sockets of this host had no room, since it started."""
    try:
        lines = Path("/proc/net/snmp").read_text().splitlines()
    except OSError:
        return 0
    names, values = (line.split() for line in lines if line.startswith("Udp:"))
    return int(dict(zip(names, values, strict=True))["RcvbufErrors"])


# The listening side of a node under test: echoes, takes streams, counts datagrams.

IDLE_SECONDS = 30.0
CHECK_BYTES = 256 * 1024
"""More than fits into one packet of any network, so that a narrow spot on the way shows."""
PING, CHECK, SINK = b"P", b"C", b"S"
PING_BYTES = 64


class Listener:
    """Opens the ports of a node and serves who comes in, until the process ends."""

    def __init__(self) -> None:
        self._datagrams: DatagramCounter | None = None
        self._rendezvous: socket.socket | None = None

    def open(self, rendezvous_port: int | None) -> ListenerPorts:
        tcp = _listen(0)
        self._datagrams = DatagramCounter()
        _in_thread(self._serve, tcp)
        self._datagrams.start()
        error = None
        if rendezvous_port is not None:
            error = self._open_rendezvous(rendezvous_port)
        return ListenerPorts(
            tcp_port=tcp.getsockname()[1],
            udp_port=self._datagrams.socket.getsockname()[1],
            rendezvous_error=error,
        )

    def _open_rendezvous(self, port: int) -> str | None:
        try:
            self._rendezvous = _listen(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"is taken by {_name_holder(port)}"
            return f"cannot be opened: {os.strerror(error.errno or 0)}"
        _in_thread(self._serve, self._rendezvous)
        return None

    def close_rendezvous(self) -> None:
        """Free it for the one that is to open it in earnest."""
        if self._rendezvous is not None:
            with suppress(OSError):
                self._rendezvous.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._rendezvous.close()
            self._rendezvous = None

    def count_received(self, senders: Sequence[int]) -> list[DatagramCount]:
        return self._datagrams.tell(senders) if self._datagrams else []

    def _serve(self, door: socket.socket) -> None:
        while True:
            try:
                guest, _ = door.accept()
            except OSError:
                return
            _in_thread(_answer_connection, guest)


def _listen(port: int) -> socket.socket:
    """On every address of the host, as torch's store does."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return _bind(socket.AF_INET6, port)
    return _bind(socket.AF_INET, port)


def _bind(family: int, port: int) -> socket.socket:
    is_dual = family == socket.AF_INET6
    return socket.create_server(("", port), family=family, backlog=256, dualstack_ipv6=is_dual)


def _answer_connection(guest: socket.socket) -> None:
    """One connection: what its first byte asks for."""
    with guest, suppress(OSError):
        guest.settimeout(IDLE_SECONDS)
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = guest.recv(1)
        if request == PING:
            while data := receive(guest, PING_BYTES):
                guest.sendall(data)
        elif request == CHECK:
            receive(guest, CHECK_BYTES)
            guest.sendall(CHECK)
            guest.sendall(bytes(CHECK_BYTES))
            receive(guest, 1)
        elif request == SINK:
            room = bytearray(1 << 20)
            while guest.recv_into(room):
                pass


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """All of them, or none where the other side has closed."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def _name_holder(port: int) -> str:
    """The process that listens there, where it may be observed."""
    with suppress(psutil.Error, OSError):
        for held in psutil.net_connections(kind="tcp"):
            is_it = held.laddr and held.laddr.port == port and held.status == psutil.CONN_LISTEN
            if is_it and held.pid:
                return f"{psutil.Process(held.pid).name()} (pid {held.pid})"
    return "another process"


def _in_thread(run: object, *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, daemon=True).start()  # type: ignore[arg-type]


# The asking side of a node under test: names, routes, connections, datagrams, streams.

NUM_PINGS = 20
SMALL_BYTES = 160
"""Of a datagram: small enough for any network, so that its loss is loss."""
SPRAY_SECONDS = 1.0
CHUNK_BYTES = 1 << 20
REVERSE_SECONDS = 2.0
"""How long the name of an address is waited for."""
_UNREACHABLE = ("No route to host", "Network is unreachable", "Host is down")
_MTU_DISCOVER, _PROBE = 10, 3
"""Linux: send whole or not at all, whatever the kernel believes of the path."""
_ACKED_AT, _RESENT_AT, _SENT_AT = 120, 100, 136
"""Places in Linux's tcp_info: bytes acknowledged, segments resent, segments sent."""

Item = TypeVar("Item")
Found = TypeVar("Found")


def resolve_names(names: Sequence[str]) -> list[NameLookup]:
    """All at once: a resolver that does not answer costs its time only once."""
    return _in_parallel(_resolve_name, names)


def _resolve_name(name: str) -> NameLookup:
    begin = time.monotonic()
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return NameLookup(name=name, seconds=time.monotonic() - begin, error=why)
    addresses = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
    return NameLookup(name=name, addresses=tuple(addresses), seconds=time.monotonic() - begin)


def find_routes(addresses: Sequence[str]) -> list[Route]:
    """By the kernel's own choice: a datagram socket is connected, nothing is sent."""
    names = {
        address.partition("/")[0]: device.name
        for device in probe_devices()
        for address in device.addresses
    }
    return _in_parallel(lambda address: _find_route(address, names), addresses)


def _find_route(address: str, names: dict[str, str]) -> Route:
    source = None
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        source = str(probe.getsockname()[0]).partition("%")[0]
    device = names.get(source) if source is not None else None
    took = _time_reverse(address)
    return Route(address=address, source=source, device=device, reverse_seconds=took)


def _time_reverse(address: str) -> float:
    """torch names its peers in its log, and waits for the resolver; here only for a while."""
    begin = time.monotonic()

    def look() -> None:
        with suppress(OSError):
            socket.getnameinfo((address, 0), 0)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(REVERSE_SECONDS)
    return time.monotonic() - begin


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def probe_connections(targets: Sequence[dict[str, Any]], seconds: float) -> list[ConnectionProbe]:
    """Connect to each of them; with `is_ours` also send data there and back."""
    return _in_parallel(lambda target: _probe_connection(target, seconds), targets)


def _probe_connection(target: dict[str, Any], seconds: float) -> ConnectionProbe:
    begin = time.monotonic()
    address, port = str(target["address"]), int(target["port"])
    outcome, detail, rtt = ConnectionOutcome.OK, "", None
    try:
        connection = socket.create_connection((address, port), timeout=seconds / 2)
    except OSError as error:
        outcome, detail = (
            _classify_error(error),
            os.strerror(error.errno) if error.errno else str(error),
        )
    else:
        with connection:
            if target["is_ours"]:
                try:
                    rtt = _ping(address, port, seconds=seconds / 4)
                    _check(connection, seconds=seconds / 4)
                except OSError as error:
                    outcome, detail = ConnectionOutcome.STALLED, str(error)
    return ConnectionProbe(
        node=target["node"],
        address=address,
        port=port,
        outcome=outcome,
        detail=detail,
        seconds=time.monotonic() - begin,
        rtt_seconds=rtt,
    )


def _classify_error(error: OSError) -> ConnectionOutcome:
    if isinstance(error, ConnectionRefusedError):
        return ConnectionOutcome.REFUSED
    if error.errno and os.strerror(error.errno) in _UNREACHABLE:
        return ConnectionOutcome.UNREACHABLE
    return ConnectionOutcome.TIMEOUT


def _ping(address: str, port: int, *, seconds: float) -> float:
    """The shortest way there and back of a few bytes."""
    shortest = float("inf")
    with socket.create_connection((address, port), timeout=seconds) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(PING)
        for _ in range(NUM_PINGS):
            begin = time.perf_counter()
            connection.sendall(bytes(PING_BYTES))
            if not receive(connection, PING_BYTES):
                raise ConnectionError("the connection was closed")
            shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def _check(connection: socket.socket, *, seconds: float) -> None:
    """Data in both directions, each acknowledged by the program over there."""
    connection.settimeout(seconds)
    connection.sendall(CHECK + bytes(CHECK_BYTES))
    try:
        if receive(connection, 1) != CHECK:
            raise ConnectionError("the connection was closed")
    except TimeoutError:
        raise TimeoutError("data sent there was not acknowledged") from None
    try:
        if not receive(connection, CHECK_BYTES):
            raise ConnectionError("the connection was closed")
    except TimeoutError:
        raise TimeoutError("data sent back did not arrive") from None
    connection.sendall(CHECK)


def send_datagrams(
    targets: Sequence[dict[str, Any]], *, sender: int, num_small: int, num_large: int
) -> int:
    """Datagrams at a slow, even pace to each target; how many could be sent to each."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _PROBE)
        small = DATAGRAM.pack(MARK, sender, 0).ljust(SMALL_BYTES, b".")
        begin, sent = time.monotonic(), 0
        for number in range(num_small):
            for target in targets:
                with suppress(OSError):  # without a route nothing is received, which tells it
                    out.sendto(small, (target["address"], target["port"]))
            sent += 1
            due = begin + SPRAY_SECONDS * (number + 1) / num_small
            time.sleep(max(0.0, due - time.monotonic()))
        for target in targets:
            large = DATAGRAM.pack(MARK, sender, 1).ljust(int(target["large_bytes"]), b".")
            for _ in range(num_large):
                with suppress(OSError):
                    out.sendto(large, (target["address"], target["port"]))
    return sent


def send_stream(*, node: str, address: str, port: int, seconds: float) -> StreamResult:
    """As much as goes in that time; counted is what the other side's kernel has acknowledged."""
    chunk = bytes(CHUNK_BYTES)
    begin, sent = time.monotonic(), 0
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.sendall(SINK)
            begin = time.monotonic()
            connection.settimeout(0.2)
            while time.monotonic() - begin < seconds:
                with suppress(TimeoutError):
                    sent += connection.send(chunk)
            took = time.monotonic() - begin
            acked, resent = _read_tcp_info(connection)
            # What is still queued on a slow link is thrown away, not waited for.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError as error:
        return StreamResult(node=node, bytes_per_second=0.0, error=str(error))
    num_bytes = sent if acked is None else min(acked, sent)
    return StreamResult(node=node, bytes_per_second=num_bytes / took, resent_fraction=resent)


def _read_tcp_info(connection: socket.socket) -> tuple[int | None, float]:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (acked,) = struct.unpack_from("=Q", info, _ACKED_AT)
        (resent,) = struct.unpack_from("=I", info, _RESENT_AT)
        (out,) = struct.unpack_from("=I", info, _SENT_AT)
    except (OSError, struct.error):
        return None, 0.0
    return acked, resent / out if out else 0.0


def _in_parallel(run: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    if not items:
        return []
    with ThreadPoolExecutor(max_workers=min(len(items), 64)) as pool:
        return list(pool.map(run, items))
