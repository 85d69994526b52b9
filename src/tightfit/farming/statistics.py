"""What a farm did, by node and in total."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tightfit.core.frozen import Frozen
from tightfit.farming.folder import FarmFile
from tightfit.farming.heartbeat import WorkerStatus
from tightfit.farming.leases import LeaseReason
from tightfit.farming.results import ChunkHeader


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
) -> FarmStatistics:
    """Statistics from the published chunks and the times that workers reported.

    Chunks are exact; times may lack the last seconds of a worker that was killed. `commits_s`:
    when each chunk was published.
    """
    seconds = max(_working_seconds(heads, commits_s, statuses), 1e-9)
    num_answers = sum(head.num_answers for head in heads)
    num_prompt = sum(head.num_prompt_tokens for head in heads)
    num_new = sum(head.num_new_tokens for head in heads)
    return FarmStatistics(
        model=farm.engine.model,
        num_prompts=farm.shape.num_prompts,
        num_answers=num_answers,
        num_failed=num_failed,
        num_prompt_tokens=num_prompt,
        num_new_tokens=num_new,
        seconds=seconds,
        new_tokens_per_second=num_new / seconds,
        total_tokens_per_second=(num_new + num_prompt) / seconds,
        answers_per_second=num_answers / seconds,
        num_chunks=len(heads),
        prompts_per_chunk=farm.shape.prompts_per_chunk,
        num_workers=len(statuses),
        released=_count(head.why for head in heads if head.why is not LeaseReason.FRESH),
        num_discarded=sum(status.num_discarded for status in statuses),
        nodes=_by_node(heads, statuses, num_answers, _find_lost(statuses, farm.lease_seconds)),
    )


_NodeKey = tuple[str, str]


def _by_node(
    heads: Sequence[ChunkHeader],
    statuses: Sequence[WorkerStatus],
    num_answers: int,
    lost: set[str],
) -> tuple[NodeStatistics, ...]:
    done: dict[_NodeKey, list[ChunkHeader]] = defaultdict(list)
    by_node: dict[_NodeKey, list[WorkerStatus]] = defaultdict(list)
    for head in heads:
        done[(head.partition, head.node)].append(head)
    for status in statuses:
        by_node[(status.partition, status.node)].append(status)
    return tuple(
        _of_node(key, done[key], by_node[key], num_answers, lost)
        for key in sorted({*done, *by_node})
    )


def _of_node(
    key: _NodeKey,
    heads: Sequence[ChunkHeader],
    statuses: Sequence[WorkerStatus],
    num_all: int,
    lost: set[str],
) -> NodeStatistics:
    busy = sum(status.busy_seconds for status in statuses)
    width = max(1, len({status.worker for status in statuses if status.busy_seconds}))
    answers = sum(head.num_answers for head in heads)
    new = sum(head.num_new_tokens for head in heads)
    wall = _busy_wall(statuses) if width > 1 else busy
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
        num_lost_workers=sum(status.worker in lost for status in statuses),
    )


def _find_lost(statuses: Sequence[WorkerStatus], lease_seconds: float) -> set[str]:
    """Workers that failed, or were silent for longer than a lease while others were not."""
    newest = max((status.reported_s for status in statuses), default=0.0)
    return {
        status.worker
        for status in statuses
        if status.state == "broken"
        or (status.state not in ("ended", "stopped") and newest - status.reported_s > lease_seconds)
    }


def _working_seconds(
    heads: Sequence[ChunkHeader], commits_s: Sequence[float], statuses: Sequence[WorkerStatus]
) -> float:
    """Seconds with a loaded model at work, by the file server's clock."""
    last_s = max(commits_s, default=0.0)
    spans = [
        (status.loaded_s, min(status.reported_s, last_s))
        for status in statuses
        if status.loaded_s is not None
    ]
    spans += [
        (commit_s - head.seconds, commit_s) for head, commit_s in zip(heads, commits_s, strict=True)
    ]
    return _covered(spans)


def _busy_wall(statuses: Sequence[WorkerStatus]) -> float:
    """Seconds in which at least one worker of the node was busy."""
    return _covered(
        (status.loaded_s, status.loaded_s + status.busy_seconds)
        for status in statuses
        if status.loaded_s is not None and status.busy_seconds
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of all of them, what several cover counted once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _count(whys: Iterable[LeaseReason]) -> dict[str, int]:
    return {why.value: count for why, count in Counter(whys).items()}
