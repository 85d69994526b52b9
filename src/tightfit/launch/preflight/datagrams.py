"""Counts datagrams by sender, apart from those that its own socket had no room for."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tightfit.launch.preflight.messages import Heard

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
        self._heard: Counter[tuple[int, bool]] = Counter()
        self._turn = threading.Lock()
        self._overflows_before = _read_host_overflows()
        self.door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
        self.door.bind(("", 0))

    def start(self) -> None:
        threading.Thread(target=self._count, daemon=True).start()

    def tell(self, senders: Sequence[int]) -> list[Heard]:
        """Of each sender, none left out, once all that has reached this host is counted."""
        self._drain()  # the thread may be late on a busy node
        num_dropped = self._count_drops()
        return [
            Heard(
                sender=sender,
                num_small=self._heard[(sender, False)],
                num_large=self._heard[(sender, True)],
                num_dropped=num_dropped,
            )
            for sender in senders
        ]

    def _count(self) -> None:
        with suppress(OSError):
            while True:
                self.door.recv(1, socket.MSG_PEEK)  # waits, and leaves it there
                self._drain()

    def _drain(self) -> None:
        """In turns, so that whoever comes after finds counted what the other has read."""
        with self._turn, suppress(BlockingIOError):
            end = time.monotonic() + DRAIN_SECONDS
            while time.monotonic() < end:
                data = self.door.recv(65_536, socket.MSG_DONTWAIT)
                if len(data) >= DATAGRAM.size:
                    mark, sender, is_large = DATAGRAM.unpack_from(data)
                    if mark == MARK:
                        self._heard[(sender, bool(is_large))] += 1

    def _count_drops(self) -> int:
        """Datagrams that arrived and found no room, whoever sent them.

        The kernel's count of a socket has those with a wrong checksum in it, which are the
        network's fault; that of the host has not, but has those of every other socket.
        """
        try:
            told = self.door.getsockopt(socket.SOL_SOCKET, _MEMINFO, _MEMINFO_FIELDS.size)
            at_socket = int(_MEMINFO_FIELDS.unpack(told)[-1])
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
