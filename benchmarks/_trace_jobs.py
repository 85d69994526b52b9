"""The jobs that the tracer is measured against, as data: for building it, and held out to judge it.

Nothing here needs torch. A row's length and its prompt decide the tensors of a batch, so a
prediction can be made for exactly the batch that a measurement runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tightfit.core.strategy import Strategy

FULL = "full"
"""Rows as long as the sequence: the attention mask is all ones."""
PADDED = "padded"
"""Rows of unequal length, padded to the longest."""
PACKED = "packed"
"""Several documents per row, kept apart by their positions."""

SHORTEST_PADDED = 0.45
"""Of the longest row of a padded batch."""
MEAN_DOCUMENT = 5.6
SPREAD_DOCUMENT = 0.8
"""Of the logarithm of a document's tokens: a median of 270, one in twenty above 1,000."""
FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One document as the model sees it."""

    num_tokens: int
    num_prompt: int
    """Tokens at its start that carry no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job on one card."""

    name: str
    model: str
    """Catalogue file without its organization."""
    strategy: Strategy
    batch: str = FULL
    trained_fraction: float = 1.0
    """Of each row's tokens, those at its end."""
    expandable_segments: bool = True
    """As `tightfit train` sets the allocator; otherwise torch's default."""

    @property
    def num_ranks(self) -> int:
        return self.strategy.world_size


def list_micro_batches(job: Job) -> list[list[list[Row]]]:
    """Per micro-batch of one step, per sequence, its rows; the same on every call."""
    return [_list_sequences(job, number) for number in range(job.strategy.grad_accum)]


def _list_sequences(job: Job, number: int) -> list[list[Row]]:
    size, length = job.strategy.micro_batch, job.strategy.seq_len
    if job.batch == PACKED:
        draw = random.Random(f"{job.name} {number}")
        return [_draw_pack(job, length, draw, is_full=index == 0) for index in range(size)]
    if job.batch == PADDED:
        step = (1 - SHORTEST_PADDED) / max(1, size - 1)
        lengths = [round(length * (1 - step * index)) for index in range(size)]
        return [[_row(job, tokens)] for tokens in lengths]
    return [[_row(job, length)] for _ in range(size)]


def _draw_pack(job: Job, length: int, draw: random.Random, *, is_full: bool) -> list[Row]:
    """Documents until the row is full; best fit leaves a few tokens in most rows, so it does."""
    room = length if is_full else length - draw.randrange(FEWEST_TOKENS)
    rows: list[Row] = []
    while room:
        wanted = max(FEWEST_TOKENS, round(draw.lognormvariate(MEAN_DOCUMENT, SPREAD_DOCUMENT)))
        is_last = room - wanted < FEWEST_TOKENS
        rows.append(_row(job, room if is_last else wanted))
        room -= rows[-1].num_tokens
    return rows


def _row(job: Job, num_tokens: int) -> Row:
    return Row(num_tokens=num_tokens, num_prompt=round(num_tokens * (1 - job.trained_fraction)))


def make(name: str, model: str, shape: tuple[int, int], **options: Any) -> Job:
    """A job; what is not the job's own goes to its strategy, whose defaults are elsewhere."""
    own = {key: options.pop(key) for key in _OWN if key in options}
    if own.get("batch") == PACKED:
        options["packing"] = True
    strategy = Strategy(micro_batch=shape[0], seq_len=shape[1], **options)
    return Job(name=name, model=model, strategy=strategy, **own)


_OWN = ("batch", "trained_fraction", "expandable_segments")

_FULL: dict[str, Any] = {"method": "full"}
_LORA: dict[str, Any] = {"method": "lora"}
_QLORA: dict[str, Any] = {"method": "lora", "weights": "nf4"}
_KEEP: dict[str, Any] = {"checkpointing": False}
_EAGER: dict[str, Any] = {"attention": "eager"}
_LIGER: dict[str, Any] = {"fused_kernels": True, "loss": "fused"}
_FOLDED: dict[str, Any] = {"fused_lora": True}
_MIXED: dict[str, Any] = {"weights": "fp32", "compute": "bf16"}


def _fsdp(num_ranks: int) -> dict[str, Any]:
    return {"sharding": "fsdp", "gpus_per_node": num_ranks}


LLAMA_1B, LLAMA_3B, LLAMA_8B = "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B"
LLAMA_7B, LLAMA_13B = "Llama-2-7b-hf", "Llama-2-13b-hf"
QWEN_1B, QWEN_7B = "Qwen2.5-1.5B", "Qwen2.5-7B"
QWEN3_1B, QWEN3_4B = "Qwen3-1.7B", "Qwen3-4B"
BLOOM_1B, BLOOM_2B, BLOOM_3B = "bloom-1b1", "bloom-1b7", "bloom-3b"
FALCON_1B, FALCON_7B = "falcon-rw-1b", "falcon-7b"
GEMMA_2B, GEMMA2_2B, PHI_3 = "gemma-2b", "gemma-2-2b", "Phi-3-mini-4k-instruct"
MISTRAL, PYTHIA, GPT_2 = "Mistral-7B-v0.1", "pythia-1.4b", "gpt2-xl"

DEV: tuple[Job, ...] = (
    make("llama1b-full-keep", LLAMA_1B, (4, 1024), **_FULL, **_KEEP),
    make("llama1b-full-ckpt", LLAMA_1B, (4, 2048), **_FULL),
    make("llama1b-full-liger", LLAMA_1B, (4, 2048), **_FULL, **_KEEP, **_LIGER),
    make("llama1b-full-eager-padded", LLAMA_1B, (2, 1024), batch=PADDED, **_FULL, **_EAGER),
    make("llama1b-mixed-foreach", LLAMA_1B, (2, 512), optimizer="adamw-foreach", **_FULL, **_MIXED),
    make(
        "llama1b-full-8bit-accum",
        LLAMA_1B,
        (2, 1024),
        optimizer="adamw-8bit",
        grad_accum=2,
        **_FULL,
        **_KEEP,
    ),
    make(
        "llama1b-lora-packed", LLAMA_1B, (2, 4096), batch=PACKED, loss="chunked", **_LORA, **_KEEP
    ),
    make("llama1b-int8", LLAMA_1B, (2, 1024), **_LORA, weights="int8"),
    make("llama7b-lora-ckpt", LLAMA_7B, (4, 2048), **_LORA),
    make(
        "llama7b-lora-keep-segments",
        LLAMA_7B,
        (1, 2048),
        expandable_segments=False,
        **_LORA,
        **_KEEP,
    ),
    make("llama7b-lora-some", LLAMA_7B, (2, 2048), recomputed_layers=20, **_LORA, **_LIGER),
    make("llama7b-qlora-ckpt", LLAMA_7B, (4, 1024), **_QLORA),
    make(
        "llama7b-qlora-keep-upcast", LLAMA_7B, (1, 1024), upcast_unquantized=True, **_QLORA, **_KEEP
    ),
    make(
        "qwen1b-lora-padded-answers",
        QWEN_1B,
        (4, 1024),
        batch=PADDED,
        trained_fraction=0.4,
        **_LORA,
        **_KEEP,
    ),
    make("bloom1b-full-ckpt", BLOOM_1B, (4, 1024), **_FULL, **_EAGER),
    make("gemma2b-lora-keep", GEMMA2_2B, (2, 1024), loss="chunked", **_LORA, **_KEEP, **_EAGER),
    make("llama7b-fsdp4-mixed-ckpt", LLAMA_7B, (1, 2048), **_FULL, **_MIXED, **_fsdp(4)),
    make("llama7b-fsdp8-lora-keep", LLAMA_7B, (1, 2048), **_LORA, **_KEEP, **_fsdp(8)),
    make("llama1b-fsdp2-bf16-keep", LLAMA_1B, (2, 1024), **_FULL, **_KEEP, **_fsdp(2)),
)
"""For building: looked at as often as needed."""

HELD_OUT: tuple[Job, ...] = (
    make("llama13b-lora-ckpt", LLAMA_13B, (2, 2048), **_LORA),
    make("llama13b-qlora-ckpt", LLAMA_13B, (2, 1024), loss="chunked", **_QLORA),
    make("llama13b-fsdp8-mixed-ckpt", LLAMA_13B, (1, 2048), **_FULL, **_MIXED, **_fsdp(8)),
    make("llama7b-full-ckpt", LLAMA_7B, (2, 2048), **_FULL),
    make("llama7b-full-foreach", LLAMA_7B, (1, 1024), optimizer="adamw-foreach", **_FULL),
    make("llama7b-full-8bit", LLAMA_7B, (1, 1024), optimizer="adamw-8bit", **_FULL),
    make("llama7b-lora-keep-long", LLAMA_7B, (1, 4096), loss="chunked", **_LORA, **_KEEP),
    make("llama7b-lora-some-liger", LLAMA_7B, (2, 4096), recomputed_layers=12, **_LORA, **_LIGER),
    make(
        "llama7b-lora-dropout",
        LLAMA_7B,
        (2, 1024),
        lora_rank=64,
        lora_dropout=0.05,
        lora_targets=("q_proj", "v_proj"),
        adapter_dtype="fp32",
        autocast=True,
        **_LORA,
        **_KEEP,
    ),
    make("llama7b-lora-ckpt-segments", LLAMA_7B, (2, 2048), expandable_segments=False, **_LORA),
    make("llama7b-qlora-keep", LLAMA_7B, (2, 1024), loss="fused", **_QLORA, **_KEEP),
    make("llama7b-fsdp2-mixed-keep", LLAMA_7B, (1, 1024), **_FULL, **_MIXED, **_KEEP, **_fsdp(2)),
    make("llama8b-qlora-upcast", LLAMA_8B, (2, 2048), upcast_unquantized=True, **_QLORA),
    make("llama8b-fsdp8-lora-ckpt", LLAMA_8B, (2, 4096), loss="fused", **_LORA, **_fsdp(8)),
    make(
        "llama3b-lora-padded-accum",
        LLAMA_3B,
        (4, 1024),
        batch=PADDED,
        grad_accum=2,
        **_LORA,
        **_KEEP,
    ),
    make(
        "llama1b-full-packed-liger", LLAMA_1B, (4, 2048), batch=PACKED, **_FULL, **_KEEP, **_LIGER
    ),
    make(
        "llama1b-full-eager-padded-keep",
        LLAMA_1B,
        (4, 1024),
        batch=PADDED,
        **_FULL,
        **_EAGER,
        **_KEEP,
    ),
    make("llama1b-mixed-accum", LLAMA_1B, (2, 2048), grad_accum=2, **_FULL, **_MIXED),
    make("llama1b-int8-keep", LLAMA_1B, (4, 1024), **_LORA, **_KEEP, weights="int8"),
    make("qwen7b-lora-ckpt", QWEN_7B, (2, 4096), loss="chunked", **_LORA),
    make("qwen1b-qlora-packed", QWEN_1B, (4, 2048), batch=PACKED, **_QLORA, **_KEEP),
    make("qwen3-4b-full-packed", QWEN3_4B, (2, 4096), batch=PACKED, **_FULL, **_LIGER),
    make(
        "qwen3-1b-lora-answers",
        QWEN3_1B,
        (4, 1024),
        batch=PADDED,
        trained_fraction=0.3,
        **_LORA,
        **_KEEP,
    ),
    make(
        "qwen3-4b-fsdp4-lora-packed",
        QWEN3_4B,
        (2, 2048),
        batch=PACKED,
        **_LORA,
        **_KEEP,
        **_fsdp(4),
    ),
    make("bloom3b-full-ckpt", BLOOM_3B, (2, 1024), **_FULL, **_EAGER),
    make(
        "bloom2b-lora-padded-keep",
        BLOOM_2B,
        (4, 1024),
        batch=PADDED,
        loss="chunked",
        **_LORA,
        **_EAGER,
        **_KEEP,
    ),
    make("falcon7b-lora-ckpt", FALCON_7B, (2, 2048), **_LORA),
    make("falcon7b-fsdp4-full-ckpt", FALCON_7B, (1, 2048), **_FULL, **_fsdp(4)),
    make("falcon1b-full-eager-keep", FALCON_1B, (4, 1024), **_FULL, **_EAGER, **_KEEP),
    make("gemma-lora-keep", GEMMA_2B, (2, 2048), loss="fused", **_LORA, **_KEEP),
    make("phi3-lora-some", PHI_3, (2, 2048), recomputed_layers=16, fused_kernels=True, **_LORA),
    make("mistral7b-fsdp8-full-ckpt", MISTRAL, (2, 2048), loss="chunked", **_FULL, **_fsdp(8)),
    make("gpt2-full-segments", GPT_2, (4, 1024), expandable_segments=False, **_FULL, **_KEEP),
)
"""To judge memory by: neither their measurements nor their traces were looked at before."""

TIMED: tuple[Job, ...] = (
    make("llama13b-lora-liger", LLAMA_13B, (4, 1024), **_LORA, **_KEEP, **_FOLDED, **_LIGER),
    make("llama13b-qlora-liger", LLAMA_13B, (2, 2048), **_QLORA, **_KEEP, **_LIGER),
    make("llama13b-fsdp4-lora-ckpt", LLAMA_13B, (2, 2048), **_LORA, **_LIGER, **_fsdp(4)),
    make("llama7b-full-liger", LLAMA_7B, (4, 2048), **_FULL, **_KEEP, **_LIGER),
    make("llama7b-full-long", LLAMA_7B, (1, 8192), loss="chunked", **_FULL),
    make("llama7b-lora-liger", LLAMA_7B, (8, 2048), **_LORA, **_KEEP, **_FOLDED, **_LIGER),
    make("llama7b-lora-liger-peft", LLAMA_7B, (8, 2048), **_LORA, **_KEEP, **_LIGER),
    make("llama7b-lora-plain", LLAMA_7B, (4, 1024), **_LORA, **_KEEP),
    make("llama7b-lora-attention", LLAMA_7B, (4, 2048), lora_targets=("q_proj", "v_proj"), **_LORA),
    make("llama7b-qlora-accum", LLAMA_7B, (4, 1024), grad_accum=2, **_QLORA, **_FOLDED, **_LIGER),
    make(
        "llama7b-lora-padded-liger", LLAMA_7B, (4, 2048), batch=PADDED, **_LORA, **_KEEP, **_LIGER
    ),
    make("llama7b-fsdp8-full-liger", LLAMA_7B, (4, 2048), **_FULL, **_LIGER, **_fsdp(8)),
    make("llama8b-lora-liger", LLAMA_8B, (4, 2048), **_LORA, **_KEEP, **_FOLDED, **_LIGER),
    make("llama8b-full-ckpt", LLAMA_8B, (2, 4096), loss="fused", **_FULL),
    make("llama8b-lora-packed", LLAMA_8B, (4, 2048), batch=PACKED, **_LORA, **_KEEP, **_LIGER),
    make("llama3b-full-keep", LLAMA_3B, (4, 2048), loss="chunked", **_FULL, **_KEEP),
    make("llama3b-mixed-liger", LLAMA_3B, (4, 2048), **_FULL, **_MIXED, **_LIGER),
    make("llama1b-full-wide", LLAMA_1B, (16, 1024), **_FULL, **_KEEP, **_LIGER),
    make("llama1b-lora-eager", LLAMA_1B, (4, 2048), **_LORA, **_EAGER),
    make("qwen7b-full-8bit", QWEN_7B, (2, 2048), optimizer="adamw-8bit", **_FULL, **_LIGER),
    make("qwen7b-lora-padded", QWEN_7B, (4, 2048), batch=PADDED, loss="chunked", **_LORA),
    make("qwen7b-qlora-packed", QWEN_7B, (2, 4096), batch=PACKED, **_QLORA, **_LIGER),
    make(
        "qwen7b-fsdp2-lora-keep",
        QWEN_7B,
        (4, 2048),
        **_LORA,
        **_KEEP,
        **_FOLDED,
        **_LIGER,
        **_fsdp(2),
    ),
    make("qwen3-4b-lora-keep", QWEN3_4B, (4, 2048), loss="chunked", **_LORA, **_KEEP),
    make("qwen3-1b-full-packed", QWEN3_1B, (4, 4096), batch=PACKED, loss="fused", **_FULL),
    make("bloom3b-lora-keep", BLOOM_3B, (4, 1024), **_LORA, **_EAGER, **_KEEP),
    make("bloom2b-full-ckpt", BLOOM_2B, (8, 512), loss="chunked", **_FULL, **_EAGER),
    make("falcon7b-full-ckpt", FALCON_7B, (2, 2048), loss="chunked", **_FULL),
    make("falcon7b-qlora-ckpt", FALCON_7B, (4, 1024), **_QLORA),
    make("mistral7b-lora-some", MISTRAL, (4, 4096), recomputed_layers=16, **_LORA, **_LIGER),
    make("gemma2b-full-padded", GEMMA2_2B, (4, 1024), batch=PADDED, **_FULL, **_EAGER, **_LIGER),
    make("phi3-full-ckpt", PHI_3, (4, 2048), loss="chunked", **_FULL),
    make("pythia-full-keep", PYTHIA, (4, 2048), loss="chunked", **_FULL, **_KEEP),
    make("gpt2-lora-keep", GPT_2, (8, 1024), **_LORA, **_KEEP),
)
"""To judge step times by: the held-out jobs above were looked at while they were learnt."""

SETS: dict[str, tuple[Job, ...]] = {"dev": DEV, "held-out": HELD_OUT, "timed": TIMED}
