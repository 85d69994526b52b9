"""One worker of a farm: loads a model once, answers chunks until none is left, reports its status.

`python -m tightfit.farming.worker FOLDER` is what schedulers start. A test, or a program with an
engine of its own, calls `run_worker(folder, open_engine=...)`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tightfit.core.errors import EXIT_BUG, EXIT_REQUEUE, NotFoundError, UserError
from tightfit.core.text import disarm
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import (
    Done,
    Engine,
    EngineLostError,
    Failed,
    FinishReason,
    Listener,
    Request,
    Ticket,
    answer_all,
)
from tightfit.farming.folder import FarmFile, PromptSnapshot, read_farm
from tightfit.farming.heartbeat import Heartbeat, WorkerIdentity, choose_heartbeat_seconds
from tightfit.farming.leases import FINISHED, Lease, Leases, LeaveReason
from tightfit.farming.results import (
    AnsweredRow,
    ChunkHeader,
    FailureRecord,
    pack_chunk,
)
from tightfit.farming.store import FolderStore, Store, is_farm_removed
from tightfit.farming.usage import MAX_TIMINGS, sum_worker
from tightfit.serving.generate.journal import AnswerKey, to_json_line
from tightfit.serving.generate.prompts import Prompt
from tightfit.serving.generate.run import (
    RunMeasurements,
    count_threads,
    derive_seed,
    encode_prompt,
    make_row,
)

# The chunks a worker is answering, and quarantined chunks answered one prompt at a time.

NUM_RECENT_TIMES = 32
"""Chunks whose times make up a worker's own pace."""


@dataclass(slots=True, kw_only=True)
class InFlightChunk:
    """A chunk that is being answered."""

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


NextLease = Callable[[], Lease | None]
Commit = Callable[[InFlightChunk], None]


class InFlightChunks:
    """Requests for an engine from one lease after another, and their answers."""

    def __init__(self, engine: Engine, farm: FarmFile, read: Callable[[int], list[Prompt]]) -> None:
        self.open: dict[int, InFlightChunk] = {}
        self._engine = engine
        self._farm = farm
        self._read = read
        self._sampling = farm.sampling
        self._asked: dict[int, tuple[InFlightChunk, Prompt, AnswerKey]] = {}
        self._times: deque[float] = deque(maxlen=NUM_RECENT_TIMES)
        self.timings: deque[Done] = deque(maxlen=MAX_TIMINGS)
        """The answers' ends, without their texts."""

    @property
    def chunk_seconds(self) -> float | None:
        """Median time of the last chunks; None before the first."""
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
        """One request's end. An error that is not the prompt's is raised."""
        chunk, prompt, key = self._asked.pop(number)
        self.take_end(chunk, prompt, key, end)
        if chunk.is_whole:
            self.close(chunk, commit)

    def take_end(
        self, chunk: InFlightChunk, prompt: Prompt, key: AnswerKey, end: Done | Failed
    ) -> None:
        if isinstance(end, Done):
            row = to_json_line(make_row(prompt, key.sample, end, self._farm.is_raw))
            chunk.answers[key] = AnsweredRow(row, end.num_prompt_tokens, end.num_new_tokens)
            self.timings.append(replace(end, text=""))
        elif isinstance(end.error, UserError) and not isinstance(end.error, EngineLostError):
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
        self.num_vocabulary = engine.num_vocabulary
        self.logits = engine.logits
        self.embed = engine.embed
        self.add_adapters = engine.add_adapters
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
        path = f"suspect/{lease.chunk:08d}/{prompt.index}"
        kept = store.look(f"{path}.kept")
        if kept is not None:
            _restore_prompt(chunk, kept.content)
        elif (note := _record_attempt(store, path)) is not None:
            if not _answer_alone(engine, work, chunk, prompt):
                store.create(f"{note}.stopped")
                return None
            store.publish(f"{path}.kept", _pack_prompt(chunk, prompt.index))
        else:
            error = UserError(
                f"{prompt.place}: every worker that tried to answer it died.",
                remedy="the farm's logs say of what; a smaller --context or --parallel may do",
            )
            for key in chunk.keys:
                if key.prompt == prompt.index:
                    chunk.fail(key, error)
    return chunk


def _record_attempt(store: Store, path: str) -> str | None:
    """The note of a try that may begin; None after too many deaths, stops not counted."""
    num_deaths = number = 0
    while num_deaths < MAX_SOLO_ATTEMPTS:
        note = f"{path}.{number}"
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


PARTITION_VARIABLE = "TIGHTFIT_FARM_PARTITION"
POLL_SECONDS = 0.5
WORKERS_PER_POLL_SECOND = 200
"""An idle worker looks less often where there are many, so that the file server is not swamped."""

OpenEngine = Callable[[EngineRequest], Engine]
_Result = TypeVar("_Result")


def run_worker(
    folder: Path,
    *,
    partition: str = "local",
    open_engine: OpenEngine | None = None,
    hand_stop: Callable[[Callable[[], None]], None] | None = None,
) -> int:
    """Work until nothing is left (0), or until asked to stop (EXIT_REQUEUE).

    SIGUSR1: finish what is under way and take no more. SIGTERM: give everything back now.
    `hand_stop` gets a function that does the same as SIGTERM, for whoever cannot send one.
    """
    # In this order: whether the farm was begun anew meanwhile is then seen below.
    store = None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        store = FolderStore(folder)
    farm = read_farm(folder)
    if store is None or farm is None:
        raise NotFoundError(
            f"There is no farm in {folder}.", remedy="tightfit farm MODEL --prompts FILE"
        )
    if (folder / FINISHED).exists():
        return 0
    worker = _Worker(folder, store, farm, _identify(partition))
    if not store.is_at(folder):
        return EXIT_REQUEUE  # begun anew just now: what we have read may be of both
    if hand_stop is not None:
        hand_stop(worker.stop)
    with worker.signals_handled():
        return worker.run(open_engine or _open_engine)


class _StopRequestedError(Exception):
    """A signal came while loading, which nothing else can end."""


class _Worker:
    def __init__(
        self, folder: Path, store: FolderStore, farm: FarmFile, identity: WorkerIdentity
    ) -> None:
        self.identity = identity
        self._farm = farm
        self._store = store
        self._snapshot = PromptSnapshot(folder)
        self._leases = Leases(
            self._store,
            farm.shape,
            identity.worker,
            seconds=farm.lease_seconds,
            rng=random.Random(identity.worker),
        )
        every_s = choose_heartbeat_seconds(farm.lease_seconds, farm.num_workers)
        self._heartbeat = Heartbeat(self._store, self._leases, identity, every_s=every_s)
        self._engine: InterruptibleEngine | None = None
        self._load_seconds = 0.0
        self._is_draining = False
        self._is_stopping = threading.Event()
        self._quarantined: list[Lease] = []
        self._left: list[Lease] = []
        self._is_all_taken = False
        self._next_look_s = 0.0
        self._poll_s = min(
            farm.lease_seconds / 4, max(POLL_SECONDS, farm.num_workers / WORKERS_PER_POLL_SECOND)
        )

    def run(self, open_engine: OpenEngine) -> int:
        self._leases.join()
        reason = LeaveReason.BROKEN
        with self._heartbeat.beating(self.stop):
            try:
                self._load(open_engine)
                is_over = self._work()
                reason = LeaveReason.STOPPED
                self._heartbeat.update(state="ended" if is_over else "stopped")
                return 0 if is_over else EXIT_REQUEUE
            except _StopRequestedError:
                reason = LeaveReason.STOPPED
                self._heartbeat.update(state="stopped")
                return EXIT_REQUEUE
            except BaseException as error:
                if isinstance(error, OSError):
                    reason = LeaveReason.STOPPED  # the disk failed: no prompt is to be suspected
                problem = error.problem if isinstance(error, UserError) else repr(error)
                self._heartbeat.update(state="broken", error=problem[:400])
                raise
            finally:
                for update in (self._heartbeat.write, lambda: self._leases.leave(reason)):
                    with contextlib.suppress(OSError):  # a full disk, or the farm was removed
                        update()
                self._snapshot.close()
                if self._engine is not None:
                    self._engine.close()

    def stop(self) -> None:
        """Give everything back, from any thread."""
        self._is_stopping.set()
        if self._engine is not None:
            self._engine.stop()

    @contextlib.contextmanager
    def signals_handled(self) -> Iterator[None]:
        def handle(number: int, _frame: object) -> None:
            if number == signal.SIGUSR1:
                self._is_draining = True
                return
            was_stopping = self._is_stopping.is_set()
            self.stop()
            if self._engine is None and not was_stopping:
                raise _StopRequestedError

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = [signal.signal(number, handle) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _load(self, open_engine: OpenEngine) -> None:
        began = time.monotonic()
        engine = open_engine(self._farm.engine.to_request())
        self._engine = InterruptibleEngine(engine)
        self._load_seconds = time.monotonic() - began
        info = engine.info
        self._heartbeat.update(
            state="working",
            engine=info.engine,
            device=info.device,
            num_slots=info.num_slots,
            loaded_s=self._leases.beat(),
            load_seconds=self._load_seconds,
        )
        self._heartbeat.write()

    def _work(self) -> bool:
        """Whether everything is done, by us or others."""
        assert self._engine is not None
        work = InFlightChunks(self._engine, self._farm, self._snapshot.read)
        began_s, core_seconds = time.monotonic(), time.process_time()
        while not (self._is_stopping.is_set() or self._is_draining):
            with self._heartbeat.timed("busy_seconds"):
                self._answer(work)
                while self._quarantined and not self._is_stopping.is_set():
                    lease = self._quarantined.pop()
                    prompts = self._snapshot.read(lease.chunk)
                    chunk = answer_quarantined(self._engine, work, self._store, lease, prompts)
                    if chunk is not None:
                        work.close(chunk, self._commit)
            if self._is_stopping.is_set() or self._leases.is_finished():
                break
            if self._take_left(work.chunk_seconds) is None:
                self._heartbeat.update(state="waiting")
                with self._heartbeat.timed("idle_seconds"):
                    self._is_stopping.wait(self._poll_s * random.uniform(0.75, 1.25))
                self._heartbeat.update(state="working")
        is_over = self._leases.is_finished()
        if is_over and work.timings:
            wall = max(time.monotonic() - began_s, 1e-9)
            self._report_usage(work.timings, (time.process_time() - core_seconds) / wall)
        return is_over

    def _report_usage(self, timings: Sequence[Done], num_busy_cores: float) -> None:
        """What limited us. The engine is closed first: the device's limits are measured alone."""
        assert self._engine is not None
        self._engine.close()
        info = self._engine.info
        num_threads = count_threads(self._farm.engine.threads)
        measured = RunMeasurements(
            load_seconds=self._load_seconds,
            is_offloaded="cuda" in info.device and "cpu" in info.device,
            cores_fraction=num_busy_cores / num_threads if info.device == "cpu" else None,
        )
        self._heartbeat.update(usage=sum_worker(self._farm, info, list(timings), measured))

    def _answer(self, work: InFlightChunks) -> None:
        assert self._engine is not None
        requests = work.requests(self._next_lease, self._commit)
        ends = answer_all(self._engine, requests)
        try:
            for number, end in ends:
                is_cancelled = isinstance(end, Done) and end.reason is FinishReason.CANCELLED
                if is_cancelled or self._is_stopping.is_set():
                    return
                work.take(number, end, self._commit)
                self._heartbeat.update(num_leases=len(work.open))
        finally:
            work.open.clear()
            self._heartbeat.update(num_leases=0)

    def _next_lease(self) -> Lease | None:
        """The next chunk for a free place in the engine; None where none is to be had now."""
        if self._left:
            return self._left.pop()
        if self._is_draining or self._is_stopping.is_set():
            return None
        if not self._is_all_taken:
            lease = self._retry_on_full_disk(self._leases.claim_fresh)
            if lease is not None:
                return lease
            self._is_all_taken = True
        if time.monotonic() < self._next_look_s:
            return None
        self._take_left(None)
        return self._left.pop() if self._left else None

    def _take_left(self, own_seconds: float | None) -> Lease | None:
        """What others have left behind, put where it will be done."""
        lease = self._retry_on_full_disk(lambda: self._leases.claim_left(own_seconds=own_seconds))
        if lease is None:
            self._next_look_s = time.monotonic() + self._poll_s
            return None
        self._heartbeat.count_taken(lease.note.why)
        (self._quarantined if lease.is_quarantined else self._left).append(lease)
        return lease

    def _commit(self, chunk: InFlightChunk) -> None:
        head, content = pack_in_flight_chunk(chunk, self.identity)
        is_first = self._retry_on_full_disk(lambda: self._leases.commit(chunk.lease, content))
        self._heartbeat.count_chunk(head, is_first=is_first)

    def _retry_on_full_disk(self, call: Callable[[], _Result]) -> _Result:
        """A full disk is waited for, as long as others would wait for us."""
        until_s = time.monotonic() + self._farm.lease_seconds
        while True:
            try:
                return call()
            except OSError as error:
                is_late = time.monotonic() > until_s
                if is_farm_removed(error) or is_late or self._is_stopping.wait(self._poll_s):
                    raise


def _open_engine(request: EngineRequest) -> Engine:
    from tightfit.engines.open import open_engine
    from tightfit.runtime.libraries import silence_libraries

    silence_libraries()
    return open_engine(request)


def _identify(partition: str) -> WorkerIdentity:
    node, environ = socket.gethostname(), os.environ
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{partition}-{node}-{os.getpid()}")
    job = environ.get("SLURM_JOB_ID") or str(os.getpid())
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return WorkerIdentity(
        worker=f"{name[:80]}-{secrets.token_hex(3)}", node=node, partition=partition, job=job
    )


def main(words: list[str] | None = None, *, open_engine: OpenEngine | None = None) -> int:
    """The command line of a worker; every error becomes one line in its log."""
    parser = argparse.ArgumentParser(prog="python -m tightfit.farming.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--partition", default=os.environ.get(PARTITION_VARIABLE, "local"))
    given = parser.parse_args(words)
    try:
        return run_worker(given.folder, partition=given.partition, open_engine=open_engine)
    except Exception as error:
        print(describe_failure(error), file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, UserError) else EXIT_BUG


def describe_failure(error: Exception) -> str:
    """The end of a worker's log, which the submitter reports where no worker gets on."""
    if isinstance(error, UserError):
        return error.as_lines()
    return disarm(f"broken: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
