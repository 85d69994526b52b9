"""`init` writes a recipe from options, or from answers typed at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

import tightfit
from tightfit.core.errors import UsageError
from tightfit.core.recipe import read_recipe

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 400,
}
ROW = json.dumps({"prompt": "one two", "completion": "three"}) + "\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, two data files, and things that are neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nothing"))
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(b"0" * 64)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(ROW * 4)
    (tmp_path / "data" / "test.jsonl").write_text(ROW)
    (tmp_path / "a_notes.json").write_text('{"version": 3}')
    return tmp_path


def test_options_make_a_recipe_that_plans(home: Path, run: Run) -> None:
    answer = run(
        *("init", "--model", "models/tiny", "--data", "data/train.jsonl", "--eval", "0.25"),
        *("--on", "4xV100-32GB", "--method", "lora"),
    )

    assert answer.code == 0
    assert "wrote recipe.yaml" in answer.err
    assert "tightfit train recipe.yaml" in answer.out
    recipe = read_recipe(home / "recipe.yaml")
    assert (recipe.model, recipe.on) == (str(home / "models" / "tiny"), "4xV100-32GB")
    assert (recipe.method.value, recipe.eval_fraction) == ("lora", 0.25)
    assert run("plan", "recipe.yaml").code == 0


def test_paths_start_at_the_recipe(home: Path, run: Run) -> None:
    (home / "jobs").mkdir()
    given = ("--model", "./models/tiny", "--data", "data/train.jsonl", "--eval", "data/test.jsonl")

    answer = run("init", *given, "--on", "cpu", "--output", "jobs/mine.yaml", "--json")

    assert answer.code == 0
    assert answer.json["path"] == "jobs/mine.yaml"
    assert answer.json["next"] == ["tightfit train jobs/mine.yaml"]
    assert answer.json["plan"]["data"]["num_rows"] == 4
    recipe = read_recipe(Path("jobs/mine.yaml"))
    assert Path(recipe.model).resolve() == home / "models" / "tiny"
    assert [(Path(one.path).resolve().name, one.split) for one in recipe.data] == [
        ("train.jsonl", "train"),
        ("test.jsonl", "eval"),
    ]


def test_a_model_of_the_catalogue_is_to_be_downloaded_first(home: Path, run: Run) -> None:
    answer = run("init", "--model", "gpt2", "--data", "data/train.jsonl", "--on", "T4", "--json")

    assert answer.json["next"][0].startswith("hf download openai-community/gpt2 ")
    assert read_recipe(home / "recipe.yaml").model == "gpt2"


@pytest.mark.usefixtures("home")
def test_without_a_terminal_what_is_missing_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    answer = run("init", "--on", "T4")

    assert answer.code == 2
    assert "--model and --data are missing" in answer.err
    (command,) = re.findall(r"try: tightfit (.+)", answer.err)
    assert run(*command.split()).code == 0, "the remedy works as it is"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "./nowhere"}, "No model"),
        ({"data": "models/tiny/config.json"}, "in no known format"),
        ({"on": "4xZ9000"}, "Z9000"),
        ({"eval": "0.9"}, "--eval 0.9"),
        ({"method": "magic"}, "--method magic"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_nothing_is_written_of_what_is_not_right(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": "./models/tiny", "data": "data/train.jsonl", "on": "T4"}

    with pytest.raises(tightfit.UserError, match=message):
        tightfit.init(**(given | changes))

    assert not list(Path().glob("recipe*"))


def test_a_recipe_that_is_there_is_replaced_by_force_alone(home: Path) -> None:
    path = home / "recipe.yaml"
    path.write_text("model: mine\n")
    given: dict[str, Any] = {"model": "./models/tiny", "data": "data/train.jsonl", "on": "T4"}

    with pytest.raises(UsageError, match="there already"):
        tightfit.init(**given)
    assert path.read_text() == "model: mine\n"

    assert tightfit.init(**given, force=True).recipe.model == "models/tiny"


def test_a_recipe_is_not_written_under_a_name_that_is_none(home: Path) -> None:
    for name in ("recipe.json", "."):
        with pytest.raises(UsageError, match=r"\.yaml or \.yml") as refused:
            tightfit.init(
                model="models/tiny", data="data/train.jsonl", on="T4", output=Path(name), force=True
            )
        assert refused.value.remedy == "--output recipe.yaml"
    assert not (home / "recipe.json").exists()


def test_what_does_not_fit_is_written_and_said(home: Path, run: Run) -> None:
    given = ("--model", "Llama-3.1-405B", "--data", "data/train.jsonl", "--method", "full")

    answer = run("init", *given, "--on", "T4", "--json")

    assert answer.code == 5
    assert answer.json["plan"] is None
    assert "error" in answer.json
    assert read_recipe(home / "recipe.yaml").method.value == "full"


def test_questions_at_a_terminal(home: Path) -> None:
    """A real terminal: a wrong answer is asked again, Enter takes what was found."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tightfit.cli.app", "init"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=home,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "100"},
        start_new_session=True,
    )
    os.close(theirs)
    shown = ""
    for question, answer in (
        ("Model", "no-such-model"),
        ("No model `no-such-model`", "1"),
        ("Rows to train on", ""),
        ("Rows to evaluate on", "1"),
        ("Hardware", "2xRTX-4090"),
        ("What is trained", "sorcery"),
        ("`--method sorcery` is not known", "qlora"),
    ):
        shown += read_until(ours, question)
        os.write(ours, f"{answer}\n".encode())
    out, _ = process.communicate(timeout=60)
    os.close(ours)

    assert process.returncode == 0
    assert b"tightfit train recipe.yaml" in out
    assert b">" not in out, "questions are no part of the answer"
    assert "a_notes" not in shown, "a file in no known format is not offered"
    recipe = read_recipe(home / "recipe.yaml")
    assert recipe.model.endswith("models/tiny")
    assert [Path(one.path).name for one in recipe.data] == ["train.jsonl", "test.jsonl"]
    assert (recipe.on, recipe.method.value) == ("2xRTX-4090", "qlora")


def read_until(terminal: int, question: str) -> str:
    """What the terminal shows up to the question and the prompt behind it."""
    shown = ""
    while question not in shown or not shown.endswith("> [1] "):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, f"waiting for {question!r} after {shown!r}"
        shown += os.read(terminal, 4096).decode()
    return shown
