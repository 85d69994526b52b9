"""What sinfo and kubectl print, mutated: an inventory or one error."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutate import mutate_bytes, mutate_text, mutate_tree, write_json

from hostile_trials import StartTrials

GOLDEN = Path(__file__).parents[1] / "golden" / "hardware"
SLURM = [
    (path.read_text(), path.with_name(path.name.replace(".nodes.", ".used.")))
    for path in sorted(GOLDEN.glob("slurm_*.nodes.txt"))
]
TREES: dict[str, Any] = {
    what: json.loads((GOLDEN / f"kubernetes_{what}.json").read_text()) for what in ("nodes", "pods")
}
CATS = {
    "sinfo": 'case "$*" in *%N\\|%R*) cat nodes.txt;; *) cat used.txt;; esac',
    "kubectl": "cat $2.json; exit $(cat code)",
}


def make_case(rng: Random, folder: Path) -> list[str]:
    if rng.random() < 0.5:
        nodes, used = rng.choice(SLURM)
        details = used.read_text() if used.exists() else ""
        for name, text in (("nodes.txt", nodes), ("used.txt", details)):
            data = (mutate_text(rng, text) if rng.random() < 0.6 else text).encode(
                "utf-8", "replace"
            )
            (folder / name).write_bytes(mutate_bytes(rng, data) if rng.random() < 0.4 else data)
        on = rng.choice(("slurm", "slurm:batch", "slurm:x"))
    else:
        for what, tree in TREES.items():
            (folder / f"{what}.json").write_bytes(write_json(rng, mutate_tree(rng, tree, most=5)))
        (folder / "code").write_text(rng.choice("0001"))
        on = "k8s"
    return ["hardware", "--on", on, *rng.choice(([], ["--each"], ["--json"]))]


def test_cluster_outputs(
    trials: StartTrials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, line in CATS.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    trials("cluster output", num_short=60).run(make_case)
