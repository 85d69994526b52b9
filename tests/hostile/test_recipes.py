"""Recipes and cluster files, mutated as text and as trees: an answer or one error."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from mutate import mutate_bytes, mutate_text, mutate_tree, plant_special

from hostile_trials import StartTrials

RECIPE: dict[str, Any] = {
    "model": "MODEL",
    "data": [{"path": "rows.jsonl", "weight": 1.0, "take": "50%"}],
    "method": "lora",
    "seq_len": 128,
    "epochs": 1,
    "effective_batch": 4,
    "learning_rate": 1e-4,
    "on": "T4",
    "lora": {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]},
    "strategy": {"micro_batch": 2},
    "eval_fraction": 0.1,
    "seed": 3,
    "output": "runs/one",
}
CLUSTER: dict[str, Any] = {
    "name": "lab",
    "groups": [
        {"name": "small", "nodes": 2, "gpu": "T4", "gpus_per_node": 4, "host_memory": "64 GiB"},
        {"name": "large", "nodes": 1, "gpu": "A100-80GB", "gpus_per_node": 8},
    ],
    "network": "100Gb/s",
}
ROWS = '{"prompt": "add 1 and 1", "completion": "that is 2"}\n' * 8


def make_text(rng: Random, tree: Any) -> bytes:
    try:
        is_tree = rng.random() < 0.5
        mutated = _plain(mutate_tree(rng, tree)) if is_tree else {}
        text = yaml.safe_dump(mutated, sort_keys=False, allow_unicode=rng.random() < 0.5)
    except RecursionError:  # of the writer
        is_tree, text = False, ""
    data = text.encode("utf-8", "surrogatepass")
    if not is_tree:
        data = mutate_text(rng, yaml.safe_dump(tree, sort_keys=False)).encode("utf-8", "replace")
    return mutate_bytes(rng, data) if rng.random() < 0.1 else data


def _plain(tree: Any) -> Any:
    """Without numbers that Python refuses to print."""
    if isinstance(tree, dict):
        return {key: _plain(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_plain(item) for item in tree]
    return 10**60 if isinstance(tree, int) and tree.bit_length() > 200 else tree


def make_case(rng: Random, folder: Path, model: Path) -> list[str]:
    (folder / "rows.jsonl").write_text(ROWS)
    path = folder / rng.choice(("job.yaml", "job.yml"))
    if rng.random() < 0.25:
        path = folder / "lab.yaml"
        path.write_bytes(make_text(rng, CLUSTER))
        words = ["hardware", path.name]
    else:
        path.write_bytes(make_text(rng, RECIPE | {"model": str(model)}))
        words = ["prepare", path.name]
    if rng.random() < 0.1:
        plant_special(rng, path)
    return words


def test_recipes(trials: StartTrials, model: Path) -> None:
    trials("recipes", num_short=250).run(lambda rng, folder: make_case(rng, folder, model))


@pytest.mark.parametrize("verb", ["prepare", "plan", "train"])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 40_000,
        "- " * 100_000,
        "? " * 100_000,
        "a:\n" + "".join(" " * depth + "- \n" for depth in range(600)),
        "model: gpt2\nseed: " + "9" * 5000,
        "model: gpt2\nseed: 0x" + "f" * 5000,
        'model: "gpt\\0two"\ndata: rows.jsonl',
        'model: gpt2\ndata: "a\\0b.jsonl"\non: T4',
        "model: gpt2\non: T4\ndata: " + "a" * 300,
        "model: gpt2\non: T4\ndata: /dev/zero",
    ],
    ids=map(str, range(11)),
)
def test_texts_that_once_failed(trials: StartTrials, verb: str, text: str) -> None:
    def make(folder: Path) -> list[str]:
        (folder / "job.yaml").write_text(text)
        return [verb, "job.yaml"]

    assert trials("recipe texts").run_one("text", make) not in (0, 70)
