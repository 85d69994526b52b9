"""plan.json and what else a run folder holds, mutated: a report or one error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

import pytest
from mutate import mutate_bytes, mutate_tree, plant_special, write_json

from hostile_trials import StartTrials
from made_runs import make_run

FILES: tuple[str, ...] = ("plan.json", "state.json", "metrics.jsonl", "tokens.json")
FILES += ("environment.json", "report.json", "recipe.json", "launcher.lock")
FILES += ("adapter/adapter_config.json",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    make_run(folder)
    (folder / "tokens.json").write_text(json.dumps({"train": "tokens", "eval": None}))
    (folder / "launcher.lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    recipe = {"recipe": {"model": "gpt2", "data": [{"path": "rows.jsonl"}]}, "settings": {}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "adapter").mkdir()
    adapter = {"base_model_name_or_path": "gpt2", "peft_type": "LORA", "r": 8}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def make_case(rng: Random, folder: Path, run: Path) -> list[str]:
    shutil.copytree(run, folder / "run")
    for name in rng.sample(FILES, rng.choice((1, 1, 2, 4))):
        path = folder / "run" / name
        if rng.random() < 0.15 or not path.exists():
            plant_special(rng, path)
        elif name.endswith(".json"):
            path.write_bytes(write_json(rng, mutate_tree(rng, json.loads(path.read_bytes()))))
        else:
            path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    verbs = (
        *(["runs", "run"], ["runs", "."], ["runs", "run", "--json"]),
        *(["plan", "run/plan.json"], ["train", "run/plan.json", "--dry-run"], ["train", "run"]),
        *(["merge", "run", "--out", "out"], ["eval", "run", "--data", "rows.jsonl"]),
        *(["convert", "run", "--to", "gguf-lora"], ["cancel", "run"]),
    )
    return list(rng.choice(verbs))


def test_run_folders(trials: StartTrials, run: Path) -> None:
    trials("run folders", num_short=200).run(lambda rng, folder: make_case(rng, folder, run))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("verb", ["runs", "train", "merge", "cancel"])
def test_a_pipe_is_passed_over_or_refused(
    trials: StartTrials, run: Path, name: str, verb: str
) -> None:
    def make(folder: Path) -> list[str]:
        shutil.copytree(run, folder / "run")
        (folder / "run" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "run" / name)
        return [verb, "run", *(["--out", "out"] if verb == "merge" else [])]

    assert trials("run pipes").run_one(name, make) != 70
