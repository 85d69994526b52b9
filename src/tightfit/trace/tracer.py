"""Tracer: runs a trace in a process of its own and caches the result."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Timer
from typing import IO, Any

from pydantic import ValidationError

from tightfit.core.errors import UserError
from tightfit.core.files import cache_folder, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.trace.operations import OperationLog
from tightfit.trace.result import TracedMemory

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "pydantic")
"""Whose versions decide what a step allocates."""


class TraceResponse(Frozen):
    """What the tracer says of one job: a trace, or why there is none."""

    traced: TracedMemory | None = None
    fewest_recomputed: int | None = None
    """Layers that the traced job recomputes, where the job asked for the fewest."""
    operations: OperationLog | None = None
    """Of a steady step of the traced job: its seconds follow from them on any card, so that rates
    measured later need no new trace. None where an operation was not understood."""
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracer:
    """Traces jobs in a subprocess. Which program runs there is the caller's to say."""

    module: str
    """`python -m` this: reads a job per line, answers with a `TraceResponse` per line. Its one
    word is our process id: it ends when we do."""
    timeout_seconds: float = 600.0
    uses_cache: bool = True
    faults: list[str] = field(default_factory=list)
    """Why what was traced could not be kept; the first alone."""

    def ask(
        self, jobs: Sequence[Mapping[str, Any]], tell: Callable[[int], None] | None = None
    ) -> list[TraceResponse]:
        """One answer per job, in order. A tracer that dies answers with its death.

        `tell` hears how many answers there are, as they come.
        """
        answers: list[TraceResponse | None] = [self._recall(job) for job in jobs]
        missing = [number for number, answer in enumerate(answers) if answer is None]
        # Closed on every way out: the process ends with it, not when Python comes round to it.
        with closing(self._run([jobs[number] for number in missing])) as made:
            for number, answer in zip(missing, made, strict=True):
                answers[number] = answer
                self._remember(jobs[number], answer)
                if tell is not None:
                    tell(sum(known is not None for known in answers))
        return [answer for answer in answers if answer is not None]

    def _run(self, jobs: Sequence[Mapping[str, Any]]) -> Generator[TraceResponse, None, None]:
        """As many answers as jobs, each as soon as it is there."""
        if not jobs:
            return
        num_left = len(jobs)
        with tempfile.TemporaryFile() as complaints:
            try:
                process = self._start(jobs, complaints)
            except OSError as fault:
                yield from [
                    TraceResponse(problem=f"the tracer cannot be started: {fault}")
                ] * num_left
                return
            alarm = Timer(self.timeout_seconds, process.kill)
            alarm.start()
            try:
                for line in process.stdout or ():
                    yield _parse(line)
                    num_left -= 1
                process.wait()
            finally:
                alarm.cancel()
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            complaints.seek(0)
            died = TraceResponse(problem=_describe_exit(process.returncode, complaints.read()))
        yield from [died] * num_left

    def _start(
        self, jobs: Sequence[Mapping[str, Any]], complaints: IO[bytes]
    ) -> subprocess.Popen[str]:
        lines = "".join(json.dumps(job) + "\n" for job in jobs)
        with tempfile.TemporaryFile("w+", encoding="utf-8") as questions:
            questions.write(lines)
            questions.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", self.module, str(os.getpid())],
                stdin=questions,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # a Ctrl-C is ours to hear: we end it
            )

    def _recall(self, job: Mapping[str, Any]) -> TraceResponse | None:
        if not self.uses_cache:
            return None
        try:
            answer = TraceResponse.model_validate_json(_cache_path(job).read_bytes())
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
        except (OSError, UserError) as fault:  # it can be made again
            if not self.faults:
                self.faults.append(_describe_write_error(fault))


_ENVIRONMENT = {
    # No card is needed, and a card's context would cost memory that a training run may want.
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def has_torch() -> bool:
    """Whether a trace is possible here, told without importing anything."""
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
    """By everything that the answer depends on; our own code counts like a library."""
    key = json.dumps([job, list_versions(), _hash_own_code()], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return cache_folder() / "traces" / f"{digest}.json"


@lru_cache(maxsize=1)
def _hash_own_code() -> str:
    """Sizes and times of our files: a changed step must not be answered from before."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for room in ("trace", "train", "runtime"):
        for path in sorted((root / room).rglob("*.py")):
            stat = path.stat()
            digest.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _describe_write_error(fault: OSError | UserError) -> str:
    said = fault.problem if isinstance(fault, UserError) else f"{fault.strerror or fault}"
    where = getattr(fault, "filename", None)
    return f"{where}: {said}" if where else said


def _parse(line: str) -> TraceResponse:
    try:
        return TraceResponse.model_validate_json(line)
    except ValidationError:
        return TraceResponse(problem="the tracer's answer cannot be read")


def _describe_exit(code: int, complaints: bytes) -> str:
    """A kill is most often the kernel's, for want of memory, or the time limit's."""
    if code < 0:
        return f"the tracer was killed (signal {-code})"
    last = (complaints.decode("utf-8", "replace").strip().splitlines() or ["without a word"])[-1]
    return f"the tracer ended with {code}: {last[:200]}"
