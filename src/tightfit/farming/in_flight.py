"""The chunks a worker is answering, and quarantined chunks answered one prompt at a time."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tightfit.core.errors import UserError
from tightfit.engines.protocol import (
    Done,
    Engine,
    Failed,
    FinishReason,
    Listener,
    Request,
    Ticket,
    answer_all,
)
from tightfit.farming.folder import FarmFile
from tightfit.farming.leases import Lease
from tightfit.farming.results import (
    AnsweredRow,
    ChunkHeader,
    FailureRecord,
    make_answer,
    pack_chunk,
)
from tightfit.farming.store import Store
from tightfit.serving.generate.job import derive_seed, encode_prompt
from tightfit.serving.generate.journal import AnswerKey
from tightfit.serving.generate.prompts import Prompt

NUM_RECENT_TIMES = 32
"""Chunks whose times make up a worker's own pace."""


@dataclass(slots=True, kw_only=True)
class InFlightChunk:
    """A lease that is being worked on."""

    lease: Lease
    keys: tuple[AnswerKey, ...]
    began_s: float
    answers: dict[AnswerKey, AnsweredRow] = field(default_factory=dict)
    failures: dict[AnswerKey, FailureRecord] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.answers) + len(self.failures) == len(self.keys)

    def fail(self, key: AnswerKey, error: UserError) -> None:
        self.failures[key] = FailureRecord(
            prompt=key.prompt, sample=key.sample, problem=error.problem, remedy=error.remedy
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who a worker is."""

    worker: str
    node: str
    partition: str
    job: str | None = None


NextLease = Callable[[], Lease | None]
Commit = Callable[[InFlightChunk], None]


class InFlightChunks:
    """Requests for an engine from one lease after another, and what came of them."""

    def __init__(self, engine: Engine, farm: FarmFile, read: Callable[[int], list[Prompt]]) -> None:
        self.open: dict[int, InFlightChunk] = {}
        self._engine = engine
        self._farm = farm
        self._read = read
        self._sampling = farm.sampling
        self._asked: dict[int, tuple[InFlightChunk, Prompt, AnswerKey]] = {}
        self._times: deque[float] = deque(maxlen=NUM_RECENT_TIMES)

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

    def begin(self, lease: Lease, prompts: list[Prompt]) -> InFlightChunk:
        samples = range(self._farm.num_samples)
        keys = tuple(AnswerKey(prompt.index, sample) for prompt in prompts for sample in samples)
        chunk = InFlightChunk(lease=lease, keys=keys, began_s=time.monotonic())
        self.open[lease.chunk] = chunk
        return chunk

    def requests_of(
        self, chunk: InFlightChunk, prompt: Prompt
    ) -> Iterator[tuple[Request, AnswerKey]]:
        """One for each sample; none where the prompt cannot be encoded."""
        keys = [AnswerKey(prompt.index, sample) for sample in range(self._farm.num_samples)]
        try:
            tokens = encode_prompt(self._engine, prompt, is_raw=self._farm.is_raw)
        except UserError as error:
            for key in keys:
                chunk.fail(key, error)
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

    def take_end(
        self, chunk: InFlightChunk, prompt: Prompt, key: AnswerKey, end: Done | Failed
    ) -> None:
        if isinstance(end, Done):
            chunk.answers[key] = make_answer(prompt, key.sample, end, is_raw=self._farm.is_raw)
        elif isinstance(end.error, UserError):
            chunk.fail(key, end.error)
        else:
            raise end.error

    def close(self, chunk: InFlightChunk, commit: Commit) -> None:
        # Another may have the same number: taken from us while we were frozen, then left to us.
        if self.open.get(chunk.lease.chunk) is chunk:
            del self.open[chunk.lease.chunk]
        self._times.append(time.monotonic() - chunk.began_s)
        commit(chunk)


def pack_in_flight_chunk(
    chunk: InFlightChunk, identity: WorkerIdentity
) -> tuple[ChunkHeader, bytes]:
    """A whole chunk as it is published."""
    answers = [chunk.answers[key] for key in chunk.keys if key in chunk.answers]
    head = ChunkHeader(
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


class InterruptibleEngine:
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


# Quarantine: a chunk that several workers died of is answered one prompt at a time.

MAX_SOLO_ATTEMPTS = 2
"""Deaths with nothing else under way after which a prompt is given up."""


def answer_quarantined(
    engine: Engine, work: InFlightChunks, store: Store, lease: Lease, prompts: list[Prompt]
) -> InFlightChunk | None:
    """Answer a chunk one prompt at a time, keeping each answer. None: the worker was asked to stop.

    An attempt is recorded before it begins: a record without an answer means that the worker died.
    """
    chunk = work.begin(lease, prompts)
    for prompt in prompts:
        place = f"suspect/{lease.chunk:08d}/{prompt.index}"
        kept = store.look(f"{place}.kept")
        if kept is not None:
            _restore_prompt(chunk, kept.content)
        elif (note := _record_attempt(store, place)) is not None:
            if not _answer_alone(engine, work, chunk, prompt):
                store.create(f"{note}.stopped")
                return None
            store.publish(f"{place}.kept", _pack_prompt(chunk, prompt.index))
        else:
            _fail_prompt(chunk, prompt)
    return chunk


def _record_attempt(store: Store, place: str) -> str | None:
    """The note of a try that may begin; None after too many deaths, stops not counted."""
    num_deaths = number = 0
    while num_deaths < MAX_SOLO_ATTEMPTS:
        note = f"{place}.{number}"
        if store.create(note):
            return note
        num_deaths += store.look(f"{note}.stopped") is None
        number += 1
    return None


def _answer_alone(
    engine: Engine, work: InFlightChunks, chunk: InFlightChunk, prompt: Prompt
) -> bool:
    asked = list(work.requests_of(chunk, prompt))
    for number, end in answer_all(engine, (request for request, _ in asked), in_flight=1):
        if isinstance(end, Done) and end.reason is FinishReason.CANCELLED:
            return False
        work.take_end(chunk, prompt, asked[number][1], end)
    return True


def _fail_prompt(chunk: InFlightChunk, prompt: Prompt) -> None:
    error = UserError(
        f"{prompt.place}: every worker that tried to answer it died.",
        remedy="the farm's logs say of what; a smaller --context or --parallel may do",
    )
    for key in chunk.keys:
        if key.prompt == prompt.index:
            chunk.fail(key, error)


def _pack_prompt(chunk: InFlightChunk, prompt: int) -> bytes:
    kept = {
        "answers": [
            [key.sample, answer.row.decode(), answer.num_prompt_tokens, answer.num_new_tokens]
            for key, answer in chunk.answers.items()
            if key.prompt == prompt
        ],
        "failures": [
            note.model_dump() for key, note in chunk.failures.items() if key.prompt == prompt
        ],
        "prompt": prompt,
    }
    return json.dumps(kept).encode()


def _restore_prompt(chunk: InFlightChunk, content: bytes) -> None:
    kept = json.loads(content)
    for sample, row, num_prompt, num_new in kept["answers"]:
        chunk.answers[AnswerKey(kept["prompt"], sample)] = AnsweredRow(
            row.encode(), num_prompt, num_new
        )
    for found in kept["failures"]:
        note = FailureRecord.model_validate(found)
        chunk.failures[AnswerKey(note.prompt, note.sample)] = note
