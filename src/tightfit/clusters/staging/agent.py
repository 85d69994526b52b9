"""`python -m tightfit.clusters.staging.agent`: one node's side of a staging.

It ends at once when stdin closes: whatever it was doing, the next start continues from there.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tightfit.clusters.agents import Handlers, serve_requests
from tightfit.clusters.nodes import probe_address
from tightfit.clusters.staging import transfer
from tightfit.clusters.staging.home import (
    clean_home,
    find_home,
    find_shortage,
    is_still_fresh,
    list_copies,
    lock_model,
    make_home,
    read_free_space,
    remove_litter,
)
from tightfit.clusters.staging.store import (
    NUM_THREADS,
    BlockSource,
    Store,
    digest_block,
    from_ranges,
    read_ahead,
    to_ranges,
)
from tightfit.clusters.staging.transfer import Relay
from tightfit.core.child_process import open_output
from tightfit.runtime.staged import Manifest, remember_place

Answer = dict[str, Any]
Ranges = list[list[int]]
"""Blocks as `[first, past the last]` of each run."""
REQUESTS = ("hello", "look", "read", "listen", "probe", "relay", "check", "drop", "finish", "list",
            "clean")  # fmt: skip
_TICK_SECONDS = 1.0
_HASHED_BYTES = 1 << 23


class Agent:
    """The requests that a node answers. They come one after the other, `look` first."""

    store: Store
    source: BlockSource

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._token = ""
        self._locks = ExitStack()
        self._open_files = ExitStack()
        self._is_dry = False

    @property
    def num_stored_bytes(self) -> int:
        return self.store.num_stored_bytes if hasattr(self, "store") else 0

    @property
    def handlers(self) -> Handlers:
        return {name: getattr(self, name) for name in REQUESTS}

    def hello(self) -> Answer:
        return {"host": socket.gethostname()}

    def look(
        self,
        *,
        wanted: dict[str, Any],
        to: str,
        leave_bytes: int | None = None,
        verify: bool = False,
        is_dry: bool = False,
    ) -> Answer:
        """Lock the model on this node; report what is there of it, and whether the rest fits.

        Blocks that an earlier staging left are read back: those that changed since are dropped.
        """
        manifest = Manifest.model_validate(wanted)
        home = find_home(Path(to))
        if not is_dry:
            self._locks.enter_context(lock_model(make_home(home), manifest.key))
        self._is_dry = is_dry
        store = self.store = Store(home, manifest)
        self.source = BlockSource(manifest)
        self._open_files.callback(store.close)
        self._open_files.callback(self.source.close)
        bad = store.find_bad() if verify or not store.is_whole else []
        if bad and not is_dry:
            store.drop(bad)
        began = time.monotonic()
        digest_block(bytes(_HASHED_BYTES))
        hash_seconds = max(time.monotonic() - began, 1e-6)
        return {
            "is_whole": store.is_whole and not bad,
            "have": to_ranges(set(store.digests) - set(bad)),
            "bad": len(bad),
            "can_read": is_still_fresh(manifest),
            "shortage": self._find_shortage(leave_bytes),
            "host": socket.gethostname(),
            "path": str(store.path),
            "check_rate": NUM_THREADS * _HASHED_BYTES / hash_seconds,
        }

    def _find_shortage(self, leave_bytes: int | None) -> str | None:
        """Why the copy does not fit; useless files that are in its way are removed first."""
        store = self.store
        needed = store.layout.measure(store.missing)
        if self._is_dry:
            needed = max(0, needed - store.num_stale_bytes)
            return find_shortage(read_free_space(store.home), needed, leave_bytes=leave_bytes)
        store.remove_stale()
        shortage = find_shortage(read_free_space(store.home), needed, leave_bytes=leave_bytes)
        if shortage is not None and clean_home(store.home, only_partial=True):
            # Parts of other models that nobody is at work on: they can be fetched again.
            shortage = find_shortage(read_free_space(store.home), needed, leave_bytes=leave_bytes)
        if shortage is not None:
            self._locks.close()
            remove_litter(store.home)
        return shortage

    def read(
        self,
        *,
        blocks: Ranges,
        first: int = 0,
        seconds: float | None = None,
        most_blocks: int | None = None,
    ) -> Answer:
        """Copy blocks from the source, from number `first` on and around; for a bounded time."""
        indices = sorted(from_ranges(blocks))
        start = next((place for place, index in enumerate(indices) if index >= first), 0)
        indices = (indices[start:] + indices[:start])[:most_blocks]
        began = time.monotonic()
        until = None if seconds is None else began + seconds
        found = read_ahead(self.source.read, indices, until=until)
        if self._is_dry:
            num_bytes = sum(len(block.data) for block in found)
        else:
            self.store.begin()
            num_bytes = Relay(self.store, (), is_trusted=True).run(found).num_bytes
        return {
            "num_bytes": num_bytes,
            "seconds": time.monotonic() - began,
            "have": to_ranges(self.store.digests),
        }

    def listen(self, *, token: str, interface: str | None, peer: str) -> Answer:
        """Wait for a neighbour that knows the token; reports where."""
        if self._server is not None:
            self._server.close()
        address, _ = probe_address(peer, interface, may_guess=True)
        self._server, self._token = transfer.listen(address), token
        return {"address": address, "port": self._server.getsockname()[1]}

    def _accept(self) -> socket.socket:
        """The connection from the node before; nobody else is let in after it."""
        assert self._server is not None, "listen comes first"
        with self._server as server:
            self._server = None
            return transfer.accept(server, self._token)

    def probe(self, *, takes: bool, send_to: list[Any] | None, seconds: float) -> Answer:
        """Send to the next node and receive from the one before, both at once, as a chain does."""
        reply: Answer = {}

        def receive() -> None:
            try:
                with self._accept() as link:
                    reply["num_bytes"], reply["seconds"] = transfer.measure_arrival(link)
            except OSError as error:
                reply["lost"] = str(error)

        receiver = threading.Thread(target=receive, daemon=True)
        if takes:
            receiver.start()
        if send_to is not None:
            try:
                with transfer.connect(*send_to) as link:
                    transfer.send_for(link, seconds, most_bytes=1 << 32)
            except OSError as error:
                reply["unreached"] = str(error)
        if takes:
            receiver.join()
        return reply

    def relay(
        self, *, takes: bool, send_to: list[list[Any]], blocks: Ranges | None = None
    ) -> Answer:
        """Be one node of a chain or tree; the first one reads, the others receive."""
        self.store.begin()
        links = []
        with ExitStack() as stack:
            found = read_ahead(self._read_anywhere, sorted(from_ranges(blocks or [])))
            if takes:
                try:
                    above = stack.enter_context(self._accept())
                except OSError:
                    return {"num_bytes": 0, "bad": 0}
                found = transfer.receive_blocks(above, block_bytes=self.store.layout.block_bytes)
            for address in send_to:
                try:
                    links.append(transfer.connect(*address))
                except OSError:
                    continue  # its node is lost, which shows when it is asked next
            tally = Relay(self.store, links, is_trusted=not takes).run(found)
        return {"num_bytes": tally.num_bytes, "bad": len(tally.bad)}

    def _read_anywhere(self, index: int) -> bytes:
        """From the copy where the block is there already and sound, else from the source."""
        digest = self.store.digests.get(index)
        if digest is not None:
            data = self.store.read(index)
            if digest_block(data) == digest:
                return data
        return self.source.read(index)

    def check(self, *, detail: bool = False) -> Answer:
        """Read the copy back; blocks that are not what was written are dropped."""
        if not detail and not self.store.is_whole:
            self.store.drop(self.store.find_bad())
        reply = {
            "missing": len(self.store.missing),
            "have": to_ranges(self.store.digests),
            "root": self.store.root(),
        }
        if detail:
            reply["digests"] = [digest.hex() for _, digest in sorted(self.store.digests.items())]
        return reply

    def drop(self, *, blocks: Ranges) -> Answer:
        self.store.drop(from_ranges(blocks))
        return {"have": to_ranges(self.store.digests)}

    def finish(self) -> Answer:
        """Give the copy its name and remember where it is."""
        remember_place(self.store.home.parent)  # first: a copy that is there is found
        return {"path": str(self.store.finish())}

    def list(self, *, to: str) -> Answer:
        return {"host": socket.gethostname(), "copies": list_copies(find_home(Path(to)))}

    def clean(self, *, to: str, key: str | None) -> Answer:
        home = find_home(Path(to))
        removed = clean_home(home, key)
        busy = [copy.key for copy in list_copies(home) if key in (None, copy.key)]
        return {"host": socket.gethostname(), "removed": removed, "busy": busy}

    def close(self) -> None:
        self._open_files.close()
        if self._server is not None:
            self._server.close()
        self._locks.close()


def main() -> int:
    agent = Agent()
    send = open_output()

    def tick() -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            send({"progress": agent.num_stored_bytes})

    threading.Thread(target=tick, daemon=True).start()
    serve_requests(agent.handlers, send)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
