"""Tracer: runs a trace in a process of its own and caches the result."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.core.child_process import ChildProcess
from tightfit.core.errors import UserError
from tightfit.core.files import cache_folder, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.import_path import module_words
from tightfit.core.reading import read_bytes
from tightfit.trace.result import OperationLog, TracedMemory

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "pydantic")
"""Whose versions decide what a step allocates."""


class TraceResponse(Frozen):
    """The result of tracing one job: a trace, or the problem that prevented it."""

    traced: TracedMemory | None = None
    fewest_recomputed: int | None = None
    """Layers that the traced job recomputes, where the job asked for the fewest."""
    operations: OperationLog | None = None
    """Of a steady step. Its time on any GPU follows from them, so rates measured later need no new
    trace. None where an operation was not understood."""
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracer:
    """Traces jobs in a subprocess that runs `module`."""

    module: str
    """Run with `python -m`: reads a job per line, writes a `TraceResponse` per line. Its argument
    is our process id, so that it ends when we do."""
    timeout_seconds: float = 600.0
    uses_cache: bool = True
    write_errors: list[str] = field(default_factory=list)
    """The first error of writing to the cache."""

    def ask(
        self, jobs: Sequence[Mapping[str, Any]], on_progress: Callable[[int], None] | None = None
    ) -> list[TraceResponse]:
        """One response per job, in order. If the tracer dies, the rest report how.

        `on_progress` is called with the number of responses so far.
        """
        answers: list[TraceResponse | None] = [self._recall(job) for job in jobs]
        missing = [number for number, answer in enumerate(answers) if answer is None]
        # Closing the generator ends the process at once, also on an exception.
        with closing(self._run([jobs[number] for number in missing])) as made:
            for number, answer in zip(missing, made, strict=True):
                answers[number] = answer
                self._remember(jobs[number], answer)
                if on_progress is not None:
                    on_progress(sum(known is not None for known in answers))
        return [answer for answer in answers if answer is not None]

    def _run(self, jobs: Sequence[Mapping[str, Any]]) -> Generator[TraceResponse, None, None]:
        """Yields one response per job, as they arrive."""
        if not jobs:
            return
        num_left = len(jobs)
        try:
            child = ChildProcess(
                [sys.executable, *module_words(self.module, str(os.getpid()))],
                env={**os.environ, **CPU_ENVIRONMENT},
                limit_seconds=self.timeout_seconds,
            )
        except OSError as error:
            yield from [TraceResponse(problem=f"the tracer cannot be started: {error}")] * num_left
            return
        with child:
            for job in jobs:
                child.send(job)
            child.close_stdin()
            for message in child:
                try:
                    yield TraceResponse.model_validate_json(json.dumps(message))
                except ValidationError:
                    yield TraceResponse(problem="the tracer's response cannot be read")
                num_left -= 1
            code = child.wait() or 0
            # A kill usually comes from the kernel (out of memory) or from the time limit.
            problem = f"the tracer was killed (signal {-code})"
            if code >= 0:
                problem = f"the tracer ended with {code}: {child.last_line or 'no message'}"
        yield from [TraceResponse(problem=problem)] * num_left

    def _recall(self, job: Mapping[str, Any]) -> TraceResponse | None:
        if not self.uses_cache:
            return None
        try:
            answer = TraceResponse.model_validate_json(read_bytes(_cache_path(job)))
        except (OSError, UserError, ValidationError):
            return None
        return answer

    def _remember(self, job: Mapping[str, Any], answer: TraceResponse) -> None:
        if answer.traced is None or not self.uses_cache:
            return
        try:
            path = _cache_path(job)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, answer.model_dump_json())
        except (OSError, UserError) as error:  # a trace can be repeated
            if not self.write_errors:
                problem = (
                    error.problem if isinstance(error, UserError) else str(error.strerror or error)
                )
                where = getattr(error, "filename", None)
                self.write_errors.append(f"{where}: {problem}" if where else problem)


CPU_ENVIRONMENT = {
    # No GPU is needed, and a CUDA context would take memory that a training run may want.
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def has_torch() -> bool:
    """Whether a trace is possible here, without importing anything."""
    return {"torch", "transformers", "peft"} <= set(list_versions())


@lru_cache(maxsize=1)
def list_versions() -> dict[str, str]:
    """Installed versions of what a trace runs."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cache_path(job: Mapping[str, Any]) -> Path:
    """The key covers all that a trace depends on: job, library versions and our own code."""
    key = json.dumps([job, list_versions(), _hash_own_code()], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return cache_folder() / "traces" / f"{digest}.json"


@lru_cache(maxsize=1)
def _hash_own_code() -> str:
    """Hash of the sizes and times of our source files, so that a changed step is traced again."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for room in ("trace", "training", "runtime"):
        for path in sorted((root / room).rglob("*.py")):
            stat = path.stat()
            digest.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()
