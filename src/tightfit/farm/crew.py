"""The workers that were started: noted on the disk, counted, topped up and stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from tightfit.core.errors import EnvironmentFaultError
from tightfit.core.files import write_atomic
from tightfit.farm.places import Place, PlaceKind

JOBS_FILE = "jobs.json"
SPARE_STARTS = 8
"""Starts without a single answer, beside two for each worker, after which something is wrong."""


class StartedJob(BaseModel):
    """One start: processes here, an array, a Job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str
    kind: PlaceKind
    names: tuple[str, ...]
    """Process ids with their start times, an array's number, a Job's name."""
    num_workers: PositiveInt
    host: str | None = None


class Starter(Protocol):
    """One way to start workers."""

    def start(self, place: Place, count: int) -> StartedJob: ...

    def count_alive(self, jobs: Sequence[StartedJob]) -> int:
        """Workers that run or will run."""

    def find_lost(self, place: Place, known: Sequence[StartedJob]) -> list[StartedJob]:
        """Those that were started just before a submitter died, and never noted."""

    def stop(self, jobs: Sequence[StartedJob]) -> None: ...


_JOBS = TypeAdapter(tuple[StartedJob, ...])


class Crew:
    """All workers of one farm."""

    def __init__(
        self, folder: Path, places: Sequence[Place], starters: Mapping[PlaceKind, Starter]
    ) -> None:
        self.jobs: list[StartedJob] = list(read_jobs_file(folder))
        self._folder = folder
        self._places = places
        self._starters = starters
        self._num_in_vain: dict[str, int] = {}
        for place in places:
            self.jobs += starters[place.kind].find_lost(place, self.jobs)

    def top_up(self, *, num_left: int, tell: Callable[[str], None]) -> int:
        """Start what is missing, at most one worker for each chunk that is left; how many."""
        started = 0
        for place in self._places:
            wanted = min(place.num_workers, num_left)
            missing = wanted - self.count_alive(place)
            if missing <= 0:
                continue
            self._refuse_in_vain(place, missing)
            job = self._starters[place.kind].start(place, missing)
            self.jobs.append(job)
            self._write()
            started += missing
            tell(f"{place.name}: started {missing} ({', '.join(job.names[:4])})")
        return started

    def count_alive(self, place: Place) -> int:
        mine = [job for job in self.jobs if job.place == place.name and job.kind is place.kind]
        return self._starters[place.kind].count_alive(mine) if mine else 0

    def note_progress(self) -> None:
        self._num_in_vain.clear()

    def stop(self) -> None:
        """Tell every worker to give back what it has and end."""
        for kind, starter in self._starters.items():
            jobs = [job for job in self.jobs if job.kind is kind]
            if jobs:
                starter.stop(jobs)

    def _refuse_in_vain(self, place: Place, missing: int) -> None:
        """Before the same start fails again and again."""
        count = self._num_in_vain.get(place.name, 0)
        if count >= SPARE_STARTS + 2 * place.num_workers:
            last = _last_words(self._folder)
            raise EnvironmentFaultError(
                f"Workers in {place.name} end without an answer{f': {last}' if last else ''}.",
                remedy=f"see {self._folder / 'logs'}; the same command goes on",
            )
        self._num_in_vain[place.name] = count + missing

    def _write(self) -> None:
        content = _JOBS.dump_json(tuple(self.jobs), indent=1)
        write_atomic(self._folder / JOBS_FILE, content + b"\n")


def read_jobs_file(folder: Path) -> tuple[StartedJob, ...]:
    try:
        return _JOBS.validate_json((folder / JOBS_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return ()


def _last_words(folder: Path) -> str:
    """The last line of the newest log, without its end mark."""
    logs = sorted((folder / "logs").glob("*"), key=lambda path: path.stat().st_mtime)
    for path in reversed(logs):
        lines = path.read_bytes()[-4000:].decode("utf-8", "replace").strip().splitlines()
        told = [line for line in lines if line.startswith(("error: ", "broken: "))] or lines
        if told:
            return told[-1].removeprefix("error: ").removeprefix("broken: ").rstrip(".")[:300]
    return ""
