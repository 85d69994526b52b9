"""`python -m tightfit.clusters.preflight.agent`: answers requests about its node.

It ends when stdin closes, and in any case after a while: nothing is left running on a node.
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
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tightfit.clusters.agents import serve_requests
from tightfit.clusters.nodes import find_route_source, list_addresses
from tightfit.clusters.preflight.observations import (
    PROTOCOL,
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
)
from tightfit.core.child_process import ChildProcess, Message, open_output
from tightfit.core.import_path import module_words
from tightfit.core.packages import __version__
from tightfit.hardware.machine import read_driver, read_free_disk, read_machine

# What an agent measures on its node: versions, devices and limits; names, routes, connections,
# datagrams and streams to the other nodes. Loads no torch.

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes")
_BUILD = re.compile(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def probe_facts() -> NodeFacts:
    machine, driver = read_machine(), read_driver()
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        packages=probe_packages(),
        driver=driver.driver_version,
        gpus=tuple(gpu.name for gpu in driver.gpus),
        devices=probe_devices(),
        memory_bytes=machine.memory_bytes,
        free_memory_bytes=machine.available_memory_bytes,
        shm_bytes=machine.shm_bytes or 0,
        shm_free_bytes=machine.shm_free_bytes or 0,
        disk_free_bytes=read_free_disk(Path(tempfile.gettempdir())) or 0,
        num_cores=machine.num_usable_cores,
        max_open_files=0 if open_files == resource.RLIM_INFINITY else open_files,
        max_locked_bytes=machine.locked_memory_limit_bytes,
        has_infiniband=machine.has_infiniband,
    )


def probe_packages() -> dict[str, str | None]:
    """Versions by their metadata; tightfit's is the one that runs."""
    nccl = _version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12")
    return {
        "tightfit": __version__,
        **{name: _version(name) for name in PACKAGES},
        "torch's CUDA": _read_torch_build(),
        "NCCL": nccl,
    }


def _version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _read_torch_build() -> str | None:
    """torch/version.py says for which CUDA it was built; reading is cheaper than importing."""
    with suppress(OSError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            found = _BUILD.search(Path(spec.origin).with_name("version.py").read_text())
            return found[1] if found else "none"
    return None


def probe_devices() -> tuple[NetworkDevice, ...]:
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        stat = stats.get(name)
        # Devices that do not know their speed report 0, -1 or 65535.
        megabits = stat.speed if stat and stat.speed > 0 and stat.speed != 65_535 else 0
        addresses = tuple(
            _with_prefix(entry.address, entry.netmask)
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        found.append(
            NetworkDevice(
                name=name,
                is_up=stat is not None and stat.isup,
                mtu=stat.mtu if stat else 0,
                bits_per_second=megabits * 1e6,
                addresses=addresses,
            )
        )
    return tuple(found)


def _with_prefix(address: str, netmask: str | None) -> str:
    """`10.0.0.1/24`."""
    plain = address.partition("%")[0]
    if not netmask:
        return plain
    bits = bin(int(ip_address(netmask))).count("1")
    return f"{plain}/{bits}"


# Counts datagrams by sender, apart from those that its own socket had no room for.

DATAGRAM = struct.Struct("!4sHB")
"""Mark, the sender's number, whether it is large."""
MARK = b"tfpf"
ROOM_BYTES = 16 << 20
"""For what all senders send while this process gets no CPU; the kernel may grant less."""
DRAIN_SECONDS = 1.0
"""Of a socket into which somebody else never stops sending."""
_MEMINFO, _MEMINFO_FIELDS = 55, struct.Struct("=9I")
"""Linux's SO_MEMINFO: what the kernel reports of a socket's memory, the number of drops last."""


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
        threading.Thread(target=self._read, daemon=True).start()

    def count(self, senders: Sequence[int]) -> list[DatagramCount]:
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

    def _read(self) -> None:
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
        network's error; that of the host has not, but has those of every other socket.
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
"""More than fits into one packet of any network, so that a narrow link shows."""
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
        _in_thread(_serve, tcp)
        self._datagrams.start()
        problem = None
        if rendezvous_port is not None:
            try:
                self._rendezvous = _listen(rendezvous_port)
                _in_thread(_serve, self._rendezvous)
            except OSError as error:
                problem = f"cannot be opened: {os.strerror(error.errno or 0)}"
                if error.errno == errno.EADDRINUSE:
                    problem = f"is taken by {_name_holder(rendezvous_port)}"
        return ListenerPorts(
            tcp_port=tcp.getsockname()[1],
            udp_port=self._datagrams.socket.getsockname()[1],
            rendezvous_error=problem,
        )

    def close_rendezvous(self) -> None:
        """Free it for the one that is to open it in earnest."""
        if self._rendezvous is not None:
            with suppress(OSError):
                self._rendezvous.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._rendezvous.close()
            self._rendezvous = None

    def count_received(self, senders: Sequence[int]) -> list[DatagramCount]:
        return self._datagrams.count(senders) if self._datagrams else []


def _listen(port: int) -> socket.socket:
    """On every address of the host, as torch's store does."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=256, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=256)


def _serve(server: socket.socket) -> None:
    with suppress(OSError):  # the socket was closed
        while True:
            connection, _ = server.accept()
            _in_thread(_answer_connection, connection)


def _answer_connection(connection: socket.socket) -> None:
    """The first byte says what the other side wants."""
    with connection, suppress(OSError):
        connection.settimeout(IDLE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = connection.recv(1)
        if request == PING:
            while data := receive(connection, PING_BYTES):
                connection.sendall(data)
        elif request == CHECK:
            receive(connection, CHECK_BYTES)
            connection.sendall(CHECK + bytes(CHECK_BYTES))
            receive(connection, 1)
        elif request == SINK:
            buffer = bytearray(1 << 20)
            while connection.recv_into(buffer):
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
        for one in psutil.net_connections(kind="tcp"):
            is_it = one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN
            if is_it and one.pid:
                return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
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
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
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
    """By the kernel's own choice."""
    owners = list_addresses()
    return _in_parallel(lambda address: _find_route(address, owners), addresses)


def _find_route(address: str, owners: dict[str, str]) -> Route:
    source = find_route_source(address)
    # torch names its peers in its log, and waits for the resolver; here only for a while.
    begin = time.monotonic()
    lookup = threading.Thread(target=_look_up_name, args=(address,), daemon=True)
    lookup.start()
    lookup.join(REVERSE_SECONDS)
    return Route(
        address=address,
        source=source,
        device=owners.get(source or ""),
        reverse_seconds=time.monotonic() - begin,
    )


def _look_up_name(address: str) -> None:
    with suppress(OSError):
        socket.getnameinfo((address, 0), 0)


def probe_connections(targets: Sequence[dict[str, Any]], seconds: float) -> list[ConnectionProbe]:
    """Connect to each of them; with `is_ours` also send data there and back."""
    return _in_parallel(lambda target: _probe_connection(target, seconds), targets)


def _probe_connection(target: dict[str, Any], seconds: float) -> ConnectionProbe:
    address, port = str(target["address"]), int(target["port"])
    outcome, detail, rtt = ConnectionOutcome.OK, "", None
    try:
        with socket.create_connection((address, port), timeout=seconds / 2) as connection:
            if target["is_ours"]:
                outcome = ConnectionOutcome.STALLED  # until data came through
                rtt = _ping(address, port, seconds=seconds / 4)
                _check(connection, seconds=seconds / 4)
                outcome = ConnectionOutcome.OK
    except OSError as error:
        detail = str(error)
        if outcome is not ConnectionOutcome.STALLED:
            detail = os.strerror(error.errno) if error.errno else detail
            outcome = ConnectionOutcome.TIMEOUT
            if isinstance(error, ConnectionRefusedError):
                outcome = ConnectionOutcome.REFUSED
            elif error.errno in _UNREACHABLE:
                outcome = ConnectionOutcome.UNREACHABLE
    return ConnectionProbe(
        node=target["node"],
        address=address,
        port=port,
        outcome=outcome,
        detail=detail,
        rtt_seconds=rtt,
    )


def _ping(address: str, port: int, *, seconds: float) -> float:
    """The shortest round trip of a few bytes."""
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
    """Data in both directions, each acknowledged by the program on the other node."""
    connection.settimeout(seconds)
    connection.sendall(CHECK + bytes(CHECK_BYTES))
    for num_bytes, problem in (
        (1, "data sent there was not acknowledged"),
        (CHECK_BYTES, "data sent back did not arrive"),
    ):
        try:
            if not receive(connection, num_bytes):
                raise ConnectionError("the connection was closed")
        except TimeoutError:
            raise TimeoutError(problem) from None
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
                with suppress(OSError):  # without a route nothing is received, which shows it
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
    """Bytes acknowledged, and the fraction of segments that were sent again."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (acked,) = struct.unpack_from("=Q", info, _ACKED_AT)
        (resent,) = struct.unpack_from("=I", info, _RESENT_AT)
        (sent,) = struct.unpack_from("=I", info, _SENT_AT)
    except (OSError, struct.error):
        return None, 0.0
    return acked, resent / sent if sent else 0.0


def _in_parallel(run: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    if not items:
        return []
    with ThreadPoolExecutor(max_workers=min(len(items), 64)) as pool:
        return list(pool.map(run, items))


# The shared folder: files seen, renamed, and raced for by all nodes.

POLL_SECONDS = 0.02
FIRST, RENAMED, GROWN = "first", "renamed", "grown"
EXCLUSIVE, LINKED = "exclusive", "linked"
"""Names that exactly one of all nodes may create."""


def take_folder_step(
    *, step: str, folder: str, nonce: str, names: list[str], seconds: float
) -> FolderStep:
    """`plant` and `grow` are the first node's steps, `find` and `see_grown` the others'.

    The steps that wait for another node's file end after `seconds`.
    """
    path = Path(folder)
    begin = time.monotonic()
    won: list[str] = []
    wrote = ""

    def see_first() -> bool:
        list(path.parent.iterdir())  # makes a network file system look again
        return (path / FIRST).read_text() == nonce and (path / GROWN).stat().st_size > 0

    def see_renamed() -> bool:
        list(path.iterdir())
        return all((path / f"{RENAMED}-{name}").read_text() == nonce for name in names)

    def see_grown() -> bool:
        return (path / GROWN).stat().st_size == 2 * len(nonce)

    problem = ""
    try:
        if step == "plant":
            path.mkdir()
            _write(path / FIRST, nonce)
            _write(path / GROWN, nonce)
        elif step == "race":
            wrote = uuid.uuid4().hex
            won = _race(path, path / wrote, nonce)
        elif step == "grow":
            _write(path / GROWN, nonce * 2)
        elif step == "remove":
            shutil.rmtree(path, ignore_errors=True)
        elif step == "find" and not path.parent.is_dir():
            problem = "there is no such folder"
        else:
            sights = {"find": see_first, "see_renamed": see_renamed, "see_grown": see_grown}
            problem = _wait_until(sights[step], seconds)
    except OSError as error:
        problem = error.strerror or str(error)
    took = time.monotonic() - begin
    return FolderStep(
        is_done=not problem, seconds=took, detail=problem, won=tuple(won), wrote=wrote
    )


def _race(folder: Path, own: Path, nonce: str) -> list[str]:
    """Create exclusively, link, and rename a file of one's own; returns the names won."""

    def create(_own: Path, name: Path) -> None:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    won = []
    _write(own, nonce)
    for name, attempt in ((EXCLUSIVE, create), (LINKED, os.link)):
        try:
            attempt(own, folder / name)
            won.append(name)
        except FileExistsError:
            continue
    own.rename(folder / f"{RENAMED}-{own.name}")
    return won


def _write(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _wait_until(is_there: Callable[[], bool], seconds: float) -> str:
    """Poll; returns why it is not there after that time, or nothing."""
    end = time.monotonic() + seconds
    problem = "what others write there does not appear"
    while time.monotonic() < end:
        try:
            if is_there():
                return ""
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(POLL_SECONDS)
    return problem


# The process: torch in a child of its own, every request in a thread.

MAX_LIFE_SECONDS = 180.0


class TorchProcess:
    """torch in its own process: it may hang, and is then ended with the agent."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._facts: Message | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        module = "tightfit.clusters.preflight.collective"
        self._child = ChildProcess([sys.executable, *module_words(module)])
        self._answers = iter(self._child)

    def facts(self) -> Message:
        with self._lock:
            if self._facts is None:
                self._facts = self._next_answer()
            return self._facts

    def reduce(self, **request: Any) -> Message:
        self.facts()
        assert self._child is not None
        self._child.send(request)
        return self._next_answer()

    def end(self) -> None:
        if self._child is not None:
            self._child.end(seconds=0.0)

    def _next_answer(self) -> Message:
        if self._child is None:
            self.start()
        assert self._child is not None
        for message in self._answers:
            return message
        raise OSError(f"torch's process ended with {self._child.wait()}: {self._child.last_line}")


def main() -> int:
    send = open_output()
    torch, listener = TorchProcess(), Listener()

    def leave() -> None:
        torch.end()
        os._exit(0)

    life = threading.Timer(MAX_LIFE_SECONDS, leave)
    life.daemon = True
    life.start()
    send({"hello": "tightfit", "protocol": PROTOCOL, "version": __version__})
    handlers: dict[str, Callable[..., Any]] = {
        "facts": probe_facts,
        "clock": time.time,
        "lookup": resolve_names,
        "routes": find_routes,
        "open": listener.open,
        "close_port": listener.close_rendezvous,
        "connect": probe_connections,
        "datagrams": send_datagrams,
        "received": listener.count_received,
        "stream": send_stream,
        "torch_start": torch.start,
        "torch": torch.facts,
        "reduce": torch.reduce,
        "folder": take_folder_step,
    }
    serve_requests(handlers, send)
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
