"""Terminals get colour and rules, pipes get neither."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run

from cli_run import run_process
from tightfit.cli.terminal.screen import render_bar, render_gauge

HUMAN = (
    ("estimate", "Llama-2-7b", "--on", "V100-32GB"),
    ("plan", "Llama-2-7b", "--on", "4xV100-32GB", "--explain"),
    ("models", "qwen"),
    ("models", "Mixtral-8x7B-v0.1"),
    ("hardware",),
    ("hardware", "T4"),
    ("hardware", "--on", "2n x 4xA100-40GB"),
    ("doctor",),
    ("version",),
    ("--help",),
    ("estimate", "t5-3b", "--zero-table"),
)


@pytest.mark.parametrize("argv", HUMAN, ids=" ".join)
def test_piped_text_is_plain_and_nothing_is_cut_off(run: Run, argv: tuple[str, ...]) -> None:
    for columns in (80, 120):
        answer = run(*argv, columns=columns)
        assert answer.code in (0, 6)
        assert "\x1b" not in answer.out
        assert "…" not in answer.out
        assert max(map(len, answer.out.splitlines())) <= columns


def on_a_terminal(*argv: str, **environment: str) -> str:
    """What the command prints when stdout is a terminal."""
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "tightfit.cli.app", *argv],
        stdout=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    )
    os.close(theirs)
    reported = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux says so when the other side has closed
            break
        if not piece:
            break
        reported += piece
    os.close(ours)
    assert done.wait() == 0
    return reported.decode()


def test_a_terminal_gets_colour_and_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    reported = on_a_terminal("estimate", "Llama-2-7b", "--on", "V100-32GB")
    assert "\x1b[1;32mfits" in reported
    assert "───" in reported


def test_no_color_is_obeyed() -> None:
    reported = on_a_terminal("estimate", "Llama-2-7b", "--on", "V100-32GB", NO_COLOR="1")
    assert "\x1b[1;32m" not in reported
    assert "fits" in reported


def test_without_unicode_bars_are_ascii() -> None:
    answer = run_process(
        "estimate", "Llama-2-7b", "--on", "V100-32GB", PYTHONIOENCODING="ascii", COLUMNS="100"
    )
    assert answer.code == 0
    assert answer.err == ""
    assert answer.out.isascii()
    assert "####" in answer.out


@pytest.mark.parametrize("fraction", [-1.0, 0.0, 0.013, 0.5, 0.999, 1.0, 7.0])
def test_bars_never_leave_their_cells(fraction: float) -> None:
    assert len(render_bar(fraction, width=20)) <= 20
    assert len(render_gauge(fraction, width=20)) == 20
    if fraction >= 1:
        assert set(render_gauge(fraction, width=20)) <= {"█", "#"}


@pytest.mark.parametrize("columns", [20, 40, 59])
def test_a_narrow_screen_stacks_and_cuts_no_number(run: Run, columns: int) -> None:
    line = ("plan", "Llama-2-7b", "--on", "4xV100-32GB", "--top", "1")
    wide, narrow = run(*line, columns=120).out, run(*line, columns=columns).out

    assert max(map(len, narrow.splitlines())) <= columns
    assert "…" not in narrow
    numbers = re.findall(r"\$?\d[\d,.]*\d(?:/[\dh.]+)?", wide)
    assert len(numbers) > 10
    for number in numbers:
        assert number in narrow
    for title in ("how", "GPU memory", "speed", "cost"):
        assert title in narrow


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_model_name_is_broken(run: Run, columns: int) -> None:
    names = [row["name"] for row in run("models", "--json").json["models"]]
    words = set(run("models", columns=columns).out.split())
    assert len(names) > 90
    assert set(names) <= words


def test_counts_of_one_are_singular(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    line = ("plan", "gpt2", "--on", "T4", "--data", str(data), "--effective-batch", "1")
    text = " ".join(run(*line, columns=200).out.split())
    assert "1 row (" in text
    assert "1 sequence a step" in text
    assert "1 epoch " in text + " "
    assert "(s)" not in text
    assert "1 GPU, from" in run("hardware", "--on", "T4").out
    assert "1 node with 1 GPU each" in run("estimate", "gpt2", "--zero-table", columns=200).out


def test_a_note_is_told_once(run: Run) -> None:
    models = ("gpt-oss-20b", "t5-3b", "Mixtral-8x7B-v0.1", "falcon-7b")
    num_warned = 0
    for model in models:
        warnings = run("models", model, "--json").json["warnings"]
        text = " ".join(run("estimate", model, "--on", "A100-80GB", columns=300).out.split())
        num_warned += len(warnings)
        for warning in warnings:
            assert text.count(" ".join(warning.split())) == 1
    assert num_warned
