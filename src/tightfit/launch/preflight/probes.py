"""The asking side of a node under test: names, routes, connections, datagrams, streams."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from tightfit.launch.preflight.datagrams import DATAGRAM, MARK
from tightfit.launch.preflight.doors import (
    CHECK,
    CHECK_BYTES,
    PING,
    PING_BYTES,
    SINK,
    receive,
)
from tightfit.launch.preflight.facts import probe_devices
from tightfit.launch.preflight.messages import Knock, Lookup, Outcome, Route, Stream

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


def look_up(names: Sequence[str]) -> list[Lookup]:
    """All at once: a resolver that does not answer costs its time only once."""
    return _at_once(_look_up, names)


def _look_up(name: str) -> Lookup:
    begin = time.monotonic()
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as fault:
        why = getattr(fault, "strerror", None) or str(fault)
        return Lookup(name=name, seconds=time.monotonic() - begin, fault=why)
    addresses = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
    return Lookup(name=name, addresses=tuple(addresses), seconds=time.monotonic() - begin)


def find_routes(addresses: Sequence[str]) -> list[Route]:
    """By the kernel's own choice: a datagram socket is connected, nothing is sent."""
    names = {
        address.partition("/")[0]: device.name
        for device in probe_devices()
        for address in device.addresses
    }
    return _at_once(lambda address: _find_route(address, names), addresses)


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


def knock_at(targets: Sequence[dict[str, Any]], seconds: float) -> list[Knock]:
    """Connect to each of them; with `is_ours` also send data there and back."""
    return _at_once(lambda target: _knock(target, seconds), targets)


def _knock(target: dict[str, Any], seconds: float) -> Knock:
    begin = time.monotonic()
    address, port = str(target["address"]), int(target["port"])
    outcome, detail, rtt = Outcome.OK, "", None
    try:
        connection = socket.create_connection((address, port), timeout=seconds / 2)
    except OSError as fault:
        outcome, detail = _judge(fault), os.strerror(fault.errno) if fault.errno else str(fault)
    else:
        with connection:
            if target["is_ours"]:
                try:
                    rtt = _ping(address, port, seconds=seconds / 4)
                    _check(connection, seconds=seconds / 4)
                except OSError as fault:
                    outcome, detail = Outcome.STALLED, str(fault)
    return Knock(
        node=target["node"],
        address=address,
        port=port,
        outcome=outcome,
        detail=detail,
        seconds=time.monotonic() - begin,
        rtt_seconds=rtt,
    )


def _judge(fault: OSError) -> Outcome:
    if isinstance(fault, ConnectionRefusedError):
        return Outcome.REFUSED
    if fault.errno and os.strerror(fault.errno) in _UNREACHABLE:
        return Outcome.UNREACHABLE
    return Outcome.TIMEOUT


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


def spray(targets: Sequence[dict[str, Any]], *, sender: int, num_small: int, num_large: int) -> int:
    """Datagrams at a slow, even pace to each target; how many could be sent to each."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _PROBE)
        small = DATAGRAM.pack(MARK, sender, 0).ljust(SMALL_BYTES, b".")
        begin, sent = time.monotonic(), 0
        for number in range(num_small):
            for target in targets:
                with suppress(OSError):  # without a route nothing is heard, which tells it
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


def send_stream(*, node: str, address: str, port: int, seconds: float) -> Stream:
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
    except OSError as fault:
        return Stream(node=node, bytes_per_second=0.0, fault=str(fault))
    num_bytes = sent if acked is None else min(acked, sent)
    return Stream(node=node, bytes_per_second=num_bytes / took, resent_fraction=resent)


def _read_tcp_info(connection: socket.socket) -> tuple[int | None, float]:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (acked,) = struct.unpack_from("=Q", info, _ACKED_AT)
        (resent,) = struct.unpack_from("=I", info, _RESENT_AT)
        (out,) = struct.unpack_from("=I", info, _SENT_AT)
    except (OSError, struct.error):
        return None, 0.0
    return acked, resent / out if out else 0.0


def _at_once(run: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    if not items:
        return []
    with ThreadPoolExecutor(max_workers=min(len(items), 64)) as pool:
        return list(pool.map(run, items))
