"""`python -m tightfit.clusters.staging.agent`: one node's side of a staging, reply what to do by
lines.

Each line of stdin is a request in JSON, each line of stdout an answer. It ends at once when stdin
closes: whatever it was doing, the next start goes on from there.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tightfit.clusters.agents import open_answers, read_requests
from tightfit.clusters.staging import transfer
from tightfit.clusters.staging.blocks import (
    Block,
    BlockSource,
    digest_block,
    from_ranges,
    read_ahead,
    to_ranges,
)
from tightfit.clusters.staging.home import (
    clean_home,
    find_home,
    find_shortage,
    list_copies,
    lock_model,
    make_home,
    read_free_space,
    remove_litter,
)
from tightfit.clusters.staging.store import NUM_THREADS, Store
from tightfit.clusters.staging.transfer import Relay
from tightfit.core.errors import UserError
from tightfit.runtime.staged import Manifest, is_fresh, remember_place

Answer = dict[str, Any]
_TICK_SECONDS = 1.0
_HASHED_BYTES = 1 << 23


class Agent:
    """What can be asked of a node. Requests come one after the other."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._source: BlockSource | None = None
        self._server: socket.socket | None = None
        self._token = ""
        self._held = ExitStack()
        self._is_dry = False

    @property
    def store(self) -> Store:
        assert self._store is not None, "look comes first"
        return self._store

    @property
    def num_stored_bytes(self) -> int:
        return 0 if self._store is None else self._store.num_stored_bytes

    def do(self, op: str, arguments: dict[str, Any]) -> Answer:
        """One request by name."""
        known: dict[str, Callable[..., Answer]] = {
            "hello": lambda: {"host": socket.gethostname()},
            "look": self.look,
            "read": self.read,
            "listen": self.listen,
            "probe": self.probe,
            "relay": self.relay,
            "check": self.check,
            "drop": self.drop,
            "finish": self.finish,
            "list": self.list,
            "clean": self.clean,
        }
        return known[op](**arguments)

    def look(
        self,
        *,
        wanted: dict[str, Any],
        to: str,
        leave_bytes: int | None = None,
        verify: bool = False,
        is_dry: bool = False,
    ) -> Answer:
        """Lock the model on this node; say what is there of it, what is not, and whether it fits.

        Blocks that an earlier staging left are read back: those that changed since are dropped.
        """
        manifest = Manifest.model_validate(wanted)
        home = find_home(Path(to))
        if not is_dry:
            self._held.enter_context(lock_model(make_home(home), manifest.key))
        store = self._store = Store(home, manifest)
        self._is_dry = is_dry
        bad = store.find_bad() if verify or not store.is_whole else []
        if bad and not is_dry:
            store.drop(bad)
        return {
            "is_whole": store.is_whole and not bad,
            "have": to_ranges(set(store.digests) - set(bad)),
            "bad": len(bad),
            "can_read": _can_read(manifest),
            "shortage": self._find_shortage(leave_bytes),
            "host": socket.gethostname(),
            "path": str(store.path),
            "check_rate": _measure_hashing(),
        }

    def _find_shortage(self, leave_bytes: int | None) -> str | None:
        """Why the copy does not fit; what would be in its way and is of no use goes first."""
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
            self._held.close()
            remove_litter(store.home)
        return shortage

    def read(
        self,
        *,
        blocks: list[list[int]],
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
        num_bytes = 0
        found = read_ahead(self._open_source().read, indices, until=until)
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

    def _open_source(self) -> BlockSource:
        if self._source is None:
            self._source = BlockSource(self.store.wanted)
        return self._source

    def listen(self, *, token: str, interface: str | None, peer: str | None) -> Answer:
        """Wait for a neighbour that knows the token; says where."""
        if self._server is not None:
            self._server.close()
        address = transfer.choose_address(interface, peer)
        self._server, self._token = transfer.listen(address), token
        return {"address": address, "port": self._server.getsockname()[1]}

    def _accept(self) -> socket.socket:
        """The neighbour above; nobody else is let in after it."""
        assert self._server is not None, "listen comes first"
        try:
            return transfer.accept(self._server, self._token)
        finally:
            self._server.close()
            self._server = None

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
        self, *, takes: bool, send_to: list[list[Any]], blocks: list[list[int]] | None = None
    ) -> Answer:
        """Be one node of a chain or tree; the first one reads, the others are sent to."""
        began = time.monotonic()
        self.store.begin()
        above = None
        lost = 0
        try:
            above = self._accept() if takes else None
        except OSError:
            return {"num_bytes": 0, "bad": 0, "is_cut": True, "num_lost": 0, "seconds": 0.0}
        links = []
        for place in send_to:
            try:
                links.append(transfer.connect(*place))
            except OSError:
                lost += 1
        relay = Relay(self.store, links, is_trusted=above is None)
        try:
            tally = relay.run(self._arriving(above, blocks or []))
        finally:
            if above is not None:
                above.close()
        return {
            "num_bytes": tally.num_bytes,
            "bad": len(tally.bad),
            "is_cut": tally.is_cut,
            "num_lost": tally.num_lost + lost,
            "seconds": time.monotonic() - began,
        }

    def _arriving(self, above: socket.socket | None, blocks: list[list[int]]) -> Iterator[Block]:
        if above is not None:
            return transfer.receive_blocks(above, block_bytes=self.store.layout.block_bytes)
        return read_ahead(self._read_anywhere, sorted(from_ranges(blocks)))

    def _read_anywhere(self, index: int) -> bytes:
        """From the copy where it is there already and sound, else from the source."""
        held = self.store.digests.get(index)
        if held is not None:
            data = self.store.read(index)
            if digest_block(data) == held:
                return data
        return self._open_source().read(index)

    def check(self, *, detail: bool = False) -> Answer:
        """Read the copy back; blocks that are not what was written are dropped."""
        began = time.monotonic()
        bad: list[int] = []
        if not detail and not self.store.is_whole:
            bad = self.store.find_bad()
            self.store.drop(bad)
        reply = {
            "bad": len(bad),
            "missing": len(self.store.missing),
            "have": to_ranges(self.store.digests),
            "root": self.store.root(),
            "seconds": time.monotonic() - began,
        }
        if detail:
            reply["digests"] = [digest.hex() for _, digest in sorted(self.store.digests.items())]
        return reply

    def drop(self, *, blocks: list[list[int]]) -> Answer:
        self.store.drop(from_ranges(blocks))
        return {"have": to_ranges(self.store.digests)}

    def finish(self) -> Answer:
        """Give the copy its name and remember the place."""
        path = self.store.finish()
        remember_place(self.store.home.parent)
        return {"path": str(path)}

    def list(self, *, to: str) -> Answer:
        copies = list_copies(find_home(Path(to)))
        return {
            "host": socket.gethostname(),
            "copies": [copy.model_dump(mode="json") for copy in copies],
        }

    def clean(self, *, to: str, key: str | None) -> Answer:
        home = find_home(Path(to))
        removed = clean_home(home, key)
        busy = [copy.key for copy in list_copies(home) if key in (None, copy.key)]
        return {
            "host": socket.gethostname(),
            "removed": [copy.model_dump(mode="json") for copy in removed],
            "busy": busy,
        }

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()
        self._held.close()


def _can_read(manifest: Manifest) -> bool:
    """Whether this node sees the same files as the one that asks."""
    try:
        return is_fresh(manifest)
    except (OSError, ValueError):
        return False


def _measure_hashing() -> float:
    """Bytes per second that this node reads back and checks, all its threads together."""
    data = bytes(_HASHED_BYTES)
    began = time.monotonic()
    digest_block(data)
    return NUM_THREADS * len(data) / max(time.monotonic() - began, 1e-6)


def main() -> int:
    """Answer until stdin closes."""
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    agent = Agent()
    send = open_answers()

    def listen() -> None:
        for request in read_requests():
            requests.put(request)
        os._exit(0)

    def tick() -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            send({"progress": agent.num_stored_bytes})

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=tick, daemon=True).start()
    while True:
        send(answer(agent, requests.get()))


def answer(agent: Agent, request: dict[str, Any]) -> Answer:
    """What the agent says to one request; an error is an answer too."""
    number = request.get("id")
    try:
        return {"id": number, "reply": agent.do(request["op"], request["arguments"])}
    except UserError as error:
        reply = {"kind": type(error).__name__, "problem": error.problem, "remedy": error.remedy}
        return {"id": number, "error": reply}
    except Exception as error:
        return {"id": number, "bug": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
