"""Jobs of the training speed comparison, and the rows that every framework trains on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from measure_training import write_model

LENGTHS = Path(__file__).resolve().parent / "alpaca_lengths.json"
SEED = 0
LORA_RANK = 16
LORA_ALPHA = 32
MAX_GRAD_NORM = 1.0
LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
NUM_WARM_UP = 5
"""Steps before the clock starts: compilation, autotuning and the allocator's first blocks."""
END = 2
"""The end token's number in the tokenizer that `write_model` writes; words start at 4."""
FIRST_WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model, method and workload. `micro_batch` is what the peers take at a time."""

    name: str
    model: str
    method: str
    num_rows: int
    """Sequences of an optimizer step, packed ones where the framework packs."""
    micro_batch: int
    seq_len: int = 2048
    is_alpaca: bool = False
    """Rows with the lengths of real instruction data, in place of full ones."""

    @property
    def has_adapters(self) -> bool:
        return self.method != "full"


LLAMA_2, LLAMA_3 = "meta-llama--Llama-2-7b-hf", "meta-llama--Meta-Llama-3-8B"
JOBS = {
    job.name: job
    for job in (
        Job(name="7b-lora", model=LLAMA_2, method="lora", num_rows=4, micro_batch=4),
        Job(name="7b-full", model=LLAMA_2, method="full", num_rows=4, micro_batch=4),
        Job(name="8b-lora", model=LLAMA_3, method="lora", num_rows=4, micro_batch=4),
        Job(
            name="1b-full",
            model="meta-llama--Llama-3.2-1B",
            method="full",
            num_rows=16,
            micro_batch=16,
        ),
        Job(name="7b-qlora", model=LLAMA_2, method="qlora", num_rows=4, micro_batch=4),
        Job(
            name="7b-lora-alpaca",
            model=LLAMA_2,
            method="lora",
            num_rows=8,
            micro_batch=8,
            is_alpaca=True,
        ),
    )
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_LEN = 128


def write_folder(job: Job, folder: Path, *, tiny: bool) -> int:
    """The model's config and tokenizer, no weights; the number of words."""
    write_model(folder, job.model)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    if tiny:
        path.write_text(json.dumps(config | TINY))
    return int(config["vocab_size"])


def make_rows(job: Job, *, num_steps: int, num_words: int) -> list[list[int]]:
    """Random tokens, each row closed by the end token; the same for every framework."""
    chance = random.Random(SEED)
    return [
        [*(chance.randrange(FIRST_WORD, num_words) for _ in range(length - 1)), END]
        for length in _lengths(job, num_steps, chance)
    ]


def _lengths(job: Job, num_steps: int, chance: random.Random) -> Iterator[int]:
    if not job.is_alpaca:
        return islice(cycle([job.seq_len]), num_steps * job.num_rows)
    counts: dict[str, int] = json.loads(LENGTHS.read_text())["num_rows_by_length"]
    lengths = [
        min(int(length), job.seq_len) for length, count in counts.items() for _ in range(count)
    ]
    chance.shuffle(lengths)
    return islice(cycle(lengths), len(lengths))


def write_text(rows: list[list[int]], path: Path) -> None:
    """The rows as words, of which the tokenizer makes the same numbers again."""
    with path.open("w") as stream:
        for row in rows:
            words = " ".join(f"w{token - FIRST_WORD}" for token in row[:-1])
            stream.write(json.dumps({"text": words}) + "\n")
