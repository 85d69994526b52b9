"""A farm of 1,000 workers and 1,000,000 prompts: the real lease code on a simulated clock.

python benchmarks/farm_simulation.py [--check]

Workers are events on a simulated clock; what they claim, take over and commit goes through
`tightfit.farming.leases` on a store in memory that counts every operation and the requests to a
file server behind it. The engine is a rate. One worker in a hundred dies in the middle.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _provenance import write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from memory_store import MemoryStore
from tightfit.farming.folder import ChunkLayout, choose_chunk_layout, done_path
from tightfit.farming.heartbeat import choose_heartbeat_seconds
from tightfit.farming.leases import FINISHED, Lease, Leases
from tightfit.farming.store import FolderStore
from tightfit.farming.worker import POLL_SECONDS, WORKERS_PER_POLL_SECOND

RESULT = Path(__file__).parent / "results" / "farm_simulation.json"
NUM_PROMPTS = 1_000_000
CASES = (10, 100, 1_000, 2_000)
LEASE_SECONDS = 60.0
KINDS = ((0.1, 10.0, 64), (0.3, 3.0, 32), (0.6, 0.3, 4))
"""Share of the workers, prompts a second, prompts under way: new GPUs, old GPUs, CPU nodes."""
DEATH_FRACTION = 0.01
SERVER_REQUESTS_PER_SECOND = 20_000
"""What a file server of the middle class takes of such small requests."""
NOISE = 0.25
"""By which requests per prompt may grow before `--check` fails."""


class Simulation:
    """All workers on one clock."""

    def __init__(self, num_workers: int, *, seed: int = 0) -> None:
        self.now_s = 0.0
        self.store = MemoryStore(lambda: self.now_s)
        self.shape = choose_chunk_layout(NUM_PROMPTS, num_workers)
        self.per_second: Counter[int] = Counter()
        self.whys: Counter[str] = Counter()
        self.num_discarded = 0
        self.last_commit_s = 0.0
        self.busy_end_s = 0.0
        """When the last fresh chunk was claimed: until then every worker has enough to do."""
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, Any]] = []
        self._count = itertools.count()
        self._poll_s = max(POLL_SECONDS, num_workers / WORKERS_PER_POLL_SECOND)
        self.workers = [_Worker(self, number, num_workers) for number in range(num_workers)]

    @property
    def rate(self) -> float:
        """Of all workers together, in prompts a second."""
        return sum(worker.rate for worker in self.workers)

    def at(self, seconds: float, call: Any) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._count), call))

    def run(self) -> None:
        expected = self.shape.num_prompts / self.rate
        for worker in self.workers:
            self.at(self._chance.uniform(0, 5), worker.start)
            if self._chance.random() < DEATH_FRACTION:
                self.at(self._chance.uniform(0.1, 0.9) * expected, worker.die)
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            before = self.store.num_requests
            call()
            self.per_second[int(self.now_s)] += self.store.num_requests - before

    def poll_seconds(self) -> float:
        return min(LEASE_SECONDS / 4, self._poll_s) * self._chance.uniform(0.75, 1.25)

    def jitter(self) -> float:
        return self._chance.uniform(0.5, 1.5)


class _Worker:
    """The loop of `tightfit.farming.worker`, with a rate in place of an engine."""

    def __init__(self, world: Simulation, number: int, num_workers: int) -> None:
        self.rate, in_flight = _kind_of((number + 0.5) / num_workers)
        self._beat_s = choose_heartbeat_seconds(LEASE_SECONDS, num_workers)
        self._world = world
        self._width = max(1, in_flight // world.shape.prompts_per_chunk)
        self._chunk_s = world.shape.prompts_per_chunk * self._width / self.rate
        self._leases = Leases(
            world.store,
            world.shape,
            f"w{number}",
            seconds=LEASE_SECONDS,
            rng=random.Random(number),
        )
        self._open: dict[int, Lease] = {}
        self._is_all_taken = False
        self._is_over = False
        self._is_polling = False

    def start(self) -> None:
        self._leases.join()
        self._beat()
        self._fill()

    def die(self) -> None:
        self._is_over = True

    def _beat(self) -> None:
        if self._is_over:
            return
        self._leases.beat()
        self._world.store.replace(f"workers/{self._leases.worker}.json", b"status")
        if self._world.store.look(FINISHED) is not None:
            self._is_over = True
        self._world.at(self._beat_s, self._beat)

    def _fill(self) -> None:
        while len(self._open) < self._width and not self._is_all_taken:
            lease = self._leases.claim_fresh()
            if lease is None:
                self._is_all_taken = True
            else:
                self._world.busy_end_s = self._world.now_s
                self._begin(lease)
        if not self._open and not self._is_polling:
            self._poll()

    def _begin(self, lease: Lease) -> None:
        self._open[lease.chunk] = lease
        self._world.whys[lease.note.why.value] += 1
        self._world.at(self._chunk_s * self._world.jitter(), lambda: self._end(lease))

    def _end(self, lease: Lease) -> None:
        if self._is_over:
            return
        del self._open[lease.chunk]
        if self._leases.commit(lease, b"answers"):
            self._world.last_commit_s = self._world.now_s
        else:
            self._world.num_discarded += 1
        self._fill()

    def _poll(self) -> None:
        self._is_polling = False
        if self._is_over or self._open:
            return
        if self._leases.is_finished():
            self._is_over = True
            return
        lease = self._leases.claim_left(own_seconds=self._chunk_s)
        if lease is not None:
            self._begin(lease)
            return
        self._is_polling = True
        self._world.at(self._world.poll_seconds(), self._poll)


def _kind_of(share: float) -> tuple[float, int]:
    """Rate and prompts under way of the worker at this place in the mixture."""
    for fraction, rate, in_flight in KINDS:
        share -= fraction
        if share < 0:
            return rate, in_flight
    return KINDS[-1][1:]


def simulate(num_workers: int) -> dict[str, Any]:
    """One case, and a check that every chunk is there."""
    began = time.monotonic()
    world = Simulation(num_workers)
    world.run()
    shape = world.shape
    calls, requests = dict(world.store.calls), world.store.num_requests
    missing = sum(
        world.store.look(done_path(shape, chunk)) is None for chunk in range(shape.num_chunks)
    )
    steady = [world.per_second[second] for second in range(10, int(world.busy_end_s))]
    ending = range(int(world.busy_end_s), int(world.last_commit_s) + 1)
    mean = sum(steady) / max(1, len(steady))
    return {
        "num_workers": num_workers,
        "num_prompts": NUM_PROMPTS,
        "prompts_per_chunk": shape.prompts_per_chunk,
        "num_chunks": shape.num_chunks,
        "num_missing": missing,
        "leases": dict(world.whys),
        "num_discarded": world.num_discarded,
        "calls": calls,
        "calls_per_prompt": sum(calls.values()) / NUM_PROMPTS,
        "requests_per_prompt": requests / NUM_PROMPTS,
        "requests_per_second_steady": mean,
        "requests_per_second_peak": max(world.per_second.values()),
        "requests_per_second_end": max((world.per_second[s] for s in ending), default=0),
        "server_fraction_steady": mean / SERVER_REQUESTS_PER_SECOND,
        "seconds": world.last_commit_s,
        "ideal_seconds": NUM_PROMPTS / world.rate,
        "efficiency": NUM_PROMPTS / world.rate / world.last_commit_s,
        "took_seconds": time.monotonic() - began,
    }


def measure_files(num_chunks: int = 2_000) -> dict[str, float]:
    """Claims and commits on a real folder of this machine, one worker: seconds each."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("lease", "done", "taken", "full", "tmp", "workers"):
            (root / folder).mkdir()
        shape = ChunkLayout(num_prompts=num_chunks, prompts_per_chunk=1)
        store = FolderStore(root)
        leases = Leases(store, shape, "w", seconds=60, rng=random.Random(0))
        leases.join()
        began = time.monotonic()
        held = [leases.claim_fresh() for _ in range(num_chunks)]
        claimed = time.monotonic()
        content = b"x" * 16_000
        for lease in held:
            assert lease is not None
            assert leases.commit(lease, content)
        ended = time.monotonic()
    return {
        "claim_seconds": (claimed - began) / num_chunks,
        "commit_seconds": (ended - claimed) / num_chunks,
    }


def extrapolate(case: dict[str, Any]) -> list[dict[str, Any]]:
    """On paper: more workers of the same mixture, at the same prompts per worker and second.

    What a chunk costs and what a beat costs do not depend on the number of workers; listing the
    marks of the buckets grows with the buckets, once per bucket.
    """
    rate = case["num_prompts"] / case["ideal_seconds"] / case["num_workers"]
    rows = []
    for num_workers in (1_000, 4_000, 10_000, 40_000):
        for prompts_per_chunk in (1, 16, 64):
            beats = 6 / choose_heartbeat_seconds(
                LEASE_SECONDS, num_workers
            )  # a beat, a status, is it over?
            per_chunk = 3 + 6 + 0.5  # a lease, a publication, its part of listings and marks
            load = num_workers * (beats + rate / prompts_per_chunk * per_chunk)
            rows.append(
                {
                    "num_workers": num_workers,
                    "prompts_per_chunk": prompts_per_chunk,
                    "prompts_per_second": num_workers * rate,
                    "requests_per_second": load,
                    "server_fraction": load / SERVER_REQUESTS_PER_SECOND,
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where it got worse")
    options = parser.parse_args()
    cases = []
    for num_workers in (1_000,) if options.check else CASES:
        case = simulate(num_workers)
        cases.append(case)
        print(
            f"{num_workers:>6,} workers, {case['prompts_per_chunk']} prompts a chunk: "
            f"{case['requests_per_prompt']:.2f} requests a prompt, "
            f"{case['requests_per_second_steady']:,.0f} a second "
            f"(peak {case['requests_per_second_peak']:,}), "
            f"efficiency {case['efficiency']:.3f}, {case['num_missing']} missing, "
            f"{case['num_discarded']} discarded, {case['took_seconds']:.0f} s",
            flush=True,
        )
    if options.check:
        return _check(cases[0])
    paper = extrapolate(next(case for case in cases if case["num_workers"] == 1_000))
    write_result(
        RESULT,
        "benchmarks/farm_simulation.py",
        server_requests_per_second=SERVER_REQUESTS_PER_SECOND,
        cases=cases,
        this_machine=measure_files(),
        on_paper=paper,
    )
    return 0


def _check(case: dict[str, Any]) -> int:
    before = next(
        found
        for found in json.loads(RESULT.read_text())["cases"]
        if found["num_workers"] == case["num_workers"]
    )
    is_worse = case["requests_per_prompt"] > (1 + NOISE) * before["requests_per_prompt"]
    print("error: more requests a prompt" if is_worse else "farm: all good")
    return 1 if is_worse or case["num_missing"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
