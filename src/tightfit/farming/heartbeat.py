"""A worker's heartbeat, and the status that it writes for progress and statistics."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from tightfit.core.frozen import Frozen
from tightfit.core.reading import read_bytes
from tightfit.farming.leases import FINISHED, LeaseReason, Leases
from tightfit.farming.results import ChunkHeader
from tightfit.farming.store import Store, is_farm_removed
from tightfit.farming.usage import WorkerUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who a worker is."""

    worker: str
    node: str
    partition: str
    job: str | None = None


class WorkerStatus(Frozen):
    """workers/<name>.json. Times ending in `_s` are of the file server's clock."""

    worker: str
    node: str
    partition: str
    job: str | None = None
    """The scheduler's name for the process: `123_4` of a Slurm array, or a process id."""
    state: str = "loading"
    """`loading`, `working`, `waiting`, `ended`, `stopped` or `broken`."""
    engine: str | None = None
    device: str | None = None
    num_slots: int | None = None
    joined_s: float
    loaded_s: float | None = None
    reported_s: float
    """When this was written."""
    last_commit_s: float | None = None
    load_seconds: NonNegativeFloat = 0.0
    busy_seconds: NonNegativeFloat = 0.0
    idle_seconds: NonNegativeFloat = 0.0
    num_leases: NonNegativeInt = 0
    """At present."""
    num_chunks: NonNegativeInt = 0
    num_answers: NonNegativeInt = 0
    num_failed: NonNegativeInt = 0
    num_prompt_tokens: NonNegativeInt = 0
    num_new_tokens: NonNegativeInt = 0
    num_discarded: NonNegativeInt = 0
    """Chunks that another had published first."""
    taken_over: dict[LeaseReason, int] = Field(default_factory=dict)
    error: str | None = None
    usage: WorkerUsage | None = None
    """Of a worker that worked to the end."""


def status_path(worker: str) -> str:
    return f"workers/{worker}.json"


def read_statuses(folder: Path) -> list[WorkerStatus]:
    """Of all workers that ever joined; what cannot be read is left out."""
    found = []
    for path in sorted((folder / "workers").glob("*.json")):
        try:
            found.append(WorkerStatus.model_validate_json(read_bytes(path)))
        except (OSError, ValidationError):
            continue
    return found


HEARTBEATS_PER_LEASE = 4
HEARTBEAT_SECONDS = 5.0
WORKERS_PER_HEARTBEAT_SECOND = 100
"""Many workers beat less often, so that the file server has time for work."""


def choose_heartbeat_seconds(lease_seconds: float, num_workers: int) -> float:
    """Seconds between two beats."""
    wanted = max(HEARTBEAT_SECONDS, num_workers / WORKERS_PER_HEARTBEAT_SECOND)
    return min(lease_seconds / HEARTBEATS_PER_LEASE, wanted)


class Heartbeat:
    """Runs in its own thread, so that a long engine step does not look like a dead worker."""

    def __init__(
        self, store: Store, leases: Leases, identity: WorkerIdentity, *, every_s: float
    ) -> None:
        self._store = store
        self._leases = leases
        self._every_s = every_s
        self._identity = identity
        self._facts: dict[str, Any] = {"taken_over": {}}
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._since: tuple[str, float] | None = None

    @contextlib.contextmanager
    def beating(self, stop: Callable[[], None]) -> Iterator[None]:
        """`stop` is called when the farm is finished or gone."""
        self._now_s = self._leases.beat()
        self._facts["joined_s"] = self._now_s
        self.write()
        is_over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(is_over, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def update(self, **facts: Any) -> None:
        with self._lock:
            self._facts |= facts

    def count_taken(self, why: LeaseReason) -> None:
        with self._lock:
            taken = self._facts["taken_over"]
            taken[why] = taken.get(why, 0) + 1

    def count_chunk(self, head: ChunkHeader, *, is_first: bool) -> None:
        """A chunk was published, or another had been first."""
        with self._lock:
            if not is_first:
                self._add("num_discarded", 1)
                return
            self._add("num_chunks", 1)
            self._add("num_failed", len(head.failures))
            for name in ("num_answers", "num_prompt_tokens", "num_new_tokens"):
                self._add(name, getattr(head, name))
            self._facts["last_commit_s"] = self._now_s

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Seconds inside the block, counted while it lasts too."""
        with self._lock:
            self._since = (name, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._settle()
                self._since = None

    def write(self) -> None:
        with self._lock:
            self._settle()
            status = WorkerStatus(**asdict(self._identity), reported_s=self._now_s, **self._facts)
        self._store.replace(status_path(status.worker), status.model_dump_json().encode())

    def _beat(self, is_over: threading.Event, stop: Callable[[], None]) -> None:
        while not is_over.wait(self._every_s):
            try:
                self._now_s = self._leases.beat()
                self.write()
                if self._store.look(FINISHED) is not None:
                    stop()
                    is_over.wait(self._every_s)  # nothing is left to do but to end
            except OSError as error:
                if is_farm_removed(error):
                    stop()
                    return
                # Else storage that hiccups: the lease lasts for several beats.

    def _settle(self) -> None:
        if self._since is not None:
            name, began = self._since
            now = time.monotonic()
            self._add(name, now - began)
            self._since = (name, now)

    def _add(self, name: str, amount: float) -> None:
        self._facts[name] = self._facts.get(name, 0) + amount
