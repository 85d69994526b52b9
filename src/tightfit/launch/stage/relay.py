"""A node's part in a chain or tree: take blocks, keep what it lacks, pass all on at once."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tightfit.core.errors import UserError
from tightfit.launch.stage.blocks import digest_block
from tightfit.launch.stage.source import Block
from tightfit.launch.stage.store import NUM_THREADS, Store
from tightfit.launch.stage.wire import send_block, send_end

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
        self._fault: UserError | None = None
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
                    if self._fault is not None:
                        break
            except OSError:
                self.tally.is_cut = True
            except UserError as fault:
                self._fault = fault
        is_cut = self.tally.is_cut or self._fault is not None
        for child in self._children:
            child.end(is_cut=is_cut)
        self.tally.num_lost = sum(child.is_lost for child in self._children)
        if self._fault is not None:
            raise self._fault
        return self.tally

    def _keep(self, block: Block) -> None:
        try:
            if not self._is_trusted and not self._is_sound(block):
                self.tally.bad.append(block.index)
            elif block.index not in self._store.digests:
                self._store.write(block.index, memoryview(block.data), block.digest)
                with self._lock:
                    self.tally.num_bytes += len(block.data)
        except UserError as fault:
            self._fault = fault
        finally:
            self._slots.release()

    def _is_sound(self, block: Block) -> bool:
        layout = self._store.layout
        return (
            block.index < layout.num_blocks
            and layout.locate(block.index).num_bytes == len(block.data)
            and digest_block(block.data) == block.digest
        )
