"""Traces of ZeRO: what stands between steps, by arithmetic; and processes that trace many jobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tightfit.core.strategy import Strategy
from tightfit.estimation.state import ZERO_BUCKET_VALUES
from tightfit.trace.recording import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS, Recording
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import NUM_STEPS, record_job

HIDDEN, LAYERS, VOCAB, WIDE = 64, 2, 512, 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
MATRIX_VALUES = 2 * VOCAB * HIDDEN + LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE)
NORM_VALUES = HIDDEN * (2 * LAYERS + 1)
NUM_VALUES = MATRIX_VALUES + NORM_VALUES


def record(**changes: Any) -> Recording:
    settings = {"micro_batch": 2, "seq_len": 32, "method": "full", "gpus_per_node": 4}
    strategy = Strategy.model_validate(settings | changes)
    job = TraceJob(
        config=CONFIG,
        strategy=strategy,
        compute_capability=(9, 0),
        stages=(),
    )
    return record_job(job.model_copy(update={"config": CONFIG}))


def sum_standing(recording: Recording) -> dict[str, int]:
    """Bytes by category after the last step; single numbers and small tables are left out."""
    standing: dict[str, int] = {}
    for allocation, begins in recording.walk():
        if allocation.num_bytes < 64:
            continue
        change = allocation.num_bytes if begins else -allocation.num_bytes
        standing[allocation.category] = standing.get(allocation.category, 0) + change
    return standing


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_stage_2_keeps_whole_weights_and_a_share_of_the_state(num_ranks: int) -> None:
    recording = record(sharding="zero2", gpus_per_node=num_ranks)
    standing = sum_standing(recording)
    # Weights in bf16; master copy and two moments in fp32.
    assert standing[WEIGHTS] == 2 * NUM_VALUES
    assert max_of(recording, OPTIMIZER) == 12 * NUM_VALUES // num_ranks
    assert standing[GRADIENTS] == 0
    assert standing[COMMUNICATION] == 0


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_stage_3_keeps_a_share_of_everything(num_ranks: int) -> None:
    recording = record(sharding="zero3", gpus_per_node=num_ranks)
    standing = sum_standing(recording)
    assert standing[WEIGHTS] == 2 * NUM_VALUES // num_ranks
    assert max_of(recording, OPTIMIZER) == 12 * NUM_VALUES // num_ranks
    assert standing[GRADIENTS] == 2 * NUM_VALUES // num_ranks
    # The reduce bucket, and norms, which are gathered for good.
    assert standing[COMMUNICATION] == 2 * HIDDEN**2 + 2 * NORM_VALUES


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_the_reduce_bucket_has_its_full_size_whatever_the_model(sharding: str) -> None:
    sizes = [a.num_bytes for a in record(sharding=sharding).allocations]
    assert sizes.count(2 * ZERO_BUCKET_VALUES) == NUM_STEPS  # one in each


def test_stage_1_holds_whole_gradients_and_stage_2_does_not() -> None:
    whole, cut = (
        max_of(record(sharding=name, checkpointing=False), GRADIENTS) for name in ("zero1", "zero2")
    )
    assert whole >= 2 * NUM_VALUES
    assert cut < NUM_VALUES


def max_of(recording: Recording, category: str) -> int:
    """The most of a category at a time; optimizer state is dropped when training is done."""
    live = most = 0
    for allocation, begins in recording.walk():
        if allocation.category == category and allocation.num_bytes >= 64:
            live += allocation.num_bytes if begins else -allocation.num_bytes
            most = max(most, live)
    return most


def test_one_process_traces_many_jobs_and_leaves_no_trace() -> None:
    resize, linear = torch.UntypedStorage.resize_, functional.linear
    fsdp: dict[str, Any] = {"sharding": "fsdp", "gpus_per_node": 4}
    first = record(**fsdp)
    others: list[dict[str, Any]] = [
        {"sharding": "fsdp", "gpus_per_node": 2},
        {"sharding": "fsdp-hybrid", "num_nodes": 2},
        {"sharding": "ddp"},
        {"sharding": "zero3"},
        {"sharding": "single", "gpus_per_node": 1},
    ]
    for changes in others:
        record(**changes)
    again = record(**fsdp)
    assert (again.sizes, again.events) == (first.sizes, first.events)
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is resize
    assert functional.linear is linear


def test_gathers_and_reductions_allocate_on_streams_of_their_own() -> None:
    recording = record(sharding="fsdp")
    streams = {a.stream for a in recording.allocations if a.category == COMMUNICATION}
    assert len(streams - {0}) >= 1
    assert {a.stream for a in recording.allocations if a.category == "activations"} == {0}
