"""`tightfit farm` on the command line: what it refuses, and its dry run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cli_run import run_here
from small_models import make_llama
from tightfit.farming.heartbeat import read_statuses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "home" / "ledger.sqlite"))
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No model was named"),
        (["m"], "No prompts were named"),
        (["m", "--model", "n", "--prompts", "p"], "named twice"),
        (["m", "--prompts", "p", "--engine", "rya"], "`--engine rya` is not known"),
        (["m", "--prompts", "p", "--lease", "0"], "--lease"),
    ],
)
def test_what_is_missing_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = run_here(["farm", *words], capsys)

    assert answer.code == 2
    assert said in answer.err


def test_ray_that_is_not_installed(
    model: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answer = run_here(["farm", str(model), "--prompts", str(prompts), "--engine", "ray"], capsys)

    assert answer.code == 6
    assert "needs the package ray" in answer.err


def test_a_dry_run_starts_nothing(
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompts", str(prompts), "--device", "cpu", "--workers", "3", "--dry-run"]
    answer = run_here(["farm", "--model", str(model), *words, "--json"], capsys)

    assert answer.code == 0, answer.err
    reported = answer.json
    assert reported["num_workers"] == 3
    assert reported["types"][0]["partition"] == "local"
    assert reported["basis"] == reported["types"][0]["basis"] == "predicted"
    assert 0 < reported["new_tokens_per_second"]["low"] < reported["new_tokens_per_second"]["high"]
    assert reported["start_seconds"]["low"] < reported["predicted_seconds"]["low"]
    assert reported["predicted_seconds"]["low"] < reported["predicted_seconds"]["high"]
    assert list(prompts.parent.iterdir()) == [prompts]
    plain = run_here(["farm", str(model), *words], capsys)
    assert "3 answers by 3 workers" in plain.out
    assert "predicted: this model has not been run on such devices yet" in plain.out.replace(
        "\n", " "
    )


def test_statistics_of_a_farm_that_is_finished_already(
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["farm", str(model), "--prompts", str(prompts), "--device", "cpu", "--json"]
    words += ["--max-new-tokens", "2", "--out", "answers.jsonl"]
    first = run_here(words, capsys)
    assert first.code == 0, first.err
    stats = prompts.parent / "stats.json"

    again = run_here([*words, "--stats", str(stats)], capsys)

    assert again.code == 0, again.err
    assert "is finished already" in again.err
    reported = json.loads(stats.read_text())
    assert reported["num_answers"] == 3
    assert reported.items() <= first.json.items()
    assert reported.items() <= again.json.items()
    assert reported["start_seconds"] > 0.5, "Python and its libraries take that long to load"
    dry = run_here([*words, "--dry-run"], capsys).json
    assert dry["num_left"] == 0
    assert dry["predicted_seconds"] is dry["predicted_usd"] is None
    plain = run_here([word for word in words if word != "--json"] + ["--dry-run"], capsys)
    assert plain.out == "Nothing is left to do: 3 answers given already\n"
    (prompts.parent / ".answers.jsonl.farm" / "statistics.json").unlink()
    lost = run_here([*words, "--stats", str(stats)], capsys)
    assert lost.code != 0
    assert "--fresh" in lost.json["remedy"]


def test_ctrl_c_leaves_one_json_document(model: Path, prompts: Path) -> None:
    prompts.write_text("how many singers\n" * 3000)
    words = ["farm", str(model), "--prompts", str(prompts), "--device", "cpu", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tightfit", *words, "--out", "answers.jsonl"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=prompts.parent,
        text=True,
    )
    folder = prompts.parent / ".answers.jsonl.farm"
    until_s = time.monotonic() + 100
    while not any(folder.glob("done/*/*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    reported = json.loads(out)
    assert reported["status"] == "interrupted"
    assert reported["finished"] is False
    assert reported["exit_code"] == 130
    assert 0 < reported["num_kept_answers"] < reported["num_answers"] == 3000
    assert {status.state for status in read_statuses(folder)} == {"stopped"}
    check_that_the_rest_is_expected(
        words, reported["num_answers"] - reported["num_kept_answers"], prompts
    )


def test_sigterm_leaves_the_workers_and_says_how_to_end_them(model: Path, prompts: Path) -> None:
    prompts.write_text("how many singers\n" * 3000)
    words = ["farm", str(model), "--prompts", str(prompts), "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tightfit", *words, "--out", "answers.jsonl"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=prompts.parent,
        text=True,
    )
    folder = prompts.parent / ".answers.jsonl.farm"
    until_s = time.monotonic() + 100
    while not any(folder.glob("done/*/*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 75, err
    assert "the workers go on, or stay in the queue" in err
    (command,) = re.findall(r"to end them: (kill \d+)$", err, re.M)
    worker = psutil.Process(int(command.split()[1]))
    assert worker.is_running()
    subprocess.run(command, shell=True, check=True)
    worker.wait(timeout=60)
    assert {status.state for status in read_statuses(folder)} == {"stopped"}


def check_that_the_rest_is_expected(words: list[str], num_left: int, prompts: Path) -> None:
    """The same command again, without --json; interrupted as soon as it has a worker."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tightfit", *words[:-1], "--out", "answers.jsonl"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=prompts.parent,
        text=True,
    )
    assert process.stderr is not None
    assert any("started 1" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    assert f"The other {num_left:,} of 3,000 answers by 1 worker" in out


def test_statistics_that_could_not_be_written_are_told_before_the_work(
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = prompts.parent / "nowhere" / "stats.json"
    words = ["--prompts", str(prompts), "--device", "cpu", "--stats", str(stats)]
    answer = run_here(["farm", str(model), *words], capsys)

    assert answer.code != 0
    assert "there is no folder" in answer.err
    assert list(prompts.parent.iterdir()) == [prompts], "no farm was begun"


def test_what_generate_reached_is_what_a_farm_expects(
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text("how many singers\n" * 500)
    asked = [str(model), "--prompts", str(prompts), "--device", "cpu", "--max-new-tokens", "32"]
    alone = run_here(["generate", *asked, "--out", "alone.jsonl", "--json"], capsys)
    assert alone.code == 0, alone.err

    reported = run_here(["farm", *asked, "--dry-run", "--json"], capsys).json

    assert reported["basis"] == "measured"
    reached = alone.json["rates"]["new_per_second"]
    expected = reported["new_tokens_per_second"]
    assert expected["low"] < reached < expected["high"]
