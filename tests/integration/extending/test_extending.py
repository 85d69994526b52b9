"""The recipes of EXTENDING.md, applied to a copy of the sources and used from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from small_models import make_llama

ROOT = Path(__file__).parents[3]
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
_BLOCK = re.compile(
    r"^```\w+ file=(\S+)(?: (after|before)=([\"'])([^\n]+)\3)?\n(.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of code of a recipe."""

    file: str
    text: str
    side: str
    """`after` or `before` the line `anchor`; empty for a new file."""
    anchor: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        if not self.side:
            assert not path.exists(), f"{self.file} is there already"
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.text)
            return
        lines = path.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.rstrip() == self.anchor]
        assert len(places) == 1, f"{self.file} has {len(places)} lines {self.anchor!r}"
        lines.insert(places[0] + (self.side == "after"), self.text)
        path.write_text("".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    title: str
    text: str
    blocks: tuple[Block, ...]


def read_recipes() -> dict[str, Recipe]:
    recipes = {}
    for title, text in _SECTION.findall((ROOT / "EXTENDING.md").read_text()):
        blocks = tuple(
            Block(file=file, text=code, side=side, anchor=anchor)
            for file, side, _, anchor, code in _BLOCK.findall(text)
        )
        assert len(blocks) == len(re.findall(r"^```\w", text, re.M)), title
        if blocks:
            recipes[title] = Recipe(title=title, text=text, blocks=blocks)
    return recipes


RECIPES = read_recipes()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A copy of the sources with every recipe applied, and rows to train on."""

    root: Path

    @property
    def rows(self) -> Path:
        return self.root / "rows.jsonl"

    @property
    def run(self) -> Path:
        return self.root / "run"

    def tightfit(self, *words: str | Path) -> str:
        """What the command prints."""
        environment = {
            "PYTHONPATH": self.root / "src",
            "HOME": self.root,
            "XDG_CONFIG_HOME": self.root / "config",
            "TIGHTFIT_LEDGER": self.root / "ledger.sqlite",
            "TIGHTFIT_CACHE": self.root / "cache",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tightfit", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
            cwd=self.root,
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def json(self, *words: str | Path) -> Any:
        return json.loads(self.tightfit(*words, "--json"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(root=tmp_path_factory.mktemp("extended"))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "tightfit", made.root / "src" / "tightfit", ignore=ignored)
    for recipe in RECIPES.values():
        for block in recipe.blocks:
            block.apply(made.root)
    riddle = {"riddle": "How many singers are older?", "solution": "1234567890 of them."}
    made.rows.write_text("".join(f"{json.dumps(riddle)}\n" for _ in range(8)))
    return made


@pytest.fixture(scope="session")
def model(world: World) -> Path:
    return make_llama(world.root / "model")


@pytest.fixture(scope="session")
def trained(world: World, model: Path) -> World:
    """One run of two steps with the new data format, optimizer, attention and tracker."""
    job = ("--data", world.rows, "--output", world.run, "--max-steps", "2", "--seq-len", "64")
    settings = ("--method", "lora", "--effective-batch", "2")
    new = ("--set", "optimizer=nadam", "--set", "attention=sliced", "--log-to", "csv")
    world.tightfit("train", model, *job, *settings, *new, "--on", "cpu")
    return world


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.title)
def test_a_recipe_is_its_own_file_a_registration_and_a_test(recipe: Recipe) -> None:
    """A backend's folder counts as one; a verb is its function and its rendering, and no list."""
    own: defaultdict[str, set[str]] = defaultdict(set)
    for block in recipe.blocks:
        own["registered in" if block.side else "new"].add(block.file)
    if recipe.title == "A scheduler":
        own["new"] = {str(Path(file).parent) for file in own["new"]}
    if recipe.title == "A verb":
        own["new"] = {Path(file).stem for file in own["new"]}
    tests = re.findall(r"`(?:pytest )?(tests/[^`]+)`", recipe.text)

    assert len(own["new"]) <= 1
    assert len(own["registered in"]) == (0 if recipe.title == "A verb" else 1)
    assert tests
    assert [path for path in tests if not (ROOT / path).exists()] == []


def test_the_tests_over_all_records_hold_with_the_new_ones(world: World) -> None:
    files = (
        "hardware/test_hardware_catalogue.py",
        "core/test_optimizers.py",
        "models/test_families.py",
        "data/test_row_formats.py",
        "evaluation/test_text_metrics.py",
        "export/test_formats.py",
        "training/test_trackers.py",
        "planning/test_trainers.py",
    )
    # A case that its recipe asks for, and a comparison with a class that transformers lacks.
    without = (
        "test_the_cases_cover_every_format",
        "test_a_record_is_as_the_model_class_says[toy]",
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-rA", "-k", f"not ({' or '.join(without)})"),
            *(str(ROOT / "tests" / "unit" / file) for file in files),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=world.root,
        env={**os.environ, "PYTHONPATH": str(world.root / "src")},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "test_its_state_is_as_large_as_the_record_says[nadam]" in done.stdout


def test_a_gpu_is_planned_for(world: World) -> None:
    found = world.json("plan", "gpt2", "--on", "2xToy-48GB")

    assert "Toy 48GB" in json.dumps(found)
    assert found["plans"]


def test_a_model_family_is_read_by_its_own_reader(world: World) -> None:
    folder = world.root / "toy-model"
    folder.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    config = {"model_type": "toy", "max_position_embeddings": 512, **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))

    found = world.json("models", folder)

    attention, mlp, norms = 64 * (64 + 32 + 32 + 64), 2 * 64 * 128, 2 * 64
    expected = 2 * 512 * 64 + 2 * (attention + mlp + norms) + 64
    assert "is not known" not in json.dumps(found)
    assert found["num_params"] == expected


def test_a_data_format_is_recognised(world: World, model: Path) -> None:
    found = world.json("prepare", model, "--data", world.rows, "--seq-len", "64")

    assert "riddle" in json.dumps(found)


def test_an_optimizer_and_an_attention_train_and_a_tracker_logs_it(trained: World) -> None:
    plan = json.loads((trained.run / "plan.json").read_text())
    logged = [line.split(",") for line in (trained.run / "values.csv").read_text().splitlines()]
    losses = {int(step): float(value) for step, name, value in logged if name == "train/loss"}

    assert (plan["strategy"]["optimizer"], plan["strategy"]["attention"]) == ("nadam", "sliced")
    assert sorted(losses) == [1, 2]
    assert all(loss > 0 for loss in losses.values())


def test_a_trainer_is_estimated_and_planned_for(world: World) -> None:
    job = ("gpt2", "--on", "2xA100-40GB")
    current, old = (world.json("estimate", *job, "--trainer", name) for name in ("toy", "toy@1.0"))
    planned = world.json("plan", *job, "--trainer", "toy")

    assert [found["strategy"]["micro_batch"] for found in (current, old)] == [3, 1]
    assert current["verdict"] == "illegal"  # fsdp, which two cards mean and it does not have
    assert {found["strategy"]["sharding"] for found in planned["plans"]} == {"single"}


def test_a_metric_scores_a_run(trained: World) -> None:
    words = ("--metric", "brevity", "--limit", "2", "--max-new-tokens", "4", "--no-base")
    found = trained.json("eval", trained.run, "--data", trained.rows, *words)

    assert [metric["name"] for metric in found["metrics"]] == ["brevity"]


def test_an_export_format_is_written(world: World, model: Path) -> None:
    out = world.root / "copied"
    found = world.json("quantize", model, "--to", "copy-16", "--out", out, "--no-verify")

    assert [row["target"] for row in found["rows"]] == ["copy-16"]
    assert (out / "config.json").is_file()


def test_a_scheduler_takes_a_job_with_its_own_option(world: World, model: Path) -> None:
    job = ("--data", world.rows, "--max-steps", "2", "--seq-len", "64", "--method", "lora")
    cluster = ("--on", "spool", "--priority", "night", "--no-follow")
    found = world.json("submit", model, *job, *cluster)

    script = (world.root / "spool" / found["job_id"]).read_text()
    assert script.startswith("#!/bin/sh\n# night\nexec tightfit train ")
    assert (Path(found["run"]) / "plan.json").is_file()


def test_a_verb_has_options_help_and_json(world: World) -> None:
    everything, some = world.json("census"), world.json("census", "--maker", "Qwen")
    shown = world.tightfit("census", "--help")

    assert everything["models"] > some["models"] > 0
    assert "Only those of this organisation." in shown
    assert "Count the models" in world.tightfit("--help")
