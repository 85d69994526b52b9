"""One run of `generate`: load the model, answer what the journal lacks, and measure it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.reading import read_bytes
from tightfit.core.sampling import Sampling, describe_sampling
from tightfit.data.formats import FORMATS
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import (
    Done,
    Engine,
    EngineInfo,
    EngineLostError,
    Failed,
    FinishReason,
    Request,
    answer_all,
)
from tightfit.hardware.machine import read_driver, read_machine, read_peak_memory_bytes
from tightfit.runtime.model_files import Artefact
from tightfit.serving.generate.journal import AnswerKey, Journal, to_json_line
from tightfit.serving.generate.prompts import Prompt, digest_prompts

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurements:
    """What was measured of a run. None: could not be."""

    load_seconds: float
    load_disk_bytes: int | None = None
    answer_disk_bytes: int | None = None
    device_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    host_peak_bytes: int = 0
    energy_joules: float | None = None
    idle_gpu: str | None = None
    is_offloaded: bool = False
    cores_fraction: float | None = None
    num_passes: float | None = None
    """The engine's own count, where it keeps one."""


class _Counters(NamedTuple):
    moment_s: float
    disk_bytes: int | None
    core_seconds: float
    energy_joules: float | None


class RunMeter:
    """Counters around loading and answering; samples the NVIDIA GPUs' memory meanwhile."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counters] = {}
        self._peak_bytes: int | None = None
        """Over what was in use before us, all GPUs together."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpu-meter", daemon=True)
        self._handles: list[Any] = []
        self._nvml: Any = None
        gpus = read_driver().gpus
        self._first_gpu = gpus[0].name if gpus else None
        if gpus:
            import pynvml

            self._nvml = pynvml
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus]
        self._used_before = self._read_used()

    def __enter__(self) -> RunMeter:
        self.mark("start")
        if self._handles:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            self._is_over.set()
            self._thread.join()
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def mark(self, name: str) -> None:
        """Keep the counters of now under a name: `start`, `loaded`, `answered`."""
        self._counters[name] = _Counters(
            time.monotonic(), read_disk_bytes(), time.process_time(), self._read_energy()
        )

    def measure(self, *, device: str, num_threads: int) -> RunMeasurements:
        """The run between its marks."""
        start, loaded, answered = (self._counters[k] for k in ("start", "loaded", "answered"))
        is_cpu = device == "cpu"
        host_peak = read_peak_memory_bytes()
        allocated, reserved = (None, None) if is_cpu else _torch_peaks()
        seen = [size for size in (self._peak_bytes, reserved) if size is not None]
        energy = cores = None
        if answered.energy_joules is not None and loaded.energy_joules is not None:
            energy = answered.energy_joules - loaded.energy_joules
        if is_cpu:
            wall = max(answered.moment_s - loaded.moment_s, 1e-9)
            cores = (answered.core_seconds - loaded.core_seconds) / wall / num_threads
        return RunMeasurements(
            load_seconds=loaded.moment_s - start.moment_s,
            load_disk_bytes=_subtract(loaded.disk_bytes, start.disk_bytes),
            answer_disk_bytes=_subtract(answered.disk_bytes, loaded.disk_bytes),
            device_peak_bytes=host_peak if is_cpu else max(seen, default=None),
            allocated_peak_bytes=allocated,
            host_peak_bytes=host_peak,
            energy_joules=energy,
            idle_gpu=self._first_gpu if is_cpu else None,
            is_offloaded="cuda" in device and "cpu" in device,
            cores_fraction=cores,
        )

    def _read_energy(self) -> float | None:
        """Joules since the driver was loaded; older GPUs do not count them."""
        if not self._handles:
            return None
        try:
            read = self._nvml.nvmlDeviceGetTotalEnergyConsumption
            return float(sum(map(read, self._handles)) / 1000)
        except self._nvml.NVMLError:
            return None

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self._peak_bytes = max(self._peak_bytes or 0, self._read_used() - self._used_before)

    def _read_used(self) -> int:
        used = 0
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                used += int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used


def read_disk_bytes() -> int | None:
    """Bytes this process read from storage; what the page cache had is not among them."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, NotImplementedError, OSError, psutil.Error):
        return None  # not Linux, or a container that hides it


def count_threads(asked: int | None) -> int:
    """Threads that compute on a CPU."""
    if asked is not None:
        return asked
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    with contextlib.suppress(ValueError):
        return max(1, int(os.environ.get("OMP_NUM_THREADS", "")))
    return read_machine().num_usable_cores


def _torch_peaks() -> tuple[int | None, int | None]:
    """Peak bytes allocated and reserved, over all GPUs, where torch manages them."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None, None
    gpus = range(torch.cuda.device_count())
    allocated = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
    reserved = sum(torch.cuda.max_memory_reserved(gpu) for gpu in gpus)
    return (allocated, reserved) if allocated else (None, None)


def _subtract(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


# Answering the prompts of a job.

_SEED_BITS = 31
"""What every engine takes as a seed."""
_MODEL_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja", ".model")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """What is asked, how, and how often."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    num_samples: int = 1
    is_raw: bool = False

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_samples


class FailedAnswer(NamedTuple):
    """A prompt that could not be answered."""

    prompt: Prompt
    sample: int
    error: UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The answers of one run and its measurements; earlier answers are in the journal alone."""

    info: EngineInfo
    timings: Sequence[Done]
    """The answers' ends, without their texts."""
    failures: Sequence[FailedAnswer]
    measured: RunMeasurements
    num_threads: int


OnAnswer = Callable[[int, int, int], None]
"""Called after each answer: answers of this run, prompts failed, new tokens so far."""


def run_engine(
    request: EngineRequest,
    job: GenerateJob,
    journal: Journal,
    on_answer: OnAnswer | None = None,
    *,
    announce: Callable[[EngineInfo], None] | None = None,
) -> EngineRun:
    """Load the model, answer what the journal has not, and unload the model."""
    with RunMeter() as meter:
        engine = open_engine(request)
        try:
            meter.mark("loaded")
            if announce is not None:
                announce(engine.info)
            timings, failures = _answer(engine, job, journal, on_answer)
            meter.mark("answered")
            num_threads = count_threads(request.threads)
            measured = meter.measure(device=engine.info.device, num_threads=num_threads)
            if request.device == "cpu":  # asked for, so that an idle GPU is no mistake
                measured = replace(measured, idle_gpu=None)
            return EngineRun(
                info=engine.info,
                timings=timings,
                failures=failures,
                measured=replace(measured, num_passes=getattr(engine, "num_passes", None)),
                num_threads=num_threads,
            )
        finally:
            engine.close()


def _answer(
    engine: Engine, job: GenerateJob, journal: Journal, on_answer: OnAnswer | None
) -> tuple[list[Done], list[FailedAnswer]]:
    """Answer what the journal has not. A prompt that cannot be answered is set aside.

    An error that is not one of a prompt (the engine itself broke) is raised, with all answers
    so far safe in the journal.
    """
    asked: dict[int, tuple[Prompt, int]] = {}
    timings: list[Done] = []
    failures: list[FailedAnswer] = []
    num_tokens = 0

    def requests() -> Iterator[Request]:
        number = 0
        for prompt in job.prompts:
            keys = [AnswerKey(prompt.index, sample) for sample in range(job.num_samples)]
            wanted = [key for key in keys if key not in journal]
            if not wanted:
                continue
            try:
                tokens = encode_prompt(engine, prompt, is_raw=job.is_raw)
            except UserError as error:
                failures.extend(FailedAnswer(prompt, key.sample, error) for key in wanted)
                continue
            for key in wanted:
                asked[number] = (prompt, key.sample)
                number += 1
                seed = derive_seed(journal.seed, key)
                yield Request(prompt=tokens, sampling=replace(job.sampling, seed=seed))

    try:
        for number, end in answer_all(engine, requests()):
            prompt, sample = asked.pop(number)
            if isinstance(end, Failed):
                if not isinstance(end.error, UserError) or isinstance(end.error, EngineLostError):
                    raise end.error
                failures.append(FailedAnswer(prompt, sample, end.error))
            elif end.reason is not FinishReason.CANCELLED:
                row = make_row(prompt, sample, end, job.is_raw)
                journal.add(AnswerKey(prompt.index, sample), row)
                timings.append(replace(end, text=""))  # texts would fill the memory
                num_tokens += end.num_new_tokens
            if on_answer is not None:
                on_answer(len(timings), len(failures), num_tokens)
    finally:
        journal.sync()
    failures.sort(key=lambda failure: (failure.prompt.index, failure.sample))
    return timings, failures


def derive_seed(base: int, key: AnswerKey) -> int:
    """One seed for each answer, whatever was answered before it."""
    text = f"{base}:{key.prompt}:{key.sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


def encode_prompt(engine: Engine, prompt: Prompt, *, is_raw: bool) -> tuple[int, ...]:
    """The prompt's tokens, up to where the answer begins."""
    try:
        if is_raw:
            return engine.prompter.continue_text(prompt.text)
        return engine.prompter.ask(prompt.messages, prompt.tools, place=prompt.place)
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{prompt.place} holds half of a character (a lone surrogate).",
            remedy="correct that prompt",
        ) from error


def make_row(prompt: Prompt, sample: int, done: Done, is_raw: bool) -> dict[str, Any]:
    """A row that `tightfit train` reads, with the facts of its answer and the prompt row's columns.

    Nothing in it depends on the clock, so that a run that was interrupted gives the same file.
    """
    answer: dict[str, Any]
    if is_raw:
        answer = {"prompt": prompt.text, "completion": done.text}
    else:
        turns = [message.as_object() for message in prompt.messages]
        answer = {"messages": [*turns, {"role": "assistant", "content": done.text}]}
    return answer | {
        "prompt_index": prompt.index,
        "sample": sample,
        "finish": done.reason.value,
        "num_prompt_tokens": done.num_prompt_tokens,
        "num_new_tokens": done.num_new_tokens,
        **rename_columns(prompt.columns, is_raw=is_raw),
    }


COLUMN_PREFIX = "input_"
"""Before a column whose name the answer's row has a meaning for."""
ANSWER_KEYS = (
    *("messages", "prompt", "completion", "prompt_index", "sample", "finish"),
    *("num_prompt_tokens", "num_new_tokens"),
)
FAILURE_KEYS = ("prompt_index", "sample", "reason", "remedy", "place", "messages")


def rename_columns(
    columns: Mapping[str, Any], *, taken: Sequence[str] = ANSWER_KEYS, is_raw: bool = False
) -> dict[str, Any]:
    """The prompt row's columns, for its answer's row.

    Beside a raw prompt and its completion, the keys of data formats count as taken too: `train`
    would read the row by them.
    """
    meant = set(taken)
    if is_raw:
        meant |= {key for known in FORMATS.values() for group in known.keys for key in group}
    names = meant | set(columns)
    renamed: dict[str, Any] = {}
    for column, value in columns.items():
        name = column
        while name in meant or (name != column and name in names):
            name = COLUMN_PREFIX + name
        renamed[name] = value
    return renamed


def write_failures(out: Path, failures: Sequence[FailedAnswer]) -> Path | None:
    """The prompts without an answer and why, beside the output; an older such file goes."""
    path = out.with_name(f"{out.name}.failed.jsonl")
    if not failures:
        path.unlink(missing_ok=True)
        return None
    rows = (
        {
            "prompt_index": prompt.index,
            "sample": sample,
            "reason": error.problem,
            "remedy": error.remedy,
            "place": prompt.place,
            "messages": [message.as_object() for message in prompt.messages],
            **rename_columns(prompt.columns, taken=FAILURE_KEYS),
        }
        for prompt, sample, error in failures
    )
    write_atomic(path, b"".join(to_json_line(row) + b"\n" for row in rows))
    return path


def describe_settings(request: EngineRequest, job: GenerateJob) -> dict[str, Any]:
    """The settings that answers depend on, for the journal's header.

    Equal settings give equal answers; slots, threads and devices do not matter.
    """
    template = request.template
    if template is not None and Path(template).is_file():
        template = hashlib.blake2b(read_bytes(Path(template)), digest_size=16).hexdigest()
    return {
        "prompts": digest_prompts(job.prompts),
        "model": _digest_model(request.artefact),
        "template": template,
        "engine": request.engine,
        "weights": "auto" if request.weights is None else request.weights.value,
        "n": job.num_samples,
        "raw": job.is_raw,
        **describe_sampling(job.sampling),
    }


def _digest_model(artefact: Artefact) -> str:
    """Over names, sizes and times of the files: reading them whole would take minutes."""
    digest = hashlib.blake2b(digest_size=16)
    for source in filter(None, (artefact.path, artefact.base, artefact.tokenizer)):
        files = [source] if source.is_file() else sorted(source.iterdir())
        for path in files:
            if path is source or path.suffix.lower() in _MODEL_ENDINGS:
                facts = path.stat()
                digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
