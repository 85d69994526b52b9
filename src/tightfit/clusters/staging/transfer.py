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
from dataclasses import dataclass, field

import psutil

from tightfit.clusters.staging.blocks import DIGEST_BYTES, Block, digest_block
from tightfit.clusters.staging.store import NUM_THREADS, Store
from tightfit.core.errors import SetupError, UserError

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


def choose_address(interface: str | None, peer: str | None) -> str:
    """This node's address towards the others: the interface's, or the way to a named peer."""
    if interface is not None:
        return _address_of(interface)
    if peer is not None:
        try:
            family, kind, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # a datagram socket only looks up its route
                found = str(probe.getsockname()[0])
        except OSError:
            found = ""
        if found and not found.startswith("127.") and found != "::1":
            return found
    for name, facts in psutil.net_if_stats().items():
        if facts.isup and name != "lo" and not name.startswith(("docker", "virbr", "veth", "cni")):
            for entry in psutil.net_if_addrs().get(name, ()):
                if entry.family == socket.AF_INET:
                    return str(entry.address)
    raise SetupError(
        f"{socket.gethostname()} has no network address that other nodes could reach.",
        remedy="name the network device between nodes: --interface eth0",
    )


def _address_of(interface: str) -> str:
    entries = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries.get(interface, ()):
            if entry.family == family:
                return str(entry.address)
    raise SetupError(
        f"{socket.gethostname()} has no network device {interface} with an address.",
        remedy=f"--interface with one of {', '.join(sorted(set(entries) - {'lo'}))}",
    )


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
    is_cut: bool = False
    """The blocks stopped coming before their end."""
    num_lost: int = 0
    """Children that went away."""


class _Child:
    """A neighbour further down, fed by a thread of its own; where it dies, the rest goes on."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._waiting: queue.Queue[Block | None] = queue.Queue(_QUEUED_BLOCKS)
        self.is_lost = False
        self._is_cut = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, block: Block | None) -> None:
        self._waiting.put(block)

    def end(self, *, is_cut: bool) -> None:
        """The last block was given; one that was cut off must not look like an end."""
        self._is_cut = is_cut
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (block := self._waiting.get()) is not None:
            if not self.is_lost:
                self._try(block)
        if not self.is_lost and not self._is_cut:
            self._try(None)
        self._link.close()

    def _try(self, block: Block | None) -> None:
        try:
            if block is None:
                send_end(self._link)
            else:
                send_block(self._link, block)
        except OSError:
            self.is_lost = True


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
                self.tally.is_cut = True
            except UserError as error:
                self._error = error
        is_cut = self.tally.is_cut or self._error is not None
        for child in self._children:
            child.end(is_cut=is_cut)
        self.tally.num_lost = sum(child.is_lost for child in self._children)
        if self._error is not None:
            raise self._error
        return self.tally

    def _keep(self, block: Block) -> None:
        try:
            if not self._is_trusted and not self._is_sound(block):
                self.tally.bad.append(block.index)
            elif block.index not in self._store.digests:
                self._store.write(block.index, memoryview(block.data), block.digest)
                with self._lock:
                    self.tally.num_bytes += len(block.data)
        except UserError as error:
            self._error = error
        finally:
            self._slots.release()

    def _is_sound(self, block: Block) -> bool:
        layout = self._store.layout
        return (
            block.index < layout.num_blocks
            and layout.locate(block.index).num_bytes == len(block.data)
            and digest_block(block.data) == block.digest
        )
