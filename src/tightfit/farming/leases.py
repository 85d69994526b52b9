"""Leases of chunks: claimed by exclusive creation, taken over from the dead, committed once.

Nothing is ever deleted or locked. A lease is a file `<chunk>.<generation>` that names its worker;
it is taken over by creating the next generation, so that of many who try, one wins, and a worker
that wakes up late cannot be mistaken for its successor. Whether a worker is alive follows from the
time of its own file and the time of the asker's, both set by the file server. Two workers
may do the same chunk; only the first to publish it counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pydantic import NonNegativeInt, ValidationError

from tightfit.core.frozen import Frozen
from tightfit.farming.folder import (
    ChunkLayout,
    done_folder,
    done_path,
    lease_folder,
    lease_path,
    mark_path,
    newest_generations,
    numbers_in,
)
from tightfit.farming.store import Store

FINISHED = "finished"
"""A mark: every chunk is done."""
BUCKETS_PER_SCAN = 4
"""Folders that an idle worker looks through at a time."""
MAX_MISSES = 2
"""Things found taken in a row after which a list of them is read again."""
QUICK_TRIES = 8
SLOW_FACTOR = 3.0
"""A lease that is older than so many of the asker's own chunks may be done twice."""
MAX_COPIES = 2
DEATHS_TO_QUARANTINE = 3


class LeaseReason(str, Enum):
    """Why a lease was made."""

    FRESH = "fresh"
    DEAD = "dead"
    """Its worker fell silent, or its engine broke."""
    RETURNED = "returned"
    """Its worker was asked to stop and returned it."""
    SLOW = "slow"
    """Its worker lives, and an idle one does it too."""


class LeaveReason(str, Enum):
    """Why a worker has gone; the content of its beat file."""

    STOPPED = "stopped"
    BROKEN = "broken"


class LeaseRecord(Frozen):
    """The content of a lease file."""

    worker: str
    why: LeaseReason = LeaseReason.FRESH
    deaths: NonNegativeInt = 0
    """Workers that died with this chunk."""
    copies: NonNegativeInt = 0
    """Times it was doubled because it was slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One chunk, ours to do."""

    chunk: int
    generation: int
    note: LeaseRecord

    @property
    def is_quarantined(self) -> bool:
        """Too many died of it: to be done one prompt at a time."""
        return self.note.deaths >= DEATHS_TO_QUARANTINE


def heartbeat_path(worker: str) -> str:
    return f"workers/{worker}.beat"


class Leases:
    """One worker's view of the folder."""

    def __init__(
        self,
        store: Store,
        shape: ChunkLayout,
        worker: str,
        *,
        seconds: float,
        rng: random.Random,
    ) -> None:
        self.worker = worker
        self._store = store
        self._shape = shape
        self._seconds = seconds
        self._rng = rng
        self._fresh: list[int] = []
        """Chunks of the present bucket that had no lease when it was listed."""
        self._bucket: int | None = None
        self._taken: set[int] = set()
        self._full: set[int] = set()
        """Buckets whose marks we have seen or made; there may be more."""
        self._num_misses = 0

    def join(self) -> None:
        self._store.create(heartbeat_path(self.worker))

    def beat(self) -> float:
        """Report that we are alive; the time on the file server."""
        return self._store.beat(heartbeat_path(self.worker))

    def leave(self, why: LeaveReason) -> None:
        """Return every lease at once."""
        self._store.replace(heartbeat_path(self.worker), why.value.encode())

    def claim_fresh(self) -> Lease | None:
        """A chunk that nobody has had; None where there is none left."""
        note = LeaseRecord(worker=self.worker)
        num_late = 0
        while True:
            while self._fresh:
                lease = self._create(self._fresh.pop(), 0, note)
                if lease is not None:
                    return lease
                num_late += 1
                if num_late % MAX_MISSES == 0 and self._bucket is not None:
                    leased = newest_generations(self._store.names(lease_folder(self._bucket)))
                    self._fresh = [chunk for chunk in self._fresh if chunk not in leased]
            if self._bucket is not None:
                self._mark("taken", self._bucket)
                self._bucket = None
            if not self._open_bucket():
                return None

    def claim_left(self, *, own_seconds: float | None = None) -> Lease | None:
        """A chunk whose worker is dead or has left, or is slower than we would be.

        `own_seconds`: what a chunk takes us; None: not known, and nobody is slow.
        """
        now_s = self.beat()  # before the others are read: they can only look younger
        reasons: dict[str, LeaseReason | None] = {}
        for bucket in self._look_through():
            done = numbers_in(self._store.names(done_folder(bucket)))
            chunks = [chunk for chunk in self._shape.chunks_of(bucket) if chunk not in done]
            if not chunks:
                self._mark("full", bucket)
                continue
            newest = newest_generations(self._store.names(lease_folder(bucket)))
            self._rng.shuffle(chunks)
            for chunk in chunks:
                generation = newest.get(chunk, -1)
                note = self._judge(chunk, generation, now_s, own_seconds, reasons)
                lease = None if note is None else self._create(chunk, generation + 1, note)
                if lease is not None:
                    return lease
        return None

    def commit(self, lease: Lease, content: bytes) -> bool:
        """Publish a chunk's answers; False where another was first, and ours do not count."""
        return self._store.publish(done_path(self._shape, lease.chunk), content)

    def is_finished(self) -> bool:
        """Whether every chunk is done; says so to all others where it is."""
        if self._store.look(FINISHED) is not None:
            return True
        if len(self._full) < self._shape.num_buckets:
            return False
        self._store.create(FINISHED)
        return True

    def _open_bucket(self) -> bool:
        """Find a bucket with chunks that nobody has had; False where there is none."""
        while True:
            # By what we know; all marks are listed only where that led us astray.
            if self._num_misses >= MAX_MISSES or len(self._taken) == self._shape.num_buckets:
                self._taken |= numbers_in(self._store.names("taken"))
                self._num_misses = 0
            bucket = self._pick(self._taken)
            if bucket is None:
                return False
            leased = newest_generations(self._store.names(lease_folder(bucket)))
            self._fresh = [c for c in self._shape.chunks_of(bucket) if c not in leased]
            if self._fresh:
                # In the folder's order where we are alone in it, else apart from the others.
                self._fresh.reverse()
                if leased:
                    self._rng.shuffle(self._fresh)
                self._bucket = bucket
                self._num_misses = 0
                return True
            self._mark("taken", bucket)
            self._num_misses += 1

    def _look_through(self) -> Iterator[int]:
        """A few buckets that are not full as far as we know; where all of them were, all marks."""
        num_before = len(self._full)
        num_seen = 0
        while num_seen < BUCKETS_PER_SCAN and (bucket := self._pick(self._full)) is not None:
            num_seen += 1
            yield bucket
        if num_seen and len(self._full) - num_before == num_seen:
            self._full |= numbers_in(self._store.names("full"))

    def _pick(self, known: set[int]) -> int | None:
        """Any bucket that is not among the known ones."""
        count = self._shape.num_buckets
        if len(known) == count:
            return None
        for _ in range(QUICK_TRIES):
            bucket = self._rng.randrange(count)
            if bucket not in known:
                return bucket
        return self._rng.choice([bucket for bucket in range(count) if bucket not in known])

    def _judge(
        self,
        chunk: int,
        generation: int,
        now_s: float,
        own_seconds: float | None,
        reasons: dict[str, LeaseReason | None],
    ) -> LeaseRecord | None:
        """The record to take the chunk over with; None where its worker goes on.

        `reasons` keeps what was found of each worker.
        """
        if generation < 0:
            return LeaseRecord(worker=self.worker)
        seen = self._store.look(lease_path(self._shape, chunk, generation))
        if seen is None:
            return None  # a cached listing: seen at the next scan
        try:
            old = LeaseRecord.model_validate_json(seen.content)
        except ValidationError:  # died between making the file and writing it, or is about to write
            is_dead = now_s - seen.mtime_s > self._seconds
            return LeaseRecord(worker=self.worker, why=LeaseReason.DEAD) if is_dead else None
        if old.worker not in reasons:
            reasons[old.worker] = self._reason_to_take_over(old.worker, now_s)
        why, deaths, copies = reasons[old.worker], old.deaths, old.copies
        if why is LeaseReason.DEAD:
            deaths += 1
        elif why is None:
            is_slow = own_seconds is not None and now_s - seen.mtime_s > SLOW_FACTOR * own_seconds
            is_alone = deaths >= DEATHS_TO_QUARANTINE  # its prompts are tried by one at a time
            if not is_slow or is_alone or copies >= MAX_COPIES or old.worker == self.worker:
                return None
            why, copies = LeaseReason.SLOW, copies + 1
        return LeaseRecord(worker=self.worker, why=why, deaths=deaths, copies=copies)

    def _reason_to_take_over(self, worker: str, now_s: float) -> LeaseReason | None:
        """DEAD or RETURNED; None for a worker that is alive."""
        seen = self._store.look(heartbeat_path(worker))
        if seen is not None and seen.content == LeaveReason.STOPPED.value.encode():
            return LeaseReason.RETURNED
        if seen is None or seen.content == LeaveReason.BROKEN.value.encode():
            return LeaseReason.DEAD
        return LeaseReason.DEAD if now_s - seen.mtime_s > self._seconds else None

    def _create(self, chunk: int, generation: int, note: LeaseRecord) -> Lease | None:
        content = note.model_dump_json(exclude_defaults=True).encode()
        if not self._store.create(lease_path(self._shape, chunk, generation), content):
            return None
        return Lease(chunk=chunk, generation=generation, note=note)

    def _mark(self, kind: str, bucket: int) -> None:
        (self._taken if kind == "taken" else self._full).add(bucket)
        self._store.create(mark_path(kind, bucket))
