"""The submitter of a farm: creates the folder, keeps workers running, collects the output.

It may be killed at any moment: the folder holds all state, and the same command resumes it. A lock
in the folder keeps a second submitter out.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import ValidationError

from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.core.files import describe_write_error, write_atomic
from tightfit.core.reading import read_bytes
from tightfit.engines.open import EngineRequest
from tightfit.farming.folder import (
    FarmFile,
    choose_chunk_layout,
    describe_engine,
    done_path,
    farm_path,
    make_farm,
    numbers_in,
    read_farm,
    remove_farm,
)
from tightfit.farming.heartbeat import read_statuses, status_path
from tightfit.farming.leases import FINISHED, heartbeat_path
from tightfit.farming.results import (
    CollectedOutput,
    collect_output,
    count_published_answers,
    find_missing_chunks,
    is_collected,
    read_chunk,
    read_output_record,
    remove_intermediate_files,
    reopen_chunks,
    write_output_record,
)
from tightfit.farming.statistics import FarmProgress, FarmStatistics, ProgressReader, sum_farm
from tightfit.farming.store import FolderStore
from tightfit.farming.worker_pool import WorkerBackend, WorkerGroup, WorkerPool, WorkerStarter
from tightfit.serving.generate.journal import AnswerSettings, check_out_path, describe_differences
from tightfit.serving.generate.run import GenerateJob

# The submitter lock: two submitters would start workers twice and remove files of the other.

SUBMITTERS = "submitters"
SUBMITTER_TIMEOUT_SECONDS = 30.0
"""After which a submitter on another host is taken for dead."""


def acquire_submitter_lock(store: FolderStore, out: str) -> str:
    """The file whose time we set from now on. Refused where another submitter runs."""
    mine = json.dumps(_this_process()).encode()
    while True:
        newest = _require_no_other(store, out)
        if newest >= 0:
            seen = store.look(f"{SUBMITTERS}/{newest}")
            if seen is not None and seen.content == mine:
                return f"{SUBMITTERS}/{newest}"
        if store.publish(f"{SUBMITTERS}/{newest + 1}", mine):
            return f"{SUBMITTERS}/{newest + 1}"


def require_no_other_submitter(folder: Path, out: str) -> None:
    """Refused where another submitter runs; nothing where there is no farm."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _require_no_other(FolderStore(folder), out)


def _require_no_other(store: FolderStore, out: str) -> int:
    """The number of the newest submitter, which is us or dead; -1 where there was none."""
    newest = max(numbers_in(store.names(SUBMITTERS)), default=-1)
    seen = store.look(f"{SUBMITTERS}/{newest}") if newest >= 0 else None
    try:
        owner = {} if seen is None else json.loads(seen.content)
    except ValueError:
        owner = {}
    if seen is None or not owner or owner == _this_process():
        return newest
    if owner.get("host") == socket.gethostname():
        is_alive = _process_start_time(int(owner["pid"])) == owner.get("began")
    else:
        probe = f"tmp/clock-{socket.gethostname()}-{os.getpid()}"
        store.create(probe)
        is_alive = store.beat(probe) - seen.mtime_s < SUBMITTER_TIMEOUT_SECONDS
    if is_alive:
        raise UsageError(
            f"Another `tightfit farm` (process {owner['pid']} on {owner['host']}) watches over "
            f"{out}.",
            remedy=f"wait for it, or end it: kill {owner['pid']}    (its workers go on)",
        )
    return newest


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "began": _process_start_time(pid)}


def _process_start_time(pid: int) -> float | None:
    try:
        return round(psutil.Process(pid).create_time(), 2)
    except psutil.Error:
        return None


POLL_SECONDS = 1.0
POOL_POLL_SECONDS = {WorkerBackend.LOCAL: 1.0}
MAX_POOL_POLL_SECONDS = 10.0
"""Between looks at the workers: a scheduler is not to be asked every second."""
STATISTICS_FILE = "statistics.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmJob:
    """A job for many workers, and where its answers go."""

    out: Path
    job: GenerateJob
    request: EngineRequest
    settings: AnswerSettings
    num_workers: int
    lease_seconds: float
    is_fresh: bool = False


class FarmOutcome(NamedTuple):
    """What a farm did."""

    statistics: FarmStatistics
    collected: CollectedOutput


OnFarmProgress = Callable[[FarmProgress], None]
OnFarmMessage = Callable[[str], None]


def open_farm(request: FarmJob) -> tuple[Path, FarmFile, bool]:
    """The folder to work in, and whether its output is finished already."""
    out, job = request.out, request.job
    check_out_path(out)
    folder = farm_path(out.absolute())
    if request.is_fresh:
        require_no_other_submitter(folder, str(out))
        remove_farm(folder)
    # What answers do not depend on is as this command says: a larger --context, another device.
    present: dict[str, Any] = {
        "engine": describe_engine(request.request),
        "num_workers": request.num_workers,
        "lease_seconds": request.lease_seconds,
    }
    farm = read_farm(folder)
    if farm is not None:
        if differing := describe_differences(farm.settings, request.settings):
            raise UsageError(
                f"{out} was begun with other settings: {differing}.",
                remedy="--fresh begins again, --out OTHER keeps both, the former settings go on",
            )
        if is_collected(folder, out):
            remove_intermediate_files(folder)  # where a submitter died before it did
            return folder, farm, True
        if (folder / "lease").is_dir():
            return folder, farm.model_copy(update=present), False
        # Finished once, and the output was changed or removed.
        if os.path.lexists(out):
            raise UsageError(
                f"{out} was finished and has been changed since.",
                remedy="--out OTHER keeps it, and --fresh replaces it",
            )
        remove_farm(folder)
    if os.path.lexists(out) and not request.is_fresh:
        raise UsageError(
            f"{out} exists already.",
            remedy="--out OTHER keeps it, and --fresh replaces it when the answers are there",
        )
    farm = FarmFile(
        out=str(out.absolute()),
        settings=dict(request.settings),
        seed=secrets.randbelow(2**31) if job.sampling.seed is None else job.sampling.seed,
        shape=choose_chunk_layout(len(job.prompts), request.num_workers),
        num_samples=job.num_samples,
        is_raw=job.is_raw,
        sampling=replace(job.sampling, seed=None),
        **present,
    )
    if not make_farm(folder, farm, job.prompts):
        return open_farm(replace(request, is_fresh=False))  # another was quicker
    return folder, farm, False


def count_left(request: FarmJob) -> int:
    """Answers that this command would still make; of another job's farm, or of none: all."""
    folder, num_all = farm_path(request.out.absolute()), request.job.num_answers
    farm = None if request.is_fresh else read_farm(folder)
    if farm is None or describe_differences(farm.settings, request.settings):
        return num_all
    if is_collected(folder, request.out):
        return 0
    note = read_output_record(folder)
    num_failed = 0 if note is None else note.num_failed  # these are tried again
    return min(num_all, num_all - count_published_answers(folder, farm) + num_failed)


def read_statistics(folder: Path) -> FarmStatistics:
    """Of a farm that is finished."""
    try:
        return FarmStatistics.model_validate_json(read_bytes(folder / STATISTICS_FILE))
    except (OSError, ValidationError) as error:
        raise NotFoundError(
            f"The statistics in {folder} are not there, or cannot be read.",
            remedy="leave --stats out; --fresh makes the answers and their statistics again",
        ) from error


class Submitter:
    """One run of the command over one folder."""

    def __init__(
        self,
        folder: Path,
        farm: FarmFile,
        groups: Sequence[WorkerGroup],
        starters: Mapping[WorkerBackend, WorkerStarter],
    ) -> None:
        self._folder = folder
        self._farm = farm
        self._store = FolderStore(folder)
        self._pool_poll_s = max(
            POOL_POLL_SECONDS.get(group.kind, MAX_POOL_POLL_SECONDS) for group in groups
        )
        self._mine = self._claim()
        self._began_s = self._store.beat(self._mine)
        self._reopen_lost()
        over = ("ended", "stopped", "broken")
        self._former = {s.worker for s in read_statuses(folder) if s.state in over}
        self._pool = WorkerPool(folder, groups, starters)

    def run(self, watch: OnFarmProgress, report: OnFarmMessage) -> FarmOutcome:
        """Until every chunk is done; then the output."""
        try:
            self._follow(watch, report)
            return self._finish()
        except OSError as error:
            raise self._explain(error) from error

    def _follow(self, watch: OnFarmProgress, report: OnFarmMessage) -> None:
        reader = ProgressReader(self._folder, self._farm)
        pool_due_s, num_done = 0.0, -1
        while True:
            progress = reader.look()
            self._store.beat(self._mine)
            watch(progress)
            if progress.is_finished:
                return
            if progress.num_done > num_done:
                num_done = progress.num_done
                self._pool.note_progress()
            if time.monotonic() >= pool_due_s:
                self._refuse_unloadable()
                self._pool.top_up(num_left=progress.num_chunks - progress.num_done, report=report)
                pool_due_s = time.monotonic() + self._pool_poll_s
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End every worker; everything that was answered is kept."""
        self._pool.stop()

    def list_cancel_commands(self) -> tuple[str, ...]:
        """What ends the workers from a shell."""
        return self._pool.list_cancel_commands()

    def _finish(self) -> FarmOutcome:
        collected = collect_output(self._folder, self._farm, Path(self._farm.out))
        self._pool.stop()
        statuses = read_statuses(self._folder)  # with the last words of those who ended
        statistics = sum_farm(
            collected.heads,
            statuses,
            farm=self._farm,
            num_failed=len(collected.failures),
            commits_s=collected.commits_s,
            began_s=self._began_s,
        )
        write_atomic(self._folder / STATISTICS_FILE, statistics.model_dump_json(indent=1) + "\n")
        write_output_record(self._folder, collected.note)
        if not collected.failures:
            remove_intermediate_files(self._folder)
        return FarmOutcome(statistics=statistics, collected=collected)

    def _refuse_unloadable(self) -> None:
        """Where no worker of ours could load the model, no other will."""
        statuses = [s for s in read_statuses(self._folder) if s.worker not in self._former]
        errors = [status.error for status in statuses if status.state == "broken"]
        if not errors or len(errors) < len(statuses) or any(s.loaded_s for s in statuses):
            return
        self._pool.stop()
        for status in statuses:  # none of them had a lease; the next try counts anew
            for path in (status_path(status.worker), heartbeat_path(status.worker)):
                (self._folder / path).unlink(missing_ok=True)
        raise SetupError(
            f"No worker could load {self._farm.engine.model}: {str(errors[-1]).rstrip('.')}.",
            remedy=f"mend that and give the same command again; logs: {self._folder / 'logs'}",
        )

    def _claim(self) -> str:
        try:
            mine = acquire_submitter_lock(self._store, self._farm.out)
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

    def _explain(self, error: OSError) -> SetupError:
        if self._store.is_at(self._folder):
            return SetupError(
                f"{self._folder}: {describe_write_error(error, self._folder)}.",
                remedy="mend that and give the same command again; the workers go on meanwhile",
            )
        self._pool.stop()
        return SetupError(
            f"{self._folder} was removed while workers ran; they were stopped.",
            remedy="the same command begins again",
        )

    def _reopen_lost(self) -> None:
        """A finished farm that comes here has prompts that failed, or lacks a chunk."""
        folder, farm = self._folder, self._farm
        if not (folder / FINISHED).exists():
            return
        chunks = find_missing_chunks(folder, farm)
        note = read_output_record(folder)
        if note is not None and note.num_failed:
            for chunk in set(range(farm.shape.num_chunks)).difference(chunks):
                path = folder / done_path(farm.shape, chunk)
                head, _ = read_chunk(path, farm.num_keys(chunk))
                if head.failures:
                    chunks.append(chunk)
        if chunks:
            reopen_chunks(folder, farm, chunks)
