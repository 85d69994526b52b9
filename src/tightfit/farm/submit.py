"""The submitter: writes the folder, sees that workers run, watches, and collects at the end.

It may be killed at any moment. The folder holds everything; the same command finds it, the
workers that still run, and goes on.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UsageError
from tightfit.core.files import write_atomic
from tightfit.engines.open import EngineRequest
from tightfit.farm.collect import (
    Collected,
    clear,
    collect,
    find_missing,
    is_collected,
    read_output_note,
    reopen,
    write_output_note,
)
from tightfit.farm.crew import Crew, Starter
from tightfit.farm.folder import (
    FarmFile,
    describe_engine,
    describe_sampling,
    farm_path,
    make_farm,
    read_farm,
    remove_farm,
)
from tightfit.farm.leases import FINISHED, beat_path
from tightfit.farm.places import Place, PlaceKind
from tightfit.farm.progress import Lookout, Progress
from tightfit.farm.results import read_chunk
from tightfit.farm.shape import choose_shape, done_path
from tightfit.farm.sole import claim_sole, require_sole
from tightfit.farm.statistics import FarmStatistics, sum_farm
from tightfit.farm.status import read_statuses, status_path
from tightfit.farm.store import FolderStore
from tightfit.serve.generate.job import GenerateJob
from tightfit.serve.generate.journal import Settings, differences, require_folder

POLL_SECONDS = 1.0
CREW_SECONDS = {PlaceKind.LOCAL: 1.0}
MOST_CREW_SECONDS = 10.0
"""Between looks at who still runs: a scheduler is not to be asked every second."""
STATISTICS_FILE = "statistics.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmOrder:
    """What is to be farmed, and where its answers go."""

    out: Path
    job: GenerateJob
    request: EngineRequest
    settings: Settings
    num_workers: int
    lease_seconds: float
    is_fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmEnd:
    """What came of it."""

    statistics: FarmStatistics
    collected: Collected


Watch = Callable[[Progress], None]
Tell = Callable[[str], None]


def open_farm(order: FarmOrder) -> tuple[Path, FarmFile, bool]:
    """The folder to work in, and whether its output is finished already."""
    require_folder(order.out)
    folder = farm_path(order.out.absolute())
    if order.is_fresh:
        require_sole(folder, str(order.out))
        remove_farm(folder)
    farm = read_farm(folder)
    if farm is not None:
        _require_same(order, farm)
        if is_collected(folder, order.out):
            clear(folder)  # where a submitter died before it did
            return folder, farm, True
        if not (folder / "lease").is_dir():  # finished once, and the output changed or taken away
            _refuse_changed(order.out)
            remove_farm(folder)
            farm = None
    if farm is not None:
        return folder, _follow(order, farm), False
    if os.path.lexists(order.out) and not order.is_fresh:
        raise UsageError(
            f"{order.out} exists already.",
            remedy="--out OTHER keeps it, and --fresh replaces it when the answers are there",
        )

    seed = order.job.sampling.seed
    farm = FarmFile(
        out=str(order.out.absolute()),
        settings=dict(order.settings),
        seed=secrets.randbelow(2**31) if seed is None else seed,
        shape=choose_shape(len(order.job.prompts), order.num_workers),
        num_samples=order.job.num_samples,
        is_raw=order.job.is_raw,
        sampling=describe_sampling(order.job.sampling),
        engine=describe_engine(order.request),
        num_workers=order.num_workers,
        lease_seconds=order.lease_seconds,
    )
    if not make_farm(folder, farm, order.job.prompts):
        return open_farm(replace(order, is_fresh=False))  # another was quicker
    return folder, farm, False


def read_statistics(folder: Path) -> FarmStatistics:
    """Of a farm that is finished."""
    try:
        return FarmStatistics.model_validate_json((folder / STATISTICS_FILE).read_bytes())
    except (OSError, ValidationError) as fault:
        raise NotFoundError(
            f"The statistics in {folder} are not there, or cannot be read.",
            remedy="leave --stats out; --fresh makes the answers and their statistics again",
        ) from fault


def _follow(order: FarmOrder, farm: FarmFile) -> FarmFile:
    """What answers do not depend on is as this command says: a larger --context, another device."""
    return farm.model_copy(
        update={
            "engine": describe_engine(order.request),
            "num_workers": order.num_workers,
            "lease_seconds": order.lease_seconds,
        }
    )


def _require_same(order: FarmOrder, farm: FarmFile) -> None:
    differing = differences(farm.settings, order.settings)
    if differing:
        raise UsageError(
            f"{order.out} was begun with other settings: {differing}.",
            remedy="--fresh begins again, --out OTHER keeps both, the former settings go on",
        )


def _refuse_changed(out: Path) -> None:
    if os.path.lexists(out):
        raise UsageError(
            f"{out} was finished and has been changed since.",
            remedy="--out OTHER keeps it, and --fresh replaces it",
        )


class Submitter:
    """One run of the command over one folder."""

    def __init__(
        self,
        folder: Path,
        farm: FarmFile,
        places: Sequence[Place],
        starters: Mapping[PlaceKind, Starter],
    ) -> None:
        self._folder = folder
        self._farm = farm
        self._store = FolderStore(folder)
        self._crew_s = max(CREW_SECONDS.get(place.kind, MOST_CREW_SECONDS) for place in places)
        self._mine = self._claim()
        self._reopen_lost()
        over = ("ended", "stopped", "broken")
        self._former = {s.worker for s in read_statuses(folder) if s.state in over}
        self._crew = Crew(folder, places, starters)

    def run(self, watch: Watch, tell: Tell) -> FarmEnd:
        """Until every chunk is done; then the output."""
        try:
            self._watch(watch, tell)
            return self._finish()
        except OSError as fault:
            raise self._explain(fault) from fault

    def _watch(self, watch: Watch, tell: Tell) -> None:
        lookout = Lookout(self._folder, self._farm)
        crew_due_s, num_done = 0.0, -1
        while True:
            progress = lookout.look()
            self._store.beat(self._mine)
            watch(progress)
            if progress.is_finished:
                return
            if progress.num_done > num_done:
                num_done = progress.num_done
                self._crew.note_progress()
            if time.monotonic() >= crew_due_s:
                self._refuse_unloadable()
                self._crew.top_up(num_left=progress.num_chunks - progress.num_done, tell=tell)
                crew_due_s = time.monotonic() + self._crew_s
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End every worker; everything that was answered is kept."""
        self._crew.stop()

    def _finish(self) -> FarmEnd:
        collected = collect(self._folder, self._farm, Path(self._farm.out))
        self._crew.stop()
        statuses = read_statuses(self._folder)  # with the last words of those who ended
        statistics = sum_farm(
            collected.heads,
            statuses,
            farm=self._farm,
            num_failed=len(collected.failures),
            commits_s=collected.commits_s,
        )
        write_atomic(self._folder / STATISTICS_FILE, statistics.model_dump_json(indent=1) + "\n")
        write_output_note(self._folder, collected.note)
        if not collected.failures:
            clear(self._folder)
        return FarmEnd(statistics=statistics, collected=collected)

    def _refuse_unloadable(self) -> None:
        """Where no worker of ours could load the model, no other will."""
        statuses = [s for s in read_statuses(self._folder) if s.worker not in self._former]
        told = [status.fault for status in statuses if status.state == "broken"]
        if not told or len(told) < len(statuses) or any(s.loaded_s for s in statuses):
            return
        self._crew.stop()
        for status in statuses:  # none of them had a lease; the next try counts anew
            for path in (status_path(status.worker), beat_path(status.worker)):
                (self._folder / path).unlink(missing_ok=True)
        raise EnvironmentFaultError(
            f"No worker could load {self._farm.engine.model}: {str(told[-1]).rstrip('.')}.",
            remedy=f"mend that and give the same command again; logs: {self._folder / 'logs'}",
        )

    def _claim(self) -> str:
        try:
            mine = claim_sole(self._store, self._farm.out)
        except FileNotFoundError:  # cleared by one that has just finished
            self._require_begun()
            raise
        self._require_begun()
        if read_farm(self._folder) != self._farm:
            content = self._farm.model_dump_json(indent=1) + "\n"
            write_atomic(self._folder / "farm.json", content)
        return mine

    def _require_begun(self) -> None:
        """What was opened may have been finished by another, or begun anew, until we had it."""
        found = read_farm(self._folder)
        is_same = found is not None and found.is_same_work(self._farm)
        if not is_same or not (self._folder / "lease").is_dir():
            raise UsageError(
                f"Another `tightfit farm` has just finished {self._farm.out}, or begun it anew.",
                remedy="give the same command again: it says which",
            )

    def _explain(self, fault: OSError) -> EnvironmentFaultError:
        if self._store.is_at(self._folder):
            return EnvironmentFaultError(
                f"{self._folder}: {fault.strerror or fault}.",
                remedy="mend that and give the same command again; the workers go on meanwhile",
            )
        self._crew.stop()
        return EnvironmentFaultError(
            f"{self._folder} was taken away while workers ran; they were stopped.",
            remedy="the same command begins again",
        )

    def _reopen_lost(self) -> None:
        """A finished farm that comes here has prompts that failed, or lacks a chunk."""
        if not (self._folder / FINISHED).exists():
            return
        chunks = find_missing(self._folder, self._farm)
        note = read_output_note(self._folder)
        if note is not None and note.num_failed:
            chunks += self._failed_chunks(set(chunks))
        if chunks:
            reopen(self._folder, self._farm, chunks)

    def _failed_chunks(self, missing: set[int]) -> list[int]:
        shape = self._farm.shape
        found = []
        for chunk in range(shape.num_chunks):
            if chunk in missing:
                continue
            path = self._folder / done_path(shape, chunk)
            head, _ = read_chunk(path, self._farm.num_keys(chunk))
            if head.failures:
                found.append(chunk)
        return found
