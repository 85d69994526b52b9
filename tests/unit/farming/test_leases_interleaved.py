"""Claim, take over and commit under arbitrary interleavings: no chunk twice, none lost.

The real code runs in threads that stop before every file operation; the order in which they go
on, how long each is left standing, when one dies and what the server's clock does is drawn.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memory_store import MemoryStore
from tightfit.farming.folder import ChunkLayout, done_path
from tightfit.farming.leases import Lease, Leases, LeaveReason, heartbeat_path
from tightfit.farming.store import Store

LEASE_SECONDS = 10.0
MOST_STEPS = 20_000


class _DiedError(BaseException):
    """The worker's process is no more."""


class Turn:
    """One worker's thread, which runs only while the scheduler waits for it."""

    def __init__(self, name: str, work: Callable[[Turn], None]) -> None:
        self.name = name
        self.is_over = False
        self.is_dead = False
        self.error: BaseException | None = None
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def wait(self) -> None:
        """Called by the worker: stand still until it is our turn."""
        self._stopped.release()
        self._go.acquire()
        if self.is_dead:
            raise _DiedError

    def step(self) -> None:
        """Called by the scheduler: one file operation."""
        if not self.is_over:
            self._go.release()
            self._stopped.acquire()

    def die(self) -> None:
        self.is_dead = True
        self.step()

    def _run(self, work: Callable[[Turn], None]) -> None:
        self._stopped.release()
        self._go.acquire()
        try:
            if not self.is_dead:
                work(self)
        except _DiedError:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._stopped.release()


class SteppedStore:
    """Waits for the worker's turn before each operation."""

    def __init__(self, store: MemoryStore, turn: Turn) -> None:
        self._store = store
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*given: Any) -> Any:
            self._turn.wait()
            return method(*given)

        return call


class World:
    """Workers, chunks, and what happened."""

    def __init__(self, shape: ChunkLayout) -> None:
        self.shape = shape
        self.now_s = 1000.0
        self.store = MemoryStore(lambda: self.now_s)
        self.claims: Counter[tuple[int, int]] = Counter()
        self.commits: dict[int, list[bytes]] = {}
        self.turns: list[Turn] = []

    def add(self) -> Turn:
        turn = Turn(f"w{len(self.turns)}", self._work)
        self.turns.append(turn)
        return turn

    def _work(self, turn: Turn) -> None:
        store: Store = SteppedStore(self.store, turn)
        leases = Leases(
            store, self.shape, turn.name, seconds=LEASE_SECONDS, rng=random.Random(turn.name)
        )
        leases.join()
        for _ in range(MOST_STEPS):
            leases.beat()
            lease = leases.claim_fresh() or leases.claim_left(own_seconds=0.5)
            if lease is not None:
                self._do(turn, leases, lease)
            elif leases.is_finished():
                break
            turn.wait()

    def _do(self, turn: Turn, leases: Leases, lease: Lease) -> None:
        self.claims[(lease.chunk, lease.generation)] += 1
        turn.wait()
        if turn.name == "w1":  # one that gives back what it has, and commits it all the same
            leases.leave(LeaveReason.STOPPED)
            turn.wait()
        content = f"{turn.name} {lease.chunk}.{lease.generation}".encode()
        if leases.commit(lease, content):
            self.commits.setdefault(lease.chunk, []).append(content)
        if turn.name == "w1":
            self.store.replace(heartbeat_path(turn.name), b"")


actions = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 3), st.integers(1, 30)),
        st.tuples(st.just("step"), st.integers(0, 3), st.integers(1, 30)),
        st.tuples(st.just("step"), st.integers(0, 3), st.integers(1, 30)),
        st.tuples(st.just("wait"), st.integers(-15, 30), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 3), st.just(0)),
    ),
    min_size=10,
    max_size=80,
)


@given(
    story=actions,
    num_chunks=st.integers(1, 7),
    chunks_per_bucket=st.integers(1, 4),
    late=st.lists(st.integers(0, 3), max_size=30),
)
@settings(max_examples=150)
def test_never_twice_and_never_lost(
    story: list[tuple[str, int, int]], num_chunks: int, chunks_per_bucket: int, late: list[int]
) -> None:
    world = World(
        ChunkLayout(
            num_prompts=num_chunks, prompts_per_chunk=1, chunks_per_bucket=chunks_per_bucket
        )
    )
    for _ in range(4):
        world.add()
    for what, amount, count in story:
        if what == "step":
            for _ in range(count):
                world.turns[amount].step()
        elif what == "die":
            world.turns[amount].die()
        else:
            world.now_s += amount
    # The others stand still, each wherever it is; a new one must be able to end it all.
    healthy = world.add()
    for _ in range(MOST_STEPS):
        if healthy.is_over:
            break
        healthy.step()
        world.now_s += 0.5
    assert healthy.is_over, "somebody who stands still has kept the others from ending"
    assert healthy.error is None, healthy.error
    assert set(world.commits) == set(range(num_chunks)), "a chunk was lost"
    # And now they wake up.
    for number in late:
        world.turns[number].step()
    for turn in world.turns:
        turn.die()

    assert all(turn.error is None for turn in world.turns)
    assert all(count == 1 for count in world.claims.values()), "a lease with two holders"
    assert all(len(reported) == 1 for reported in world.commits.values()), (
        "a chunk was counted twice"
    )
    for chunk, (content,) in world.commits.items():
        kept = world.store.look(done_path(world.shape, chunk))
        assert kept is not None
        assert kept.content == content, "what counts is what is kept"
