"""How far a farm is, from its folder alone: done chunks counted, workers' own words summed."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

from tightfit.farming.estimate import Bounds
from tightfit.farming.folder import FarmFile, done_folder, mark_path, numbers_in
from tightfit.farming.heartbeat import WorkerStatus, read_statuses
from tightfit.farming.leases import FINISHED
from tightfit.farming.store import FolderStore

BUCKETS_PER_POLL = 64
WINDOW_SECONDS = 60.0
"""Rates are of the last minute."""
MAX_UNCERTAINTY_FRACTION = 0.75
"""How far the first chunk may be from those that follow, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """The living workers of one node in one partition, and what the node did so far."""

    partition: str
    node: str
    num_workers: int
    num_answers: int
    num_leases: int
    new_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmProgress:
    """One look."""

    num_chunks: int
    num_done: int
    nodes: tuple[NodeProgress, ...]
    new_tokens_per_second: float
    seconds: float
    """Since we began to look."""
    seconds_left: Bounds | None
    """By the chunks that came in the last minute, after the first; None before these."""
    is_finished: bool

    @property
    def num_alive(self) -> int:
        return sum(node.num_workers for node in self.nodes)


class ProgressReader:
    """Looks again and again; marks what it finds full, so that nobody has to look there."""

    def __init__(self, folder: Path, farm: FarmFile) -> None:
        self._folder = folder
        self._farm = farm
        self._store = FolderStore(folder)
        self._counts: dict[int, int] = {}
        self._full: set[int] = set()
        self._turn = 0
        self._num_before: int | None = None
        self._began_s = time.monotonic()
        self._seen: deque[tuple[float, int]] = deque()
        self._tokens: dict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def look(self) -> FarmProgress:
        self._count_done()
        shape = self._farm.shape
        num_done = sum(self._counts.values())
        is_finished = len(self._full) == shape.num_buckets
        if is_finished:
            self._store.create(FINISHED)
        nodes = self._nodes(read_statuses(self._folder))
        now = time.monotonic()
        if self._num_before is None:
            self._num_before = num_done
        if num_done > self._num_before:  # until then models load, and the first answers grow
            _append_sample(self._seen, now, num_done)
        return FarmProgress(
            num_chunks=shape.num_chunks,
            num_done=num_done,
            nodes=nodes,
            new_tokens_per_second=sum(node.new_tokens_per_second for node in nodes),
            seconds=now - self._began_s,
            seconds_left=_estimate_left(self._seen, shape.num_chunks - num_done),
            is_finished=is_finished,
        )

    def _count_done(self) -> None:
        """All folders of a small farm; of a large one some in turn, the full ones never again."""
        shape = self._farm.shape
        for bucket in numbers_in(self._store.names("full")) - self._full:
            self._counts[bucket] = len(shape.chunks_of(bucket))
            self._full.add(bucket)
        rest = [bucket for bucket in range(shape.num_buckets) if bucket not in self._full]
        start = self._turn % len(rest) if rest else 0
        chosen = itertools.islice(itertools.chain(rest[start:], rest[:start]), BUCKETS_PER_POLL)
        for bucket in list(chosen):
            self._turn += 1
            done = numbers_in(self._store.names(done_folder(bucket)))
            self._counts[bucket] = len(done)
            if len(done) == len(shape.chunks_of(bucket)):
                self._store.create(mark_path("full", bucket))
                self._full.add(bucket)

    def _nodes(self, statuses: list[WorkerStatus]) -> tuple[NodeProgress, ...]:
        newest = max((status.reported_s for status in statuses), default=0.0)
        now = time.monotonic()
        found: dict[tuple[str, str], list[WorkerStatus]] = defaultdict(list)
        for status in statuses:
            if status.loaded_s is not None:
                _append_sample(self._tokens[status.worker], now, status.num_new_tokens)
            found[(status.partition, status.node)].append(status)
        return tuple(
            NodeProgress(
                partition=partition,
                node=node,
                num_workers=sum(self._is_alive(status, newest) for status in mine),
                num_answers=sum(status.num_answers for status in mine),
                num_leases=sum(
                    status.num_leases for status in mine if self._is_alive(status, newest)
                ),
                new_tokens_per_second=sum(_rate(self._tokens[s.worker]) for s in mine),
            )
            for (partition, node), mine in sorted(found.items())
        )

    def _is_alive(self, status: WorkerStatus, newest_s: float) -> bool:
        is_here = status.state in ("loading", "working", "waiting")
        return is_here and newest_s - status.reported_s <= self._farm.lease_seconds


def _append_sample(seen: deque[tuple[float, int]], now: float, count: int) -> None:
    seen.append((now, count))
    while len(seen) > 2 and now - seen[0][0] > WINDOW_SECONDS:
        seen.popleft()


def _estimate_left(seen: deque[tuple[float, int]], num_left: int) -> Bounds | None:
    """The more chunks have come, the less the others can differ: by one over their root."""
    rate = _rate(seen)
    if not rate:
        return None
    doubt = min(MAX_UNCERTAINTY_FRACTION, 1 / math.sqrt(seen[-1][1] - seen[0][1]))
    return Bounds(rate * (1 - doubt), rate * (1 + doubt)).seconds_for(num_left)


def _rate(seen: deque[tuple[float, int]]) -> float:
    if not seen:
        return 0.0
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    return (last - first) / (last_s - first_s) if last_s > first_s else 0.0
