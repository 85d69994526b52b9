"""The verbs as processes, with hostile modules in every folder and secrets in the environment.

Slurm is stand-ins: the batch script runs here, and `srun` runs its command.
PYTEST_DONT_REWRITE: files import its names before pytest does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tightfit.core.errors import CheckFailedError
from tiny_jobs import kill_tree, make_data, make_model

MODULES = (
    *("torch", "json", "numpy", "sitecustomize", "usercustomize", "conftest", "transformers"),
    *("peft", "tokenizers", "safetensors", "gguf", "psutil", "typing", "pickle", "subprocess"),
)
SECRETS = {
    name: f"tightfit-secret-{number:02d}-Zq7"
    for number, name in enumerate(
        ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY",
         "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "DATABASE_PASSWORD",
         "MY_CLIENT_SECRET", "TIGHTFIT_API_KEY", "TIGHTFIT_PASSWORD", "SLURM_JWT")
    )
}  # fmt: skip
"""Variables and distinctive values."""
MARK_OF_SECRETS = "tightfit-secret-"
PROXY = f"http://someone:{MARK_OF_SECRETS}proxy-Zq7@127.0.0.1:9"
"""Where nothing answers."""
SINFO = "c1|cpu|up|(null)|16000|4|idle|1:00:00|900000|avx2\n"
STAND_INS = {
    "sinfo": f'case "$*" in *-O*) exit 1;; esac; printf %s "{SINFO}"',
    "sbatch": "echo 42",
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "squeue": "exit 0",
    "scancel": "exit 0",
    "sacct": "exit 0",
}
SECONDS = 300


def plant(folder: Path, marks: Path) -> None:
    """Modules that leave a mark when they are imported."""
    for name in MODULES:
        mark = marks / f"{folder.name}.{name}"
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")


class Tour:
    """Folders, environment, and what the verbs said; `commands` are all that `ps` showed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.marks, self.work, self.shared = home / "marks", home / "work", home / "shared"
        self.run = self.shared / "run"
        for folder in (self.marks, self.work, self.shared, home / "bin", home / "said"):
            folder.mkdir()
        self.model = make_model(home / "model")
        self.rows = make_data(home / "rows.jsonl", num_rows=24)
        self.recipe = home / "recipe.yaml"
        fixed = {"weights": "fp32", "compute": "fp32", "checkpointing": False, "micro_batch": 2}
        recipe = {
            "model": str(self.model), "data": str(self.rows), "method": "lora", "seq_len": 96,
            "max_steps": 2, "effective_batch": 4, "packing": False, "strategy": fixed,
        }  # fmt: skip
        self.recipe.write_text(json.dumps(recipe))
        self.prompts = home / "prompts.txt"
        self.prompts.write_text("one\ntwo\n")
        for name, text in STAND_INS.items():
            (home / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (home / "bin" / name).chmod(0o755)
        site = {"shared": str(home), "run_on_node": "env NODE={node}"}
        (home / "site.yaml").write_text(json.dumps(site))
        self.environment = {
            **os.environ,
            **SECRETS,
            "HTTPS_PROXY": PROXY,
            "MIMALLOC_DISALLOW_ARENA_ALLOC": "1",  # torch's, on ARM
            "OMP_NUM_THREADS": "1",
            "PATH": f"{home / 'bin'}:/usr/bin:/bin",
            "TIGHTFIT_CACHE": str(home / "cache"),
            "TIGHTFIT_LEDGER": str(home / "ledger.sqlite"),
            "TIGHTFIT_SITE": str(home / "site.yaml"),
        }
        self.commands: set[str] = set()
        self.codes: dict[str, int] = {}
        for folder in (self.work, self.model, self.shared):
            plant(folder, self.marks)

    def start(self, *words: object, cwd: Path | None = None) -> subprocess.Popen[str]:
        """A verb, or the batch script of a run."""
        log = self.home / "said" / f"{words[0]}-{time.monotonic_ns()}"
        python = [sys.executable, "-m", "tightfit"]
        with log.open("wb") as stream:
            return subprocess.Popen(
                [*([] if words[0] == "bash" else python), *map(str, words)],
                cwd=cwd or self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def do(self, *words: object, cwd: Path | None = None) -> None:
        process = self.start(*words, cwd=cwd)
        try:
            ended = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            raise
        said = "\n".join(path.read_text() for path in self.home.glob(f"said/{words[0]}-*"))
        # A model whose weights are random does not pass.
        assert ended == 0 or (words[0], ended) == ("verify", CheckFailedError.exit_code), said

    def do_together(self, *commands: Sequence[object]) -> None:
        """At the same time: most wait for imports."""
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda words: self.do(*words), commands))

    @contextmanager
    def watch_commands(self) -> Iterator[None]:
        """Read the command line of every process below this one, all the time."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.05):
                with suppress(psutil.Error):
                    for process in psutil.Process().children(recursive=True):
                        with suppress(psutil.Error):
                            self.commands.add("\0".join(process.cmdline()))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def serve(self, model: Path) -> None:
        ready = self.home / "ready.json"
        server = self.start(
            "serve", model, "--name", "x", "--port", 0, "--ready-file", ready, cwd=self.model
        )
        try:
            end = time.monotonic() + SECONDS
            while not ready.exists():
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            url = json.loads(ready.read_text())["url"]
            body = {"model": "x", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            for key in (SECRETS["TIGHTFIT_API_KEY"], f"{MARK_OF_SECRETS}wrong"):
                request = urllib.request.Request(
                    f"{url}/v1/chat/completions",
                    json.dumps(body).encode(),
                    {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
                )
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with suppress(OSError), opener.open(request, timeout=60) as answer:
                    (self.home / "said" / "answer").write_bytes(answer.read())
        finally:
            server.terminate()
            server.wait(60)

    def make(self) -> None:
        """Verbs that start processes of each kind, and verbs that load models themselves."""
        data = ("--data", self.rows)
        on_slurm = (self.recipe, "--on", "slurm:cpu", "--output", self.run)
        small, tiny = self.home / "small.gguf", self.home / "tiny.gguf"
        self.do_together(
            ("convert", self.model, "--to", "gguf", "--out", small),
            ("submit", *on_slurm, "--no-follow"),
            ("doctor",),
            ("plan", self.model, "--on", "1xRTX-4090"),
            ("estimate", self.model, "--on", "1xRTX-4090"),
            ("prepare", self.model, *data),
            ("preflight", "--nodes", socket.gethostname()),
        )
        plant(self.run, self.marks)
        asked = ("--prompts", self.prompts, "--max-new-tokens", 2)
        self.do_together(
            ("submit", self.recipe, "--on", "here:2xcpu", "--output", self.shared / "two"),
            ("bash", self.run / "job.sbatch"),
            ("generate", small, *asked, "--out", self.shared / "a.jsonl"),
            ("farm", small, *asked, "--out", self.shared / "b.jsonl", "--workers", 1),
        )
        self.do("quantize", small, "--to", "q8_0", "--no-verify", "--out", tiny, cwd=self.run)
        self.do("verify", small, tiny, "--tokens", 64, cwd=self.shared)
        self.serve(small)


@pytest.fixture(scope="session")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Tour:
    """One for all tests that look at what it left."""
    made = Tour(tmp_path_factory.mktemp("tour"))
    with made.watch_commands():
        made.make()
    return made
