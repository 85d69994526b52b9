"""Every verb that writes, on tiny models, in a folder whose disk can be made to fail or stop.

Commands are forked from a process that has imported everything, so that a trial costs no imports;
what they start themselves (training workers, a farm's workers) is started as always.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from faults import Faults, make_faults
from nursery import Nursery
from small_models import make_llama
from tightfit.hardware.calibration import Calibration
from tiny_jobs import PATIENCE_SECONDS, Job, list_tree, make_data

MARK = "TIGHTFIT_TRIAL"
"""In the environment of all that a trial starts, so that none of it is overlooked."""
NUM_PROMPTS = 12
NUM_REQUESTS = 8
POLL_SECONDS = 0.003
SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True, kw_only=True)
class Verb:
    """A command, and what it leaves in the area when it ends as it should."""

    name: str
    words: tuple[object, ...]
    results: tuple[str, ...] = ()
    """Patterns of the files that are the same each time, byte for byte."""
    read: Callable[[Path], Any] = lambda _: None
    """What else is the same each time."""
    is_server: bool = False
    num_processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended, and what lies in the area then."""

    code: int
    said: str
    digest: dict[str, Any]
    files: tuple[str, ...]
    left: tuple[str, ...] = ()
    """Processes and files in shared memory that are there still."""
    cpu_seconds: float = 0.0


@dataclass(slots=True)
class Running:
    """A command that was started and not waited for."""

    pid: int
    log: Path
    client: threading.Thread | None = None
    answers: dict[int, str] = field(default_factory=dict)


class VerbLab:
    """Inputs in `home`, results in `home/area`."""

    def __init__(self, home: Path) -> None:
        self.home, self.area, self.given = home.resolve(), home.resolve() / "area", home / "given"
        home.mkdir(parents=True, exist_ok=True)
        self.faults: Faults = make_faults(self.home, self.area)
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._shared = self._list_shared()
        self.environment = {
            **os.environ,
            **self.faults.environment,
            MARK: self.mark,
            "COLUMNS": "100",
            "HF_HUB_OFFLINE": "1",
            "MIMALLOC_DISALLOW_ARENA_ALLOC": "1",  # torch's, on ARM
            "OMP_NUM_THREADS": "1",
            "TIGHTFIT_CACHE": str(self.area / "cache"),
            "TIGHTFIT_LEDGER": str(self.area / "ledger.sqlite"),
            "TMPDIR": str(self.area / "tmp"),
        }
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.clear()
        self._nursery = Nursery(self.environment)
        self._make_inputs()
        self.verbs = {verb.name: verb for verb in self._list_verbs()}

    def close(self) -> None:
        self._nursery.close()

    def _make_inputs(self) -> None:
        given, whole = self.given, self.given / "whole"
        self.model, self.rows, self.gguf = given / "model", given / "rows.jsonl", given / "m.gguf"
        self.prompts = given / "prompts.txt"
        if whole.exists():
            return
        shutil.rmtree(given, ignore_errors=True)
        given.mkdir()
        make_llama(self.model, max_position_embeddings=128)
        make_data(self.rows, num_rows=24)
        self.prompts.write_text("".join(f"{n}: how many singers\n" for n in range(NUM_PROMPTS)))
        self.job("single").write()
        for words in (
            ("convert", self.model, "--to", "gguf", "--out", self.gguf),
            ("train", self.job("single").recipe, "--output", given / "run"),
        ):
            done = self.run(Verb(name="input", words=words))
            assert done.code == 0, done.said
        whole.touch()

    def job(self, kind: str) -> Job:
        """In the area: the run folder is what is tried."""
        strategy: dict[str, Any] = {} if kind == "single" else {"sharding": kind}
        changes = {
            "on": "cpu" if kind == "single" else "2xcpu",
            "output": str(self.area / "run"),
            "max_steps": 6,
            "save_every": 2,
            "eval_every": 3,
            "eval_fraction": 0.1,
            "learning_rate": 1e-3,
            "lora": {"dropout": 0.1},
        }
        home = self.given / kind
        return Job(home=home, model=self.model, data=self.rows, changes=changes, strategy=strategy)

    def _list_verbs(self) -> list[Verb]:
        area, answers = self.area, {"temperature": 0, "max-new-tokens": 6}
        sampling = [word for key, value in answers.items() for word in (f"--{key}", value)]
        asked = ("--prompts", self.prompts, *sampling, "--out", area / "a.jsonl")
        trained: dict[str, Any] = {"results": ("run/adapter/*",), "read": read_losses}
        return [
            Verb(name="train", words=("train", self.job("single").write().recipe), **trained),
            Verb(
                name="train (FSDP2)",
                words=("train", self.job("fsdp").write().recipe),
                num_processes=2,
                **trained,
            ),
            Verb(
                name="train (ZeRO-2)",
                words=("train", self.job("zero2").write().recipe),
                num_processes=2,
                **trained,
            ),
            Verb(
                name="merge",
                words=("merge", self.given / "run", "--out", area / "merged"),
                results=("merged/*",),
            ),
            Verb(
                name="convert",
                words=("convert", self.model, "--to", "gguf", "--out", area / "m.gguf"),
                results=("m.gguf",),
            ),
            Verb(
                name="quantize",
                words=(
                    *("quantize", self.gguf, "--to", "q8_0", "--to", "q6_k"),
                    *("--tokens", 96, "--out", area / "small"),
                ),
                results=("small/*.gguf",),
            ),
            Verb(
                name="generate",
                words=("generate", self.gguf, *asked),
                results=("a.jsonl",),
            ),
            Verb(
                name="farm",
                words=("farm", self.gguf, *asked, "--workers", 2),
                results=("a.jsonl",),
                num_processes=2,
            ),
            Verb(
                name="stage",
                words=("stage", self.model, "--to", area / "ram"),
                results=("ram/*/*/*",),
            ),
            Verb(
                name="calibrate",
                words=("calibrate", "--device", "cpu", "--seconds", 3, "--force"),
                read=read_calibration,
            ),
            Verb(
                name="serve",
                words=(
                    *("serve", self.gguf, "--name", "x", "--port", self.port, "--parallel", 2),
                    *("--ready-file", area / "ready.json"),
                ),
                is_server=True,
            ),
        ]

    # One command.

    def clear(self) -> None:
        """An empty area."""
        for path in self.area.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in ("tmp", "ram"):
            (self.area / name).mkdir()

    def start(self, verb: Verb) -> Running:
        log = self.home / "log.txt"
        log.unlink(missing_ok=True)
        running = Running(self._nursery.start(*verb.words, log=log), log)
        if verb.is_server:
            running.client = threading.Thread(target=self._ask, args=(running,))
            running.client.start()
        return running

    def finish(self, verb: Verb, running: Running, *, begin_cpu: float = 0.0) -> Outcome:
        """Wait for the end, however it comes."""
        code = self._nursery.wait()
        if running.client is not None:
            running.client.join()
        left = [*self._wait_for_none(), *(self._list_shared() - self._shared)]
        said = running.log.read_text(errors="replace") if running.log.exists() else ""
        files = sorted(str(path.relative_to(self.area)) for path in self.area.rglob("*"))
        digest: dict[str, Any] = {
            name: hashlib.sha256((self.area / name).read_bytes()).hexdigest()
            for name in files
            if any(fnmatch.fnmatch(name, wanted) for wanted in verb.results)
            and (self.area / name).is_file()
        }
        with suppress(OSError, ValueError, KeyError):
            digest["read"] = verb.read(self.area)
        if verb.is_server:
            digest["read"] = running.answers
        return Outcome(
            code=code,
            said=said,
            digest=digest,
            files=tuple(files),
            left=tuple(sorted(left)),
            cpu_seconds=self._cpu_of_nursery() - begin_cpu,
        )

    def run(self, verb: Verb) -> Outcome:
        """The whole command, with whatever faults are set."""
        begin = self._cpu_of_nursery()
        return self.finish(verb, self.start(verb), begin_cpu=begin)

    def _ask(self, running: Running) -> None:
        """As many requests as wait in a queue, then SIGTERM; ends where the server has."""
        ready = self.area / "ready.json"
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        while not (ready.exists() and json.loads(ready.read_text() or "{}").get("pid")):
            if not psutil.pid_exists(running.pid) or is_gone(running.pid):
                return
            time.sleep(0.02)

        def ask(number: int) -> None:
            content = f"{number}: how many singers"
            body = {
                "model": "x",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 24,
                "temperature": 0,
            }
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with suppress(OSError, ValueError, KeyError):  # the server was killed
                with opener.open(request, timeout=PATIENCE_SECONDS) as answer:
                    said = json.load(answer)["choices"][0]["message"]["content"]
                running.answers[number] = said

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(NUM_REQUESTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGTERM)

    # Processes.

    def list_marked(self) -> Iterator[psutil.Process]:
        """All processes of the lab's commands, whoever their parent is by now."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                path = Path(f"/proc/{process.pid}/environ")
                if process.pid != self._nursery.pid and f"{MARK}={self.mark}".encode() in (
                    path.read_bytes()
                ):
                    yield process

    def _wait_for_none(self, *, seconds: float = 20.0) -> list[str]:
        """Those that are there still after a while; they are killed."""
        end = time.monotonic() + seconds
        while True:
            alive = [one for one in self.list_marked() if not is_gone(one.pid)]
            if not alive:
                return []
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        said = []
        for process in alive:
            with suppress(psutil.Error):
                said.append(f"process: {' '.join(process.cmdline())[:120]}")
                process.kill()
        return said

    def _list_shared(self) -> set[str]:
        return {str(path) for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()

    def _cpu_of_nursery(self) -> float:
        """CPU seconds of the commands that have ended, with all that they waited for."""
        times = psutil.Process(self._nursery.pid).cpu_times()
        return float(times.children_user + times.children_system)

    def cpu_seconds(self, running: Running) -> float:
        """So far, of a command and all below it."""
        total = 0.0
        for pid in list_tree(running.pid):
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
                total += times.children_user + times.children_system
        return total


def is_gone(pid: int) -> bool:
    """Ended, though its parent may not have waited for it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_losses(area: Path) -> Any:
    """By step, of training and evaluation; each once."""
    found = []
    for line in (area / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in ("step", "eval"):
            found.append((record["kind"], record["step"], record["loss"]))
    return sorted(found)


def read_calibration(area: Path) -> Any:
    """It is measured: only that it is whole is the same."""
    return [
        (path.name, sorted(Calibration.model_validate_json(path.read_bytes()).rates().matmuls))
        for path in (area / "calibrations").iterdir()
        if path.suffix == ".json"
    ]
