"""The chunks a worker has open: requests drawn across their borders, answers gathered per chunk."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tightfit.core.errors import UserError
from tightfit.engines.protocol import Done, Engine, Failed, Listener, Request, Ticket
from tightfit.farm.folder import FarmFile
from tightfit.farm.leases import Lease
from tightfit.farm.results import Answered, ChunkHead, FailureNote, make_answer, pack_chunk
from tightfit.serve.generate.job import derive_seed, encode_prompt
from tightfit.serve.generate.journal import Key
from tightfit.serve.generate.prompts import Prompt

KEPT_TIMES = 32
"""Chunks whose times make up a worker's own pace."""


@dataclass(slots=True, kw_only=True)
class OpenChunk:
    """A lease that is being worked on."""

    lease: Lease
    keys: tuple[Key, ...]
    began_s: float
    answers: dict[Key, Answered] = field(default_factory=dict)
    failures: dict[Key, FailureNote] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.answers) + len(self.failures) == len(self.keys)

    def fail(self, key: Key, fault: UserError) -> None:
        self.failures[key] = FailureNote(
            prompt=key.prompt, sample=key.sample, problem=fault.problem, remedy=fault.remedy
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a worker is."""

    worker: str
    node: str
    partition: str
    job: str | None = None


NextLease = Callable[[], Lease | None]
Commit = Callable[[OpenChunk], None]


class Field:
    """Requests for an engine from one lease after another, and what came of them."""

    def __init__(self, engine: Engine, farm: FarmFile, read: Callable[[int], list[Prompt]]) -> None:
        self.open: dict[int, OpenChunk] = {}
        self._engine = engine
        self._farm = farm
        self._read = read
        self._sampling = farm.sampling.to_sampling()
        self._asked: dict[int, tuple[OpenChunk, Prompt, Key]] = {}
        self._times: deque[float] = deque(maxlen=KEPT_TIMES)

    @property
    def chunk_seconds(self) -> float | None:
        """What a chunk takes here, by the middle one of the last; None before the first."""
        return statistics.median(self._times) if self._times else None

    def requests(self, next_lease: NextLease, commit: Commit) -> Iterator[Request]:
        """Until there is no lease to be had. A chunk that asks nothing is committed at once."""
        self._asked.clear()
        number = 0
        while (lease := next_lease()) is not None:
            prompts = self._read(lease.chunk)
            chunk = self.begin(lease, prompts)
            for prompt in prompts:
                for request, key in self.requests_of(chunk, prompt):
                    self._asked[number] = (chunk, prompt, key)
                    number += 1
                    yield request
            if chunk.is_whole and self.open.get(lease.chunk) is chunk:
                self.close(chunk, commit)

    def begin(self, lease: Lease, prompts: list[Prompt]) -> OpenChunk:
        samples = range(self._farm.num_samples)
        keys = tuple(Key(prompt.index, sample) for prompt in prompts for sample in samples)
        chunk = OpenChunk(lease=lease, keys=keys, began_s=time.monotonic())
        self.open[lease.chunk] = chunk
        return chunk

    def requests_of(self, chunk: OpenChunk, prompt: Prompt) -> Iterator[tuple[Request, Key]]:
        """One for each sample; none where the prompt cannot be encoded."""
        keys = [Key(prompt.index, sample) for sample in range(self._farm.num_samples)]
        try:
            tokens = encode_prompt(self._engine, prompt, is_raw=self._farm.is_raw)
        except UserError as fault:
            for key in keys:
                chunk.fail(key, fault)
            return
        for key in keys:
            seed = derive_seed(self._farm.seed, key)
            yield Request(prompt=tokens, sampling=replace(self._sampling, seed=seed)), key

    def take(self, number: int, end: Done | Failed, commit: Commit) -> None:
        """One request's end. What is no fault of a prompt is raised."""
        chunk, prompt, key = self._asked.pop(number)
        self.take_end(chunk, prompt, key, end)
        if chunk.is_whole:
            self.close(chunk, commit)

    def take_end(self, chunk: OpenChunk, prompt: Prompt, key: Key, end: Done | Failed) -> None:
        if isinstance(end, Done):
            chunk.answers[key] = make_answer(prompt, key.sample, end, is_raw=self._farm.is_raw)
        elif isinstance(end.fault, UserError):
            chunk.fail(key, end.fault)
        else:
            raise end.fault

    def close(self, chunk: OpenChunk, commit: Commit) -> None:
        # Another may have the same number: taken from us while we were frozen, then left to us.
        if self.open.get(chunk.lease.chunk) is chunk:
            del self.open[chunk.lease.chunk]
        self._times.append(time.monotonic() - chunk.began_s)
        commit(chunk)


def pack(chunk: OpenChunk, identity: Identity) -> tuple[ChunkHead, bytes]:
    """A whole chunk as it is published."""
    answers = [chunk.answers[key] for key in chunk.keys if key in chunk.answers]
    head = ChunkHead(
        chunk=chunk.lease.chunk,
        worker=identity.worker,
        node=identity.node,
        partition=identity.partition,
        generation=chunk.lease.generation,
        why=chunk.lease.note.why,
        seconds=time.monotonic() - chunk.began_s,
        num_answers=len(answers),
        num_prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
        num_new_tokens=sum(answer.num_new_tokens for answer in answers),
        failures=tuple(chunk.failures[key] for key in chunk.keys if key in chunk.failures),
    )
    return head, pack_chunk(head, [answer.row for answer in answers])


class Interruptible:
    """An engine whose requests can all be cancelled at once, from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.info = engine.info
        self.prompter = engine.prompter
        self.logits = engine.logits
        self.tokenize = engine.tokenize
        self.close = engine.close
        self.is_stopped = False
        self._engine = engine
        self._lock = threading.RLock()
        self._tickets: dict[int, Ticket] = {}
        self._count = 0

    def submit(self, request: Request, listener: Listener) -> Ticket:
        with self._lock:
            number = self._count
            self._count += 1

            def listen(event: object) -> None:
                if isinstance(event, Done | Failed):
                    self._tickets.pop(number, None)
                listener(event)  # type: ignore[arg-type]

            self._tickets[number] = ticket = self._engine.submit(request, listen)
            if self.is_stopped:
                ticket.cancel()
            return ticket

    def stop(self) -> None:
        with self._lock:
            self.is_stopped = True
            for ticket in list(self._tickets.values()):
                ticket.cancel()
