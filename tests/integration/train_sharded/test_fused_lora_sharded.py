"""Fused LoRA on two processes, against peft's own forward on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fused_lora_worker import NUM_STEPS, SHARDED

from shard_cases import make_model, make_store

WORKER = Path(__file__).with_name("fused_lora_worker.py")
NUM_ADAPTERS = 8  # of q_proj and down_proj in four layers


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("folded")
    make_store(folder / "store")
    make_model(folder / "model")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(WORKER.parents[2] / "support"),
    }
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for launcher in ([], many):
        command = [sys.executable, *launcher, str(WORKER), str(folder)]
        ended = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
    return {
        name: found
        for count in (1, 2)
        for name, found in json.loads((folder / f"{count}.json").read_text()).items()
    }


@pytest.mark.parametrize("name", list(SHARDED))
def test_losses_are_those_of_peft_alone(notes: dict[str, Any], name: str) -> None:
    alone = notes["nf4-peft" if name.startswith("nf4") else "peft"]
    assert notes[name]["num_folded"] == NUM_ADAPTERS
    assert alone["num_folded"] == 0
    assert len(alone["losses"]) == NUM_STEPS
    assert notes[name]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert len(alone["learned"]) == NUM_ADAPTERS
    assert min(alone["learned"].values()) > 0
    assert notes[name]["learned"] == pytest.approx(alone["learned"], rel=1e-3)
