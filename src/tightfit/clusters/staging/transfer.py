"""Blocks over TCP from one node to the next, authenticated by a token; chains and trees."""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from tightfit.clusters.staging.store import DIGEST_BYTES, NUM_THREADS, Block, Store, digest_block
from tightfit.core.errors import UserError

CONNECT_SECONDS = 20.0
SILENCE_SECONDS = 60.0
"""A neighbour that says nothing for so long is gone."""
_GREETING_SECONDS = 5.0
_HEADER = struct.Struct(f"!II{DIGEST_BYTES}s")
_END = 0xFFFFFFFF
_WELCOME = b"ok"
_TOKEN_CHARS = 32
_PIECE_BYTES = 1 << 18


def make_token() -> str:
    return secrets.token_hex(_TOKEN_CHARS // 2)


def listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4)


def accept(server: socket.socket, token: str) -> socket.socket:
    """The one that knows the word; others are turned away and do not hinder it."""
    end = time.monotonic() + CONNECT_SECONDS
    while (left := end - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            caller, _ = server.accept()
        except TimeoutError:
            break
        try:
            caller.settimeout(_GREETING_SECONDS)
            if hmac.compare_digest(bytes(_receive(caller, _TOKEN_CHARS)), token.encode()):
                caller.sendall(_WELCOME)
                _prepare(caller)
                return caller
        except OSError:
            pass
        caller.close()
    raise ConnectionError("no neighbour has connected")


def connect(address: str, port: int, token: str) -> socket.socket:
    """A connection to a neighbour that has let us in."""
    link = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    try:
        link.sendall(token.encode())
        if _receive(link, len(_WELCOME)) != _WELCOME:
            raise ConnectionError("the neighbour did not know us")
    except BaseException:
        link.close()
        raise
    _prepare(link)
    return link


def _prepare(link: socket.socket) -> None:
    link.settimeout(SILENCE_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_block(link: socket.socket, block: Block) -> None:
    link.sendall(_HEADER.pack(block.index, len(block.data), block.digest))
    link.sendall(block.data)


def send_end(link: socket.socket) -> None:
    link.sendall(_HEADER.pack(_END, 0, bytes(DIGEST_BYTES)))


def receive_blocks(link: socket.socket, *, block_bytes: int) -> Iterator[Block]:
    """Until the neighbour says that there are no more; ConnectionError where it just stops."""
    while True:
        index, size, digest = _HEADER.unpack(_receive(link, _HEADER.size))
        if index == _END:
            return
        if size > block_bytes:
            raise ConnectionError("the neighbour sent something that is no block")
        yield Block(index=index, data=_receive(link, size), digest=digest)


def _receive(link: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    done = 0
    while done < num_bytes:
        got = link.recv_into(view[done:])
        if got == 0:
            raise ConnectionError("the neighbour has gone")
        done += got
    return data


def send_for(link: socket.socket, seconds: float, most_bytes: int) -> None:
    """Bytes that mean nothing, to see how fast they go."""
    piece = secrets.token_bytes(_PIECE_BYTES)
    end, sent = time.monotonic() + seconds, 0
    while time.monotonic() < end and sent < most_bytes:
        link.sendall(piece)
        sent += len(piece)
    link.shutdown(socket.SHUT_WR)


def measure_arrival(link: socket.socket) -> tuple[int, float]:
    """Bytes and seconds from the first piece to the last, as the receiver sees them."""
    buffer = bytearray(_PIECE_BYTES)
    first = link.recv_into(buffer)
    began = last = time.monotonic()
    total = 0
    while first and (got := link.recv_into(buffer)):
        total += got
        last = time.monotonic()
    return total, max(last - began, 1e-6)


# A node's part in a chain or tree: take blocks, keep what it lacks, pass all on at once.

_QUEUED_BLOCKS = 4
"""Per child: enough to keep a link busy while the next block arrives."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the blocks that passed."""

    num_bytes: int = 0
    bad: list[int] = field(default_factory=list)
    """Arrived with other contents than they were sent with; not kept."""


class _Child:
    """A neighbour further down, fed by its own thread; if it dies, the rest continues."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._waiting: queue.Queue[Block | None] = queue.Queue(_QUEUED_BLOCKS)
        self._is_cut = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, block: Block) -> None:
        self._waiting.put(block)

    def end(self, *, is_cut: bool) -> None:
        """No more blocks come; a stream that was cut off must not look like an end."""
        self._is_cut = is_cut
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_lost = False
        with self._link:
            while (block := self._waiting.get()) is not None:
                if not is_lost:  # else only make room in the queue
                    try:
                        send_block(self._link, block)
                    except OSError:
                        is_lost = True
            if not is_lost and not self._is_cut:
                with suppress(OSError):
                    send_end(self._link)


class Relay:
    """One pass of blocks through this node."""

    def __init__(self, store: Store, links: Sequence[socket.socket], *, is_trusted: bool) -> None:
        self._store = store
        self._children = [_Child(link) for link in links]
        self._is_trusted = is_trusted
        """The digests were made here, of these very bytes."""
        self._error: UserError | None = None
        self._slots = threading.Semaphore(2 * NUM_THREADS)
        self._lock = threading.Lock()
        self.tally = Tally()

    def run(self, blocks: Iterator[Block]) -> Tally:
        """Until the blocks end, or stop coming; raises only where nothing more can be kept."""
        is_cut = False
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            try:
                for block in blocks:
                    for child in self._children:
                        child.put(block)
                    self._slots.acquire()
                    pool.submit(self._keep, block)
                    if self._error is not None:
                        break
            except OSError:
                is_cut = True
            except UserError as error:
                self._error = error
        for child in self._children:
            child.end(is_cut=is_cut or self._error is not None)
        if self._error is not None:
            raise self._error
        return self.tally

    def _keep(self, block: Block) -> None:
        try:
            layout = self._store.layout
            is_sound = self._is_trusted or (
                block.index < layout.num_blocks
                and layout.locate(block.index).num_bytes == len(block.data)
                and digest_block(block.data) == block.digest
            )
            if not is_sound:
                self.tally.bad.append(block.index)
            elif block.index not in self._store.digests:
                self._store.write(block.index, memoryview(block.data), block.digest)
                with self._lock:
                    self.tally.num_bytes += len(block.data)
        except UserError as error:
            self._error = error
        finally:
            self._slots.release()
