"""The same data, order and settings through stock TRL: the same losses, step by step.

TRL reads the files, renders the template, builds its masks and batches by itself; nothing of
ours is handed to it but the folder of a model and a file of conversations.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_jobs import make_model

NUM_STEPS = 20
NUM_ROWS = 24
LEARNING_RATE = 5e-3
SEQ_LEN = 96
WORDS = ["how", "many", "singers", "are", "older", "than", "the", "album", "of", "every", "band"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=64)


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one to three turns; every answer counts, every prompt does not."""
    rng = random.Random(1)

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    rows = []
    for _ in range(NUM_ROWS):
        turns = [
            message
            for _ in range(rng.randint(1, 3))
            for message in (
                {"role": "user", "content": text(6)},
                {"role": "assistant", "content": text(8)},
            )
        ]
        rows.append({"messages": turns})
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def relative_rate(step: int) -> float:
    """Cosine after two steps of warm-up. TRL's own warm-up begins with a step at rate 0."""
    if step < 2:
        return (step + 1) / 2
    return 0.5 * (1 + math.cos(math.pi * (step - 2) / (NUM_STEPS - 2)))


def train_with_trl(model_folder: Path, data_file: Path, out: Path, **settings: Any) -> list[float]:
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in data_file.read_text().splitlines()]
    config = SFTConfig(
        output_dir=str(out),
        max_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        max_length=SEQ_LEN,
        assistant_only_loss=True,
        loss_type="nll",
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        max_grad_norm=1.0,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            assert num_training_steps == NUM_STEPS
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, relative_rate)
            return self.lr_scheduler

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_tightfit(
    model_folder: Path, data_file: Path, out: Path, **strategy: Any
) -> list[float]:
    recipe = out / "recipe.yaml"
    out.mkdir(parents=True)
    fixed = {"weights": "fp32", "compute": "fp32", "checkpointing": False} | strategy
    batch = fixed.pop("effective_batch")
    packing = fixed.pop("packing")
    recipe.write_text(
        json.dumps(
            {
                "model": str(model_folder),
                "data": str(data_file),
                "on": "cpu",
                "method": "full",
                "seq_len": SEQ_LEN,
                "max_steps": NUM_STEPS,
                "effective_batch": batch,
                "packing": packing,
                "learning_rate": LEARNING_RATE,
                "schedule": "cosine",
                "warmup_fraction": 2 / NUM_STEPS,
                "shuffle": False,
                "log_to": [],
                "strategy": fixed,
                "output": str(out / "run"),
            }
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "train", str(recipe), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = map(json.loads, (out / "run" / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


_OTHERS = pytest.mark.filterwarnings("ignore")
"""Warnings of TRL and its libraries about each other are not ours to mend."""


@_OTHERS
def test_padded_batches(model_folder: Path, data_file: Path, tmp_path: Path) -> None:
    theirs = train_with_trl(
        model_folder,
        data_file,
        tmp_path / "trl",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    ours = train_with_tightfit(
        model_folder,
        data_file,
        tmp_path / "ours",
        effective_batch=8,
        packing=False,
        micro_batch=4,
    )

    assert len(ours) == len(theirs) == NUM_STEPS
    assert theirs[-1] < theirs[0] - 1
    assert ours == pytest.approx(theirs, abs=1e-3)


@_OTHERS
def test_packed_batches(model_folder: Path, data_file: Path, tmp_path: Path) -> None:
    """A step holds all rows, so that it does not matter which rows share a sequence."""
    theirs = train_with_trl(
        model_folder,
        data_file,
        tmp_path / "trl",
        per_device_train_batch_size=NUM_ROWS,
        packing=True,
    )
    ours = train_with_tightfit(
        model_folder,
        data_file,
        tmp_path / "ours",
        effective_batch=NUM_ROWS,
        packing=True,
    )

    assert len(ours) == len(theirs) == NUM_STEPS
    assert theirs[-1] < theirs[0] - 1
    assert ours == pytest.approx(theirs, abs=1e-3)
