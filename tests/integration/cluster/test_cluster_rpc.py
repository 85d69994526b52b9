"""`generate --hosts`: one model over two other hosts, and what becomes of it when one is lost.

Hosts are namespaces. llama.cpp's RPC backend is built for the installed wheel where it was not
yet: half a minute of one core, kept in the user's cache.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from namespaces import Hosts, open_hosts
from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.export.convert import convert_to_gguf
from tightfit.runtime.build_rpc import build_rpc
from tightfit.serving.generate.journal import journal_path

PORT = 50052
NUM_PROMPTS = 60
ENDLESS = 3000
"""Prompts of a run that is not to end by itself, however long a busy machine lets us sleep."""
LENDERS = ("ada", "bob")
EXIT_ENVIRONMENT = 6
SILENT_SECONDS = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    target = folder / "small.gguf"
    convert_to_gguf(make_llama(folder), target, dtype=Dtype.FP32)
    return target


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Hosts]:
    build_rpc()
    with open_hosts(tmp_path / "lab", "ask", *LENDERS, test_file=__file__) as hosts:
        for name in hosts.names:
            hosts.set_environment(name, {"OMP_NUM_THREADS": "1"})
        for name in LENDERS:
            lend(hosts, name)
        yield hosts


def lend(lab: Hosts, name: str) -> None:
    """Start a host's server, and wait until it listens."""
    words = ["-m", "tightfit.engines.llama_rpc_server", "--address", lab[name].address]
    server = lab.start(name, [sys.executable, *words, "--port", str(PORT)])
    assert server.stdout is not None
    greeting = iter(server.stdout.readline, b"")
    assert any(b"transport" in line for line in greeting), f"no rpc-server on {name}"
    probe = f"import socket; socket.create_connection(({lab[name].address!r}, {PORT}), 5)"
    for _ in range(50):
        if lab.on("ask", [sys.executable, "-c", probe]).returncode == 0:
            return
        time.sleep(0.1)
    pytest.fail(f"the rpc-server on {name} does not listen")


def address(lab: Hosts, name: str) -> str:
    return f"{lab[name].address}:{PORT}"


def command(
    model: Path, folder: Path, out: str, *more: str, num_prompts: int = NUM_PROMPTS
) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{number}: how many singers\n" for number in range(num_prompts)))
    words = ["--prompts", str(prompts), "--out", str(folder / out), "--max-new-tokens", "48"]
    line = [sys.executable, "-m", "tightfit", "generate", str(model), *words]
    return [*line, "--temperature", "0", "--parallel", "1", *more]


def over_both(lab: Hosts) -> tuple[str, str]:
    return "--hosts", ",".join(address(lab, name) for name in LENDERS)


def read_answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def start(lab: Hosts, line: list[str], out: Path, *, num_answers: int) -> subprocess.Popen[str]:
    """A run that has answered some prompts and has more to answer."""
    process = subprocess.Popen(
        lab.command("ask", *line), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while count_lines(journal_path(out)) <= num_answers:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_told_once(said: str, *words: str) -> None:
    """One message, one remedy, no traceback, nothing of llama.cpp's own."""
    lines = [line for line in said.splitlines() if line.startswith(("error:", "  try:"))]
    assert [line.split(":")[0].strip() for line in lines] == ["error", "try"], said
    assert all(word in lines[0] for word in words), said
    assert "Traceback" not in said
    assert "ggml-rpc.cpp" not in said


def test_answers_are_those_of_one_machine(lab: Hosts, model: Path, tmp_path: Path) -> None:
    alone = lab.on("ask", command(model, tmp_path, "alone.jsonl"))
    assert alone.returncode == 0, alone.stderr
    sent_before = received_bytes(lab, "bob")

    shared = lab.on("ask", command(model, tmp_path, "shared.jsonl", *over_both(lab)))
    assert shared.returncode == 0, shared.stderr
    assert "with 2 other hosts" in shared.stderr
    assert read_answers(tmp_path / "shared.jsonl") == read_answers(tmp_path / "alone.jsonl")
    # Some of the weights went there, and every token since.
    assert received_bytes(lab, "bob") - sent_before > model.stat().st_size / 8


def received_bytes(lab: Hosts, name: str) -> int:
    lines = lab.on(name, ["cat", "/proc/net/dev"]).stdout.splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("eth0:"))


def test_a_killed_host_is_named_and_the_run_goes_on(
    lab: Hosts, model: Path, tmp_path: Path
) -> None:
    calm = lab.on("ask", command(model, tmp_path, "calm.jsonl"))
    assert calm.returncode == 0, calm.stderr
    line = command(model, tmp_path, "out.jsonl", *over_both(lab))
    out = tmp_path / "out.jsonl"

    run = start(lab, line, out, num_answers=5)
    lab.power_off("bob")
    _, said = run.communicate(timeout=60)
    assert run.returncode == EXIT_ENVIRONMENT, said
    assert_told_once(said, "lost", address(lab, "bob"))
    assert not out.exists()

    lend(lab, "bob")
    again = lab.on("ask", line)
    assert again.returncode == 0, again.stderr
    going_on = re.search(rf"going on: (\d+) of {NUM_PROMPTS} answers", again.stderr)
    assert going_on is not None
    assert int(going_on[1]) >= 5
    assert read_answers(out) == read_answers(tmp_path / "calm.jsonl")


def test_a_host_without_its_cable_is_given_up(lab: Hosts, model: Path, tmp_path: Path) -> None:
    line = command(model, tmp_path, "out.jsonl", *over_both(lab), num_prompts=ENDLESS)
    run = start(lab, line, tmp_path / "out.jsonl", num_answers=2)
    lab.switch(f"ip link set {lab['ada'].port} down")
    _, said = run.communicate(timeout=SILENT_SECONDS)
    assert run.returncode == EXIT_ENVIRONMENT, said
    assert_told_once(said, "lost", address(lab, "ada"))


def test_ctrl_c_and_kill_9_leave_nobody_behind(lab: Hosts, model: Path, tmp_path: Path) -> None:
    for ending, code in ((2, 130), (15, 75), (9, -9)):
        out = f"out-{ending}.jsonl"
        line = command(model, tmp_path, out, *over_both(lab), num_prompts=ENDLESS)
        run = start(lab, line, tmp_path / out, num_answers=1)
        run.send_signal(ending)
        run.communicate(timeout=60)
        assert run.returncode == code
        deadline = time.monotonic() + 60
        while _computing(model):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _computing(model: Path) -> list[str]:
    """Processes that were started with this model."""
    lines = subprocess.check_output(["ps", "-eo", "args"], text=True).splitlines()
    return [line for line in lines if str(model) in line]


def test_what_is_no_server_is_told_before_anything_is_computed(
    lab: Hosts, model: Path, tmp_path: Path
) -> None:
    ask = command(model, tmp_path, "out.jsonl", "--hosts")
    free = f"{lab['ada'].address}:{PORT + 1}"
    for said_of, words in {
        free: ("Connection refused",),
        "10.231.9.77:1": ("10.231.9.77:1",),
        "nowhere:1": ("nowhere:1",),
    }.items():
        done = lab.on("ask", [*ask, said_of])
        assert done.returncode == EXIT_ENVIRONMENT, done.stderr
        assert_told_once(done.stderr, said_of, *words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n" * 2, ("does not answer",)),
        (b"", ("does not answer",)),
        (bytes([28]) + bytes(7) + bytes([3, 6, 0]) + bytes(25), ("another llama.cpp", "3.6")),
    ],
)
def test_another_program_or_release_is_refused(
    answer: bytes, words: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    """The wire format of `HELLO`: a length of 28, then major, minor and patch."""
    build_rpc()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_once, args=(listener, answer), daemon=True).start()
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        line = command(model, tmp_path, "out.jsonl", "--hosts", where)
        done = subprocess.run(
            line,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == EXIT_ENVIRONMENT, done.stderr
    assert_told_once(done.stderr, where, *words)


def answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(33)
        connection.sendall(answer)
