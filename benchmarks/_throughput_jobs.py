"""Jobs of the training speed comparison, and the rows that every framework trains on."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from measure_training import count_words, read_catalogue, write_model

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
MARKS = 8
"""Tokens left for the marks of a chat template around a turn."""


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
    attentions: tuple[str, ...] = ("sdpa",)
    """transformers' that trl tries in turn, fastest first."""
    memory_limit: str = ""
    """What tightfit may take of the card; the other trainers have no such limit."""
    objective: str = "sft"
    """`dpo`: rows are pairs of answers to one prompt, which takes half of their tokens."""

    @property
    def has_adapters(self) -> bool:
        return self.method != "full"


LLAMA_2, LLAMA_3 = "meta-llama--Llama-2-7b-hf", "meta-llama--Meta-Llama-3-8B"
LLAMAS = {
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


FLEX = ("flex_attention", "eager")
"""For families that transformers' SDPA does not know."""


def _job(
    model: str,
    method: str,
    num_rows: int = 4,
    seq_len: int = 2048,
    attentions: tuple[str, ...] = ("sdpa",),
    memory_limit: str = "",
) -> Job:
    return Job(
        name=f"{model.rpartition('--')[2]}-{method}",
        model=model,
        method=method,
        num_rows=num_rows,
        micro_batch=num_rows,
        seq_len=seq_len,
        attentions=attentions,
        memory_limit=memory_limit,
    )


_lora = partial(_job, method="lora")
FAMILIES = {
    job.name: job
    for job in (
        _lora("openai--gpt-oss-20b", attentions=FLEX),
        _lora("Qwen--Qwen3-30B-A3B"),
        # The first step of transformers' flex attention had not ended after a minute.
        _lora("google--gemma-2-2b", num_rows=8, attentions=("eager",)),
        _lora("google--gemma-3-4b-it"),
        _lora("mistralai--Mistral-7B-v0.1", num_rows=2, seq_len=8192),
        _lora("Qwen--Qwen3-4B", num_rows=4, seq_len=4096),
        _lora("tiiuae--falcon-7b"),
        _job("bigscience--bloom-1b7", "full", 8, 1024, attentions=("eager",)),
        _lora("Qwen--Qwen3.5-9B"),
        _lora("zai-org--GLM-4.7-Flash"),
        _lora("google--gemma-4-26B-A4B"),
        _lora("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        _lora("baidu--ERNIE-4.5-21B-A3B-PT"),
        _lora("THUDM--glm-4-9b-chat-hf"),
        _lora("allenai--OLMo-2-1124-13B"),
        _lora("HuggingFaceTB--SmolLM3-3B", num_rows=8),
        _lora("microsoft--Phi-4-mini-instruct"),
        _lora("microsoft--phi-4", num_rows=2),
        _lora("microsoft--phi-2", num_rows=8),
        _lora("Qwen--Qwen2.5-7B"),
        _lora("mistralai--Mistral-Nemo-Base-2407", num_rows=2),
        _lora("bigscience--bloom-7b1", attentions=("eager",)),
        _lora("LiquidAI--LFM2-1.2B", num_rows=16),
        _job("microsoft--Phi-3-mini-4k-instruct", "full", 4, 2048),
        _job("EleutherAI--pythia-1.4b", "full", 16, 2048),
        _job("openai--gpt-oss-20b", "qlora", 1, attentions=FLEX, memory_limit="16GiB"),
        _job("Qwen--Qwen3-30B-A3B", "qlora", 1, memory_limit="24GiB"),
    )
}
"""One or two models of a family, in the order in which they matter."""
PREFERENCES = {
    "7b-dpo": Job(
        name="7b-dpo",
        model=LLAMA_2,
        method="lora",
        num_rows=4,
        micro_batch=4,
        seq_len=1024,
        objective="dpo",
    )
}
JOBS = LLAMAS | FAMILIES | PREFERENCES
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_LEN = 128
TINY_WORDS = 512


def write_folder(job: Job, folder: Path, *, tiny: bool) -> int:
    """The model's config and tokenizer, no weights; the number of words."""
    config = read_catalogue(job.model)
    if tiny:
        config = config | TINY if job.name in LLAMAS else _tiny_config(config["model_type"])
    write_model(folder, config)
    return count_words(config)


def _tiny_config(model_type: str) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from tiny_configs import whole_config

    config: dict[str, Any] = whole_config(model_type, vocab_size=TINY_WORDS)
    return config | {"model_type": model_type}


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


def write_rows(rows: list[list[int]], path: Path, *, objective: str) -> None:
    """The rows as words, of which the tokenizer makes the same numbers again."""
    documents = make_pairs(rows) if objective == "dpo" else [{"text": to_words(r)} for r in rows]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def to_words(row: list[int]) -> str:
    return " ".join(f"w{token - FIRST_WORD}" for token in row if token != END)


def make_pairs(rows: list[list[int]]) -> list[dict[str, list[dict[str, str]]]]:
    """Half of a row is the prompt, the other half and the next row's are the answers."""
    pairs = []
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        middle = len(row) // 2
        texts = {
            "prompt": row[: middle - MARKS],
            "chosen": row[middle:-MARKS],
            "rejected": other[middle:-MARKS],
        }
        pairs.append(
            {
                name: [
                    {"role": "user" if name == "prompt" else "assistant", "content": to_words(text)}
                ]
                for name, text in texts.items()
            }
        )
    return pairs
