"""Progress of a farm while it runs, read from its folder, and its statistics at the end."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.frozen import Frozen
from tightfit.farming.bounds import Bounds
from tightfit.farming.folder import FarmFile, done_folder, mark_path, numbers_in
from tightfit.farming.heartbeat import WorkerStatus, read_statuses
from tightfit.farming.leases import FINISHED, LeaseReason
from tightfit.farming.results import ChunkHeader
from tightfit.farming.store import FolderStore

# How far a farm is, from its folder alone: done chunks counted, workers' own words summed.

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


class NodeStatistics(Frozen):
    """The workers of one node in one partition."""

    partition: str
    node: str
    device: str | None
    num_workers: int
    num_chunks: int
    num_answers: int
    share: float
    """Of all answers."""
    num_prompt_tokens: int
    num_new_tokens: int
    new_tokens_per_second: float | None
    """While it was busy."""
    answers_per_second: float | None
    load_seconds: float
    busy_seconds: float
    idle_seconds: float
    taken_over: dict[str, int]
    """Chunks of others, by why."""
    num_discarded: int
    """Chunks done for nothing: another had published them first."""
    num_lost_workers: int
    """That fell silent or broke."""
    bytes_per_second: float | None = None
    """Through the memory of all devices, estimated. This and what follows is of the workers that
    worked to the end; None: there was none."""
    bandwidth_fraction: float | None = None
    """Of what a plain copy reached on the same device; the mean of the workers."""
    bottleneck: str | None = None
    """Of the worker with the most answers."""
    sentence: str | None = None


class FarmStatistics(Frozen):
    """All of it."""

    model: str
    num_prompts: int
    num_answers: int
    num_failed: int
    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float
    """In which at least one loaded model was at work, up to the last answer; pauses between two
    commands are left out."""
    start_seconds: float | None = None
    """From the last command's start until a loaded model was at work: the queue, Python, its
    libraries and the weights. None: not known, of a farm by an earlier version."""
    new_tokens_per_second: float
    total_tokens_per_second: float
    answers_per_second: float
    num_chunks: int
    prompts_per_chunk: int
    num_workers: int
    released: dict[str, int]
    """Answers that came from a chunk's later lease, in chunks, by why."""
    num_discarded: int
    nodes: tuple[NodeStatistics, ...]


def sum_farm(
    heads: Sequence[ChunkHeader],
    statuses: Sequence[WorkerStatus],
    *,
    farm: FarmFile,
    num_failed: int,
    commits_s: Sequence[float],
    began_s: float,
) -> FarmStatistics:
    """Statistics from the published chunks and the times that workers reported.

    Chunks are exact; times may lack the last seconds of a worker that was killed. `commits_s`:
    when each chunk was published; `began_s`: when the last command began, by the same clock.
    """
    last_s = max(commits_s, default=0.0)
    at_work = [(s.loaded_s, min(s.reported_s, last_s)) for s in statuses if s.loaded_s is not None]
    at_work += [
        (commit_s - head.seconds, commit_s) for head, commit_s in zip(heads, commits_s, strict=True)
    ]
    seconds = max(_covered_seconds(at_work), 1e-9)
    num_answers = sum(head.num_answers for head in heads)
    num_prompt = sum(head.num_prompt_tokens for head in heads)
    num_new = sum(head.num_new_tokens for head in heads)
    done: dict[_NodeKey, list[ChunkHeader]] = defaultdict(list)
    workers: dict[_NodeKey, list[WorkerStatus]] = defaultdict(list)
    for head in heads:
        done[(head.partition, head.node)].append(head)
    for status in statuses:
        workers[(status.partition, status.node)].append(status)
    newest_s = max((status.reported_s for status in statuses), default=0.0)
    silent_s = newest_s - farm.lease_seconds
    return FarmStatistics(
        model=farm.engine.model,
        num_prompts=farm.shape.num_prompts,
        num_answers=num_answers,
        num_failed=num_failed,
        num_prompt_tokens=num_prompt,
        num_new_tokens=num_new,
        seconds=seconds,
        start_seconds=_measure_start(at_work, began_s),
        new_tokens_per_second=num_new / seconds,
        total_tokens_per_second=(num_new + num_prompt) / seconds,
        answers_per_second=num_answers / seconds,
        num_chunks=len(heads),
        prompts_per_chunk=farm.shape.prompts_per_chunk,
        num_workers=len(statuses),
        released=Counter(head.why.value for head in heads if head.why is not LeaseReason.FRESH),
        num_discarded=sum(status.num_discarded for status in statuses),
        nodes=tuple(
            _sum_node(key, done[key], workers[key], num_answers, silent_s)
            for key in sorted({*done, *workers})
        ),
    )


_NodeKey = tuple[str, str]


def _sum_node(
    key: _NodeKey,
    heads: Sequence[ChunkHeader],
    statuses: Sequence[WorkerStatus],
    num_all: int,
    silent_s: float,
) -> NodeStatistics:
    """`silent_s`: a worker that reported last before this time is lost, unless it had ended."""
    num_lost = sum(
        status.state == "broken"
        or (status.state not in ("ended", "stopped") and status.reported_s < silent_s)
        for status in statuses
    )
    busy = wall = sum(status.busy_seconds for status in statuses)
    if len([status for status in statuses if status.busy_seconds]) > 1:
        # Seconds in which at least one worker of the node was busy.
        wall = _covered_seconds(
            (status.loaded_s, status.loaded_s + status.busy_seconds)
            for status in statuses
            if status.loaded_s is not None and status.busy_seconds
        )
    answers = sum(head.num_answers for head in heads)
    new = sum(head.num_new_tokens for head in heads)
    taken: Counter[str] = Counter()
    for status in statuses:
        taken.update({why.value: count for why, count in status.taken_over.items()})
    return NodeStatistics(
        partition=key[0],
        node=key[1],
        device=next((status.device for status in statuses if status.device), None),
        num_workers=len(statuses),
        num_chunks=len(heads),
        num_answers=answers,
        share=answers / max(1, num_all),
        num_prompt_tokens=sum(head.num_prompt_tokens for head in heads),
        num_new_tokens=new,
        new_tokens_per_second=new / wall if wall else None,
        answers_per_second=answers / wall if wall else None,
        load_seconds=sum(status.load_seconds for status in statuses),
        busy_seconds=busy,
        idle_seconds=sum(status.idle_seconds for status in statuses),
        taken_over=dict(taken),
        num_discarded=sum(status.num_discarded for status in statuses),
        num_lost_workers=num_lost,
        **_sum_usage(statuses),
    )


def _sum_usage(statuses: Sequence[WorkerStatus]) -> dict[str, Any]:
    ranked = sorted(statuses, key=lambda status: -status.num_answers)
    used = [status.usage for status in ranked if status.usage is not None]
    if not used:
        return {}
    traffic = [usage.traffic for usage in used]
    shares = [one.average_fraction for one in traffic if one.average_fraction is not None]
    return {
        "bytes_per_second": sum(one.average_bytes_per_second for one in traffic),
        "bandwidth_fraction": sum(shares) / len(shares) if shares else None,
        "bottleneck": used[0].bottleneck,
        "sentence": used[0].sentence,
    }


def _measure_start(at_work: Sequence[tuple[float, float]], began_s: float) -> float:
    """Until the first of the spans that lasts beyond the beginning; 0: one was under way."""
    return max(
        0.0, min((since for since, until in at_work if until > began_s), default=began_s) - began_s
    )


def _covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """The time that the spans cover; overlaps count once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
