"""Measure the jobs that the tracer predicts, one after another on this machine's GPU.

    python benchmarks/measure_trace.py --cases
    python benchmarks/measure_trace.py --set dev --modes measure,events --out trace_dev.json
    python benchmarks/measure_trace.py --set held-out --modes measure,surviving --out held_out.json
    python benchmarks/measure_trace.py --set held-out --modes cap --predicted capacities.json ...
    python benchmarks/measure_trace.py --device cpu --set dev ...    (tiny models, nothing measured)

Needs torch, transformers and peft; bitsandbytes and liger-kernel for the jobs that name them. Each
job runs in a process of its own, forked from one that has the libraries loaded but no CUDA context.
What stands in the output file already is not measured again. Events go to a file beside it, one
compressed line per job. `--predicted` maps names of jobs to the bytes that torch may reserve.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _provenance import provenance
from _trace_jobs import SETS, Job, list_micro_batches

if TYPE_CHECKING:
    from _trace_job import Request

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""The name under which `tightfit train` sets it; see `tightfit/clusters/local/workers.py`."""
MODES = ("measure", "events", "cap", "surviving")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "triton")
FAMILIES = "llama mistral qwen2 qwen3 gemma gemma2 phi3 gpt2 gpt_neox bloom falcon"
BAD_FORK = "re-initialize CUDA in forked subprocess"
GIB = 2**30


def set_environment() -> None:
    """As the launcher does for a worker, before torch is imported."""
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    os.environ[ALLOCATOR] = "expandable_segments:True"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a device must not start CUDA
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def load_libraries(device: str) -> bool:
    """Import what jobs need before the first fork; False where that has started CUDA."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

    from tightfit.runtime.libraries import silence_libraries

    silence_libraries()
    with known_capability(device):
        for name in ("bitsandbytes", "peft", "liger_kernel.transformers"):
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
    for family in FAMILIES.split():
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("_trace_job")
    gc.collect()
    gc.freeze()  # a child's collector then leaves the parent's pages alone
    cuda: Any = torch.cuda  # not annotated throughout
    return not cuda.is_initialized()


@contextlib.contextmanager
def known_capability(device: str) -> Iterator[None]:
    """bitsandbytes asks for the card's capability as it is imported, which would start CUDA."""
    if device != "cuda":
        yield
        return
    import torch

    found = run_in_process("fork", _read_capability, None, timeout_seconds=60)
    if "capability" not in found:
        raise SystemExit("No GPU answers. --device cpu tries everything out without one.")
    asked = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *_: tuple(found["capability"])
    try:
        yield
    finally:
        torch.cuda.get_device_capability = asked


def _read_capability(_: Any) -> dict[str, Any]:
    import torch

    return {"capability": torch.cuda.get_device_capability(0)}


def _attempt(request: Request) -> dict[str, Any]:
    import torch

    from _trace_job import attempt

    torch.set_num_threads(1 if request.device == "cpu" else 8)
    return attempt(request)


def _answer(pipe: Connection, work: Any, given: Any) -> None:
    pipe.send(work(given))
    pipe.close()
    # Leaving normally would wait for process groups and pinned memory.
    sys.stdout.flush()
    os._exit(0)


def run_in_process(
    start_method: str, work: Any, given: Any, *, timeout_seconds: float
) -> dict[str, Any]:
    """`work(given)` in a new process, which is ended if it takes too long."""
    context: Any = multiprocessing.get_context(start_method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, work, given))
    start = time.perf_counter()
    child.start()
    sender.close()
    answer: dict[str, Any] = {"status": "timeout"}
    if receiver.poll(timeout_seconds):
        answer = {"status": "died"}
        with contextlib.suppress(EOFError):
            answer = receiver.recv()
    else:
        child.kill()
    child.join()
    return answer | {"wall_seconds": round(time.perf_counter() - start, 2)}


class Runner:
    """Runs requests, forked where that is safe."""

    def __init__(self, *, can_fork: bool, timeout_seconds: float) -> None:
        self._start_method = "fork" if can_fork else "spawn"
        self._timeout_seconds = timeout_seconds

    def run(self, request: Request) -> dict[str, Any]:
        # The allocator reads its settings once, so other settings need a fresh interpreter.
        is_usual = request.job.expandable_segments or request.device == "cpu"
        answer = self._start(self._start_method if is_usual else "spawn", request)
        if BAD_FORK in answer.get("fault", "") and self._start_method == "fork":
            self._start_method = "spawn"
            answer = self._start("spawn", request)
        return answer

    def _start(self, start_method: str, request: Request) -> dict[str, Any]:
        os.environ[ALLOCATOR] = f"expandable_segments:{request.job.expandable_segments}"
        limit = self._timeout_seconds
        return run_in_process(start_method, _attempt, request, timeout_seconds=limit)


class Results:
    """The output file: a head, and one line per job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.events_path = path.with_name(path.stem + "_events.jsonl.gz")
        self.jobs: dict[str, dict[str, Any]] = {}
        self.head: dict[str, Any] = describe_run()
        if path.exists():
            earlier = json.loads(path.read_text())
            self.jobs = {row["name"]: row for row in earlier.pop("jobs")}
            self.head["commands"] = [*earlier["commands"], *self.head["commands"]]
            self.head = earlier | self.head

    def list_missing(self, job: Job, modes: list[str]) -> tuple[str, ...]:
        """Modes that have no answer yet; a measurement comes with every run without a limit."""
        known = self.jobs.get(job.name, {})
        return tuple(mode for mode in modes if mode not in known)

    def add(self, name_of_set: str, job: Job, answer: dict[str, Any]) -> None:
        row = self.jobs.get(job.name) or describe_job(name_of_set, job)
        events = answer.pop("events", None)
        if events is not None:
            with gzip.open(self.events_path, "at") as file:
                file.write(json.dumps({"name": job.name, **events}, separators=(",", ":")) + "\n")
            sizes = ("sizes", "events", "streams", "trace")
            answer["events"] = {k: v for k, v in events.items() if k not in sizes}
        for key in ("gpu", "total_memory_bytes"):
            found = answer.get("measure", {}).pop(key, None)
            self.head.setdefault(key, found) if found else None
        for key in ("fault", "traceback"):
            row.pop(key, None)
        self.jobs[job.name] = row | answer
        self._write()

    def _write(self) -> None:
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in self.head.items()]
        rows = ",\n".join(f"  {json.dumps(row)}" for row in self.jobs.values())
        lines.append(f' "jobs": [\n{rows}\n ]')
        partial = self._path.with_suffix(".partial")
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        partial.replace(self._path)


def describe_run() -> dict[str, Any]:
    """Machine, versions and command, without the folders of the machine it was typed on."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    head: dict[str, Any] = dict(provenance("benchmarks/measure_trace.py"))
    words = [word.rpartition("/")[2] for word in sys.argv[1:]]
    del head["command"]
    return {
        "commands": [" ".join(["python benchmarks/measure_trace.py", *words])],
        **head,
        "num_cores": os.cpu_count(),
        "versions": versions,
    }


def describe_job(name_of_set: str, job: Job) -> dict[str, Any]:
    return {
        "name": job.name,
        "set": name_of_set,
        "model": job.model,
        "batch": job.batch,
        "trained_fraction": job.trained_fraction,
        "expandable_segments": job.expandable_segments,
        "micro_batch": job.strategy.micro_batch,
        "seq_len": job.strategy.seq_len,
        "strategy": job.strategy.model_dump(mode="json", exclude_defaults=True),
    }


def summarize(job: Job, answer: dict[str, Any]) -> str:
    measured = answer.get("measure", {})
    keys = ("allocated_after_load_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
    numbers = "  ".join(f"{measured.get(key, 0) / GIB:7.3f}" for key in keys)
    tail = answer.get("fault", "").partition("\n")[0][:160]
    if "surviving" in answer:
        found = answer["surviving"]
        tail += f" survives {found['smallest_surviving_bytes'] / GIB:.3f}"
        tail += f" ({len(found['tries'])} tries)"
    if "cap" in answer:
        tail += f" cap {(answer['cap']['capacity_bytes'] or 0) / GIB:.3f}: "
        tail += "survived" if answer["cap"]["has_survived"] else "OUT OF MEMORY"
    pace = f"{measured.get('step_seconds', 0):7.3f} s  wall {answer['wall_seconds']:5.1f} s"
    return f"{answer['status']:6} {numbers}  {pace}  {job.name}  {tail}"


def print_cases(names: list[str]) -> None:
    for name in names:
        print(f"{name}: {len(SETS[name])} jobs")
        for job in SETS[name]:
            micro_batches = list_micro_batches(job)
            tokens = sum(row.num_tokens for m in micro_batches for rows in m for row in rows)
            chosen = job.strategy.model_dump(mode="json", exclude_defaults=True)
            shape = f"{chosen.pop('micro_batch', 1)}x{job.strategy.seq_len}"
            chosen.pop("seq_len", None)
            words = [f"{key}={value}" for key, value in chosen.items()]
            if job.trained_fraction < 1:
                words.append(f"trained={job.trained_fraction}")
            if not job.expandable_segments:
                words.append("default segments")
            text = " ".join(words)
            print(f"  {job.name:32} {job.model:24} {shape:7} {job.batch:6} {tokens:6} {text}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=[*SETS, "all"], default="dev")
    parser.add_argument("--modes", default="measure", help=f"some of {','.join(MODES)}")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="a file or a folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs with this in their name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--job-seconds", type=float, default=90.0, help="end a job after")
    parser.add_argument("--predicted", type=Path, help="JSON: name to bytes, for cap, surviving")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--no-fork", action="store_true", help="a fresh interpreter for each job")
    parser.add_argument("--cases", action="store_true", help="print the jobs and stop")
    arguments = parser.parse_args()
    unknown = set(arguments.modes.split(",")) - set(MODES)
    if unknown:
        parser.error(f"unknown modes: {', '.join(sorted(unknown))}")
    if "cap" in arguments.modes and arguments.predicted is None and not arguments.cases:
        parser.error("cap needs --predicted")
    return arguments


def measure(arguments: argparse.Namespace, chosen: list[tuple[str, Job]]) -> int:
    """Run what is missing; 1 where a job failed or ran out of memory under its limit."""
    start = time.perf_counter()
    set_environment()
    out: Path = arguments.out
    path = out if out.suffix == ".json" else out / f"trace_{arguments.set}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = Results(path)
    predicted = json.loads(arguments.predicted.read_text()) if arguments.predicted else {}
    can_fork = load_libraries(arguments.device) and not arguments.no_fork
    print(f"libraries loaded in {time.perf_counter() - start:.1f} s, fork {can_fork}", flush=True)
    from _trace_job import Request

    runner = Runner(can_fork=can_fork, timeout_seconds=arguments.job_seconds)
    num_bad = num_left = 0
    for name_of_set, job in chosen:
        missing = results.list_missing(job, arguments.modes.split(","))
        capped = [mode for mode in missing if mode == "cap" and job.name in predicted]
        free = [mode for mode in missing if mode != "cap"]
        for modes in filter(None, (free, capped)):
            if time.perf_counter() - start > arguments.seconds:
                num_left += 1
                continue
            request = Request(
                job=job,
                modes=tuple(modes),
                device=arguments.device,
                capacity_bytes=predicted.get(job.name),
            )
            answer = runner.run(request)
            has_failed = not answer.get("cap", {}).get("has_survived", True)
            num_bad += answer["status"] != "ok" or has_failed
            print(summarize(job, answer), flush=True)
            results.add(name_of_set, job, answer)
    print(f"{time.perf_counter() - start:.0f} s, {num_bad} failed, {num_left} left")
    return int(num_bad > 0)


def main() -> int:
    arguments = parse_arguments()
    names = list(SETS) if arguments.set == "all" else [arguments.set]
    if arguments.cases:
        print_cases(names)
        return 0
    chosen = [(name, job) for name in names for job in SETS[name] if arguments.only in job.name]
    return measure(arguments, chosen)


if __name__ == "__main__":
    sys.exit(main())
