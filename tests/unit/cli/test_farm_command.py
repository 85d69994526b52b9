"""`tightfit farm` on the command line: what it refuses, and its dry run."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import run_here

from small_models import make_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
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
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    answer = run_here(["farm", str(model), "--prompts", str(prompts), "--engine", "ray"], capsys)

    assert answer.code == 6
    assert "needs the package ray" in answer.err


def test_a_dry_run_starts_nothing(
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompts", str(prompts), "--device", "cpu", "--workers", "3", "--dry-run"]
    answer = run_here(["farm", "--model", str(model), *words, "--json"], capsys)

    assert answer.code == 0, answer.err
    told = answer.json
    assert told["num_workers"] == 3
    assert told["types"][0]["partition"] == "local"
    assert told["new_tokens_per_second"] > 0
    assert told["predicted_seconds"] > 0
    assert list(prompts.parent.iterdir()) == [prompts]
    plain = run_here(["farm", str(model), *words], capsys)
    assert "3 answers by 3 workers" in plain.out


def test_statistics_that_could_not_be_written_are_told_before_the_work(
    model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = prompts.parent / "nowhere" / "stats.json"
    words = ["--prompts", str(prompts), "--device", "cpu", "--stats", str(stats)]
    answer = run_here(["farm", str(model), *words], capsys)

    assert answer.code != 0
    assert "there is no folder" in answer.err
    assert list(prompts.parent.iterdir()) == [prompts], "no farm was begun"
