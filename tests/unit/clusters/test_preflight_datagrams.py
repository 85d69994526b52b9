"""Datagrams are counted however late the counter is, and apart from those it had no room for."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tightfit.clusters.preflight import agent
from tightfit.clusters.preflight.agent import DATAGRAM, MARK, ROOM_BYTES, DatagramCounter
from tightfit.clusters.preflight.observations import DatagramCount

NUM_SENT = 200


@contextmanager
def late_counter(room_bytes: int = ROOM_BYTES) -> Iterator[DatagramCounter]:
    """One whose thread gets no CPU at all."""
    counter = DatagramCounter(room_bytes=room_bytes)
    with counter.socket:
        yield counter


def send_to(counter: DatagramCounter, *, sender: int, is_large: bool = False) -> None:
    data = DATAGRAM.pack(MARK, sender, is_large).ljust(160, b".")
    address = ("127.0.0.1", counter.socket.getsockname()[1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.sendto(b"of somebody else", address)
        for _ in range(NUM_SENT):
            out.sendto(data, address)


def tell_when_there(counter: DatagramCounter, sender: int) -> DatagramCount:
    """Once all has arrived, which a busy machine may put off."""
    end = time.monotonic() + 10
    while True:
        [received] = counter.count([sender])
        num_there = received.num_small + received.num_large + received.num_dropped
        if num_there >= NUM_SENT or time.monotonic() > end:
            return received
        time.sleep(0.05)


def test_all_that_came_is_counted_though_the_thread_has_not_run() -> None:
    with late_counter() as counter:
        send_to(counter, sender=3)
        send_to(counter, sender=5, is_large=True)

        assert tell_when_there(counter, 3) == DatagramCount(
            sender=3, num_small=NUM_SENT, num_large=0
        )
        assert tell_when_there(counter, 5) == DatagramCount(
            sender=5, num_small=0, num_large=NUM_SENT
        )
        assert counter.count([4]) == [DatagramCount(sender=4, num_small=0, num_large=0)]


def test_what_found_no_room_is_told_apart() -> None:
    with late_counter(room_bytes=4096) as counter:
        send_to(counter, sender=0)
        received = tell_when_there(counter, 0)

    assert received.num_dropped > 0
    assert NUM_SENT <= received.num_small + received.num_dropped <= NUM_SENT + 1


def test_a_wrong_checksum_is_no_want_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts both as drops of the socket, the want of room alone as the host's."""
    monkeypatch.setattr(agent, "_read_host_overflows", lambda: 7)
    with late_counter(room_bytes=4096) as counter:
        send_to(counter, sender=0)

        assert counter.count([0])[0].num_dropped == 0


def test_a_socket_that_never_runs_dry_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "DRAIN_SECONDS", 0.0)
    with late_counter() as counter:
        send_to(counter, sender=0)

        assert counter.count([0]) == [DatagramCount(sender=0, num_small=0, num_large=0)]
