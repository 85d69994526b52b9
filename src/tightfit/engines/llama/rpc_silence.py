"""A host of `--hosts` that is gone without a word, as when it loses power or its cable."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

IDLE_SECONDS, INTERVAL_SECONDS, NUM_PROBES = 10, 5, 4
"""A host is given up after 30 seconds; one that computes is not silent to the kernel."""


def notice_silence(hosts: tuple[str, ...]) -> None:
    """Have the kernel end a connection that nobody answers; llama.cpp would wait for ever.

    llama.cpp's sockets are found by whom they are connected with.
    """
    if sys.platform != "linux":
        return
    peers = {_resolve(host) for host in hosts}
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            is_socket = stat.S_ISSOCK(entry.stat().st_mode)
        except OSError:  # closed since, as the folder's own
            continue
        if is_socket:
            _watch(int(entry.name), peers)


def _watch(number: int, peers: set[tuple[str, int]]) -> None:
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


def _resolve(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return socket.gethostbyname(host), int(port)
