"""One worker of a farm: loads a model once, takes chunks until none is left, says how it goes.

`python -m tightfit.farming.worker FOLDER` is what schedulers start. A test, or a program with an
engine of its own, calls `run_worker(folder, open_engine=...)`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from tightfit.core.errors import EXIT_BUG, EXIT_REQUEUE, NotFoundError, UserError
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import Done, Engine, FinishReason, answer_all
from tightfit.farming.folder import FarmFile, PromptSnapshot, read_farm
from tightfit.farming.heartbeat import Heartbeat, choose_heartbeat_seconds
from tightfit.farming.in_flight import (
    InFlightChunk,
    InFlightChunks,
    InterruptibleEngine,
    WorkerIdentity,
    answer_quarantined,
    pack_in_flight_chunk,
)
from tightfit.farming.leases import FINISHED, Lease, Leases, LeaveReason
from tightfit.farming.store import FolderStore, is_farm_removed

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
    store = _open_store(folder)
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
    """Told to stop while loading, which nothing else can end."""


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
                    reason = LeaveReason.STOPPED  # a disk's fault: no prompt is to be suspected
                problem = error.problem if isinstance(error, UserError) else repr(error)
                self._heartbeat.update(state="broken", error=problem[:400])
                raise
            finally:
                for update in (self._heartbeat.write, lambda: self._leases.leave(reason)):
                    with contextlib.suppress(OSError):  # a full disk, or the farm was taken away
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
        info = engine.info
        self._heartbeat.update(
            state="working",
            engine=info.engine,
            device=info.device,
            num_slots=info.num_slots,
            loaded_s=self._leases.beat(),
            load_seconds=time.monotonic() - began,
        )
        self._heartbeat.write()

    def _work(self) -> bool:
        """Whether everything is done, by us or others."""
        assert self._engine is not None
        work = InFlightChunks(self._engine, self._farm, self._snapshot.read)
        while not (self._is_stopping.is_set() or self._is_draining):
            with self._heartbeat.timed("busy_seconds"):
                self._answer(work)
                while self._quarantined and not self._is_stopping.is_set():
                    self._answer_quarantined(work, self._quarantined.pop())
            if self._is_stopping.is_set() or self._leases.is_finished():
                break
            lease = self._take_left(work.chunk_seconds)
            if lease is None:
                self._heartbeat.update(state="waiting")
                with self._heartbeat.timed("idle_seconds"):
                    self._is_stopping.wait(self._poll_s * random.uniform(0.75, 1.25))
                self._heartbeat.update(state="working")
        return self._leases.is_finished()

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

    def _answer_quarantined(self, work: InFlightChunks, lease: Lease) -> None:
        assert self._engine is not None
        prompts = self._snapshot.read(lease.chunk)
        chunk = answer_quarantined(self._engine, work, self._store, lease, prompts)
        if chunk is not None:
            work.close(chunk, self._commit)

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


def _open_store(folder: Path) -> FolderStore | None:
    try:
        return FolderStore(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _open_engine(request: EngineRequest) -> Engine:
    from tightfit.engines.open import open_engine
    from tightfit.runtime.libraries import silence_libraries

    silence_libraries()
    return open_engine(request)


def _identify(partition: str) -> WorkerIdentity:
    node = socket.gethostname()
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{partition}-{node}-{os.getpid()}")
    return WorkerIdentity(
        worker=f"{name[:80]}-{secrets.token_hex(3)}",
        node=node,
        partition=partition,
        job=_scheduler_name(os.environ),
    )


def _scheduler_name(environ: Mapping[str, str]) -> str | None:
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID") or str(os.getpid())


def main(words: list[str] | None = None, *, open_engine: OpenEngine | None = None) -> int:
    """The command line of a worker; every fault becomes one line in its log."""
    parser = argparse.ArgumentParser(prog="python -m tightfit.farming.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--partition", default=os.environ.get(PARTITION_VARIABLE, "local"))
    given = parser.parse_args(words)
    try:
        return run_worker(given.folder, partition=given.partition, open_engine=open_engine)
    except UserError as error:
        print(f"error: {error.problem}\n  try: {error.remedy}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        print(f"broken: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_BUG


if __name__ == "__main__":
    sys.exit(main())
