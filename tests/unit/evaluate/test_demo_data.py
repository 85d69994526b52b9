"""The demo's dataset: repeatable, answerable, and with a test that training does not give away."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.evaluate.sql import find_database, judge_answer, make_task
from tightfit.evaluate.sql_sandbox import QueryLimits

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_demo_data.py"
LIMITS = QueryLimits()


def make(folder: Path) -> Path:
    subprocess.run([sys.executable, SCRIPT, folder], check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("demo"))


def read(demo: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (demo / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_files_every_time(demo: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again")

    for name in ("train.jsonl", "test.jsonl"):
        assert (again / name).read_bytes() == (demo / name).read_bytes()


@pytest.mark.parametrize(("name", "count"), [("train", 360), ("test", 60)])
def test_every_gold_query_finds_something(demo: Path, name: str, count: int) -> None:
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
    assert len(rows) == len({(row["db_id"], row["question"]) for row in rows}) == count


def test_the_test_shows_new_databases_in_new_words(demo: Path) -> None:
    train, test = read(demo, "train"), read(demo, "test")

    assert {row["db_id"] for row in train}.isdisjoint(row["db_id"] for row in test)
    assert shapes(train).isdisjoint(shapes(test))
    assert len(shapes(test)) >= 12, "too few kinds of question"
    assert all(find_database(demo / "databases", row["db_id"]).is_file() for row in test)


def shapes(rows: list[dict[str, str]]) -> set[str]:
    """Questions with names and values taken out."""
    found = set()
    for row in rows:
        names = set(re.findall(r"\w+", row["context"] + row["answer"]))
        words = re.findall(r"\w+", row["question"])
        found.add(" ".join("_" if word in names or word.isdigit() else word for word in words))
    return found
