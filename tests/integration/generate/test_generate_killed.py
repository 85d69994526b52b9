"""`generate` killed with -9 at random moments: every answer once, in order, as undisturbed."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from generate_trial import command, environment, make_model, read_rows, run, write_prompts

from tightfit.serving.generate.journal import journal_path

NUM_PROMPTS, NUM_KILLS = 500, 10
NUM_TRIES = 3
SETTINGS = ("--max-new-tokens", "6", "--stop", "e", "--parallel", "8")


def kill_when(line: list[str], home: Path, journal: Path, *, num_lines: int, after: float) -> int:
    """Start, kill -9 a moment after the journal has so many lines; lines it had then."""
    process = subprocess.Popen(
        line, env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and count_lines(journal) < num_lines:
        time.sleep(0.01)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return count_lines(journal)


def kill_often(line: list[str], home: Path, out: Path, calm: Path) -> list[int]:
    """Ten kills on the way; lines of the journal after each.

    A busy machine may let us sleep until a run of seconds is over: then all of it again.
    """
    chance = random.Random()
    journal = journal_path(out)
    for _ in range(NUM_TRIES):
        progress = [0]
        while len(progress) <= NUM_KILLS and not out.exists():
            # A few more answers than before, so that ten kills spread over the whole run.
            wanted = progress[-1] + chance.randint(1, 2 * NUM_PROMPTS // (3 * NUM_KILLS))
            moment = chance.uniform(0, 0.05)
            progress.append(kill_when(line, home, journal, num_lines=wanted, after=moment))
        if not out.exists() and progress[-1] <= NUM_PROMPTS:
            return progress
        if out.exists():
            assert out.read_bytes() == calm.read_bytes(), "the output appears whole, at the end"
        out.unlink(missing_ok=True)
        journal.unlink()
    pytest.fail("each time it was over before the last kill")


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    prompts = write_prompts(tmp_path / "prompts.txt", NUM_PROMPTS)
    calm, out = tmp_path / "calm.jsonl", tmp_path / "answers.jsonl"
    assert run(command(model, prompts, calm, *SETTINGS), tmp_path).returncode == 0

    line = command(model, prompts, out, *SETTINGS)
    progress = kill_often(line, tmp_path, out, calm)
    assert progress == sorted(progress), f"an answer was lost: {progress}"
    assert 10 < progress[-1] <= NUM_PROMPTS, progress

    done = run([*line, "--json"], tmp_path)

    assert done.returncode == 0, done.stderr
    rows = read_rows(out)
    assert [row["prompt_index"] for row in rows] == list(range(NUM_PROMPTS))
    assert out.read_bytes() == calm.read_bytes()
    assert f'"num_earlier_answers": {progress[-1] - 1}' in done.stdout, "the head is no answer"
    assert len({len(row["messages"][-1]["content"]) for row in rows}) > 3, "answers differ"
