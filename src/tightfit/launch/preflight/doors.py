"""The listening side of a node under test: echoes, takes streams, counts datagrams."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import psutil

from tightfit.launch.preflight.datagrams import DatagramCounter
from tightfit.launch.preflight.messages import Doors, Heard

IDLE_SECONDS = 30.0
CHECK_BYTES = 256 * 1024
"""More than fits into one packet of any network, so that a narrow spot on the way shows."""
PING, CHECK, SINK = b"P", b"C", b"S"
PING_BYTES = 64


class Listener:
    """Opens the doors of a node and serves who comes in, until the process ends."""

    def __init__(self) -> None:
        self._datagrams: DatagramCounter | None = None
        self._rendezvous: socket.socket | None = None

    def open(self, rendezvous_port: int | None) -> Doors:
        tcp = _listen(0)
        self._datagrams = DatagramCounter()
        _in_thread(self._serve, tcp)
        self._datagrams.start()
        fault = None
        if rendezvous_port is not None:
            fault = self._open_rendezvous(rendezvous_port)
        return Doors(
            tcp_port=tcp.getsockname()[1],
            udp_port=self._datagrams.door.getsockname()[1],
            rendezvous_fault=fault,
        )

    def _open_rendezvous(self, port: int) -> str | None:
        try:
            self._rendezvous = _listen(port)
        except OSError as fault:
            if fault.errno == errno.EADDRINUSE:
                return f"is taken by {_name_holder(port)}"
            return f"cannot be opened: {os.strerror(fault.errno or 0)}"
        _in_thread(self._serve, self._rendezvous)
        return None

    def close_rendezvous(self) -> None:
        """Free it for the one that is to open it in earnest."""
        if self._rendezvous is not None:
            with suppress(OSError):
                self._rendezvous.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._rendezvous.close()
            self._rendezvous = None

    def tell_heard(self, senders: Sequence[int]) -> list[Heard]:
        return self._datagrams.tell(senders) if self._datagrams else []

    def _serve(self, door: socket.socket) -> None:
        while True:
            try:
                guest, _ = door.accept()
            except OSError:
                return
            _in_thread(_answer, guest)


def _listen(port: int) -> socket.socket:
    """On every address of the host, as torch's store does."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return _bind(socket.AF_INET6, port)
    return _bind(socket.AF_INET, port)


def _bind(family: int, port: int) -> socket.socket:
    is_dual = family == socket.AF_INET6
    return socket.create_server(("", port), family=family, backlog=256, dualstack_ipv6=is_dual)


def _answer(guest: socket.socket) -> None:
    """One connection: what its first byte asks for."""
    with guest, suppress(OSError):
        guest.settimeout(IDLE_SECONDS)
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wish = guest.recv(1)
        if wish == PING:
            while data := receive(guest, PING_BYTES):
                guest.sendall(data)
        elif wish == CHECK:
            receive(guest, CHECK_BYTES)
            guest.sendall(CHECK)
            guest.sendall(bytes(CHECK_BYTES))
            receive(guest, 1)
        elif wish == SINK:
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
    """The process that listens there, where it may be seen."""
    with suppress(psutil.Error, OSError):
        for held in psutil.net_connections(kind="tcp"):
            is_it = held.laddr and held.laddr.port == port and held.status == psutil.CONN_LISTEN
            if is_it and held.pid:
                return f"{psutil.Process(held.pid).name()} (pid {held.pid})"
    return "another process"


def _in_thread(run: object, *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, daemon=True).start()  # type: ignore[arg-type]
