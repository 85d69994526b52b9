"""config.json and its index beside it, mutated: shapes or one error."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutate import mutate_tree, plant_special, write_json

from hostile_trials import StartTrials
from tightfit.models.catalogue import list_models, read_row

_FOLDER = files("tightfit.catalogue").joinpath("models")
CONFIGS: list[dict[str, Any]] = [json.loads(read_row(row)) for row in list_models()[::6]]


def make_case(rng: Random, folder: Path) -> list[str]:
    whole = rng.choice(CONFIGS)
    tree = mutate_tree(rng, whole, most=4)
    # A family without a reader is asked of a process that imports transformers, for seconds.
    if isinstance(tree, dict) and tree.get("model_type") != whole["model_type"]:
        tree["model_type"] = rng.choice((whole["model_type"], 5, None, [], "a\nb", "x" * 500))
    if isinstance(tree, dict) and not tree.get("model_type"):
        tree["model_type"] = whole["model_type"]
    path = folder / "config.json"
    path.write_bytes(write_json(rng, tree) if isinstance(tree, dict) else b"[]")
    if rng.random() < 0.1:
        plant_special(rng, path)
    words = ["estimate", rng.choice((".", "config.json")), "--on", "T4"]
    return [*words, "--method", rng.choice(("full", "lora", "qlora", "load")), "--seq-len", "512"]


def test_config_files(trials: StartTrials) -> None:
    trials("config.json", num_short=200).run(make_case)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
        b'{"model_type": "llama", "name": "\\ud800"}',
        b'{"model_type": "llama", "hidden_size": NaN}',
        b"\xff\xfe{\x00}\x00",
        b"",
    ],
    ids=["lists", "mappings", "digits", "surrogate", "nan", "utf-16", "empty"],
)
def test_texts_that_once_failed(trials: StartTrials, text: bytes) -> None:
    def make(folder: Path) -> list[str]:
        (folder / "config.json").write_bytes(text)
        return ["estimate", ".", "--on", "T4"]

    assert trials("config texts").run_one("text", make) == 4
