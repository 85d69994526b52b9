"""Full disks, closed descriptors, narrow encodings, early interrupts: never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Run

from cli_run import run_process
from tightfit.cli.command import VERBS
from tightfit.cli.terminal import output

COMMANDS = (
    "models",
    "models --json",
    "plan gpt2 --on T4",
    "plan gpt2 --on T4 --json",
    "estimate gpt2 --on T4",
    "hardware T4",
    "version",
    "--version",
    "--help",
    "plan --help",
    "",
)


def in_bash(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("tightfit", f"{sys.executable} -m tightfit", 1)
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="run on Linux, which has /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line(command: str) -> None:
    done = in_bash(f"tightfit {command} > /dev/full")
    assert done.stderr == "error: Cannot write the output: No space left on device\n"
    assert done.returncode == 6


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="run on Linux, which has /dev/full")
def test_a_full_disk_without_buffer_and_for_both_streams() -> None:
    for command in ("--help", "version"):
        done = in_bash(f"tightfit {command} > /dev/full", PYTHONUNBUFFERED="1")
        assert (done.returncode, done.stderr.count("\n")) == (6, 1)
    for buffered in ("", "1"):
        done = in_bash("tightfit version > /dev/full 2> /dev/full", PYTHONUNBUFFERED=buffered)
        assert done.returncode == 6
    assert in_bash("tightfit plan nope 2> /dev/full").returncode == 3


@pytest.mark.parametrize("command", ["models", "models --json", "--help", "version"])
def test_a_closed_stdout_is_one_line(command: str) -> None:
    done = in_bash(f"tightfit {command} >&-")
    assert done.stderr == "error: Cannot write the output: stdout is closed\n"
    assert done.returncode == 6


def test_a_closed_stderr_changes_nothing_on_stdout() -> None:
    assert in_bash("tightfit version 2>&-").returncode == 0
    assert in_bash("tightfit plan nope 2>&-").returncode == 3


def test_python_dash_m_is_the_same_command() -> None:
    done = in_bash("tightfit version --json")
    assert done.returncode == 0
    assert "tightfit" in json.loads(done.stdout)


@pytest.mark.parametrize("delay_seconds", [0.03, 0.06, 0.1, 0.15, 0.25])
def test_an_early_interrupt_leaves_no_traceback_of_ours(delay_seconds: float) -> None:
    """Whenever it comes, no file of tightfit's is seen in a traceback.

    Before Python has reached our first line, the message is Python's own.
    """
    line = [sys.executable, "-X", "frozen_modules=on", "-m", "tightfit", "models"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(delay_seconds)
    process.send_signal(signal.SIGINT)
    _, reported = process.communicate(timeout=60)
    assert "command.py" not in reported
    assert "typer" not in reported


def test_an_interrupt_while_loading_ends_with_130() -> None:
    program = (
        "import sys, builtins\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "from tightfit.cli.app import main\n"
        "sys.exit(main(['models']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_ascii(run: Run, verb: str) -> None:
    assert run(verb, "--help").out.isascii()


def test_ascii_gets_escapes_and_the_same_json(tmp_path: Path) -> None:
    recipe = tmp_path / "jöb.yaml"
    recipe.write_text("model: gpt2\non: T4\n")
    cluster = tmp_path / "clüster.yaml"
    cluster.write_text("groups: [{name: größe, gpu: T4}]\n", encoding="utf-8")

    for argv in (("plan", str(recipe)), ("hardware", "--on", str(cluster))):
        text = run_process(*argv, PYTHONIOENCODING="ascii")
        assert (text.code, text.err) == (0, "")
        assert text.out.isascii()
        reported = run_process(*argv, "--json", PYTHONIOENCODING="ascii")
        assert reported.out.isascii()
        assert reported.json == run_process(*argv, "--json", PYTHONIOENCODING="utf-8").json


def test_names_cannot_command_the_terminal(run: Run, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    name = r'"evil\e[31m\n\u202e[/red]name"'
    cluster.write_text(f"groups: [{{name: {name}, gpu: T4}}, {{name: b, gpu: T4}}]\n")

    for verb in (("hardware",), ("plan", "gpt2"), ("estimate", "gpt2")):
        answer = run(*verb, "--on", str(cluster), columns=200)
        assert answer.code == 0, answer.err
        assert all(line.isprintable() for line in answer.out.split("\n"))
        assert "[/red]name" in answer.out


def test_a_folder_that_is_gone_is_survived(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for command in ("plan gpt2 --on T4", "models gpt2", "hardware T4", "--help"):
        line = f"mkdir {gone} && cd {gone} && rmdir {gone} && {sys.executable} -m tightfit"
        done = subprocess.run(
            ["bash", "-c", f"{line} {command}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_long_task_that_nobody_watches_prints_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "FIRST_LINE_SECONDS", 0.05)
    with output.progress_bar() as progress:
        assert progress is not None
        progress("reading data", 0, 2)
        progress("reading data", 2, 2)  # done before its first line is due
        progress("tracing the step", 0, 3)
        time.sleep(0.3)
        progress("tracing the step", 1, 3)  # too soon after the first line
    captured = capsys.readouterr()
    assert captured.err == "tracing the step: 0 of 3\n"
    assert captured.out == ""
