"""Traces of FSDP2 and DDP against the same jobs on real tensors, as their allocator reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from allocator_reports import Told, listening
from tightfit.core.objectives import Objective
from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy
from tightfit.trace.caching_allocator import find_peak
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import INPUTS, Recording
from tightfit.training.distributed import DistContext, init_single_process_group
from tightfit.training.engine import TorchEngine
from tightfit.training.model import build_optimizer
from tightfit.training.sharding import replicate
from tightfit.training.step import train_step
from tightfit.training.tracing.engine import (
    build_fake_engine,
    build_meta_module,
    fake_process_group,
    list_local_tensors,
    make_training,
    record_fsdp,
    shard_fake,
)
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import make_fake_batch, make_real_batch

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
CPU = torch.device("cpu")
KERNEL_SCRATCH_BYTES = 20_000
"""What CPU kernels take for themselves: nothing that a card would."""

FSDP_CASES: list[dict[str, Any]] = [
    {"method": "lora"},
    {"method": "full", "weights": "fp32", "gpus_per_node": 4},
    {"method": "full", "sharding": "fsdp-grad-op"},
    {"method": "lora", "sharding": "fsdp-hybrid", "num_nodes": 2, "checkpointing": False},
    {"method": "full", "gpus_per_node": 3, "optimizer": "adamw-foreach", "grad_accum": 2},
]
DDP_CASES: list[dict[str, Any]] = [
    {"method": "full", "sharding": "ddp", "grad_accum": 2},
    {"method": "lora", "sharding": "ddp", "checkpointing": False},
]
_PLAIN = {"sharding": "single", "gpus_per_node": 1}
PREFERENCE_CASES: list[dict[str, Any]] = [
    {"objective": "dpo", "loss": "fused", "grad_accum": 2, **_PLAIN},
    {"objective": "ipo", "method": "full", "weights": "fp32", "loss": "chunked", **_PLAIN},
    {"objective": "orpo", "loss": "plain", "checkpointing": False, **_PLAIN},
    {"objective": "kto", "loss": "fused", "precompute_reference": True, **_PLAIN},
    {"objective": "kto", "loss": "fused", "gpus_per_node": 4},
    {
        **{"objective": "dpo", "method": "full", "precompute_reference": True},
        **{"loss": "plain", "sharding": "fsdp-grad-op"},
    },
    {"objective": "simpo", "loss": "fused", "sharding": "ddp", "grad_accum": 2},
]


class NoWorkspace(GpuEmulation):
    """A CPU's kernels are not a card's."""

    def workspace_blocks(self, *_call: Any) -> list[int]:
        return []

    def persistent_blocks(self, *_call: Any) -> list[int]:
        return []


def make_strategy(**changes: Any) -> Strategy:
    settings = {"micro_batch": 2, "seq_len": 128, "sharding": "fsdp", "gpus_per_node": 2}
    return Strategy.model_validate(settings | changes)


def make_skeleton(folder: Path, strategy: Strategy) -> tuple[Any, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    training = make_training(strategy, folder)
    return build_meta_module(folder, strategy, training, has_varlen=False), training


def make_rows(strategy: Strategy) -> dict[str, torch.Tensor]:
    if strategy.objective is not Objective.SFT:
        job = TraceJob(config=CONFIG, strategy=strategy, compute_capability=None)
        return make_real_batch(job, AutoConfig.for_model(**CONFIG))
    ids = torch.ones((strategy.micro_batch, strategy.seq_len), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def run_two_steps(engine: Any, batch: dict[str, torch.Tensor]) -> None:
    accumulated = engine.strategy.grad_accum
    numbers: Any = {"divisor": 1, "learning_rate": 1e-5, "seeds": [0] * accumulated}
    for _ in range(2):
        outcome = train_step(engine, [batch] * accumulated, **numbers)
        assert outcome.update.is_skipped is not True


def record(folder: Path, strategy: Strategy) -> Recording:
    """The trace."""
    module, training = make_skeleton(folder, strategy)
    rows = make_rows(strategy)
    recorder = Recorder(NoWorkspace(), vocab_size=CONFIG["vocab_size"])
    with (
        fake_process_group(strategy) as context,
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        record_fsdp(recorder),
    ):
        engine = build_fake_engine(module, strategy, training, context=context, recorder=recorder)
        batch = make_fake_batch(rows, CPU)
        recorder.hold(batch.values(), INPUTS)
        recorder.stage = "backward"
        run_two_steps(engine, batch)
    return recorder.finish()


def run_for_real(folder: Path, strategy: Strategy, wrap: Callable[..., Any]) -> Told:
    """The same job on real tensors, in a group that moves nothing."""
    module, training = make_skeleton(folder, strategy)
    with listening() as reported:
        batch = make_rows(strategy)
        with join_group(strategy) as context:
            module = wrap(module, strategy, context)
            with torch.no_grad():
                for tensor in list_local_tensors([*module.parameters(), *module.buffers()]):
                    tensor.fill_(0.01)
            optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
            engine = TorchEngine(
                module,
                optimizer,
                strategy=strategy,
                device=CPU,
                world_size=context.world_size,
                max_grad_norm=training.max_grad_norm,
            )
            run_two_steps(engine, batch)
    return reported


@contextmanager
def join_group(strategy: Strategy) -> Iterator[DistContext]:
    """DDP's buckets are the same for one rank, and its reducer wants answers."""
    with fake_process_group(strategy) as context:
        if strategy.sharding is Sharding.DDP:
            init_single_process_group(replace(context, world_size=1, local_world_size=1))
        try:
            yield context
        finally:
            if strategy.sharding is Sharding.DDP:
                dist.destroy_process_group()


def shard(module: Any, strategy: Strategy, context: DistContext) -> Any:
    shard_fake(module, strategy, context)
    return module


def place(module: Any, _strategy: Strategy, _context: DistContext) -> Any:
    return module.to_empty(device=CPU)


def copy_everywhere(module: Any, _strategy: Strategy, context: DistContext) -> Any:
    module.to_empty(device=CPU)
    return replicate(module, context)


@pytest.mark.parametrize("changes", FSDP_CASES)
def test_a_trace_of_shards_is_what_real_tensors_take(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    strategy = make_strategy(**changes)
    compare(record(tmp_path, strategy), run_for_real(tmp_path, strategy, shard))


@pytest.mark.parametrize("changes", DDP_CASES)
def test_buckets_are_those_of_ddp(tmp_path: Path, changes: dict[str, Any]) -> None:
    strategy = make_strategy(**changes)
    compare(record(tmp_path, strategy), run_for_real(tmp_path, strategy, copy_everywhere))


@pytest.mark.parametrize("changes", PREFERENCE_CASES)
def test_a_trace_of_preferences_is_what_real_tensors_take(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    strategy = make_strategy(**changes)
    wrap: Callable[..., Any] = shard if strategy.sharding.is_fsdp else place
    if strategy.sharding is Sharding.DDP:
        wrap = copy_everywhere
    compare(record(tmp_path, strategy), run_for_real(tmp_path, strategy, wrap))


def compare(traced: Recording, told: Told) -> None:
    peak, _ = find_peak(traced.sizes, traced.events)
    live = sum(traced.sizes[e - 1] if e > 0 else -traced.sizes[-e - 1] for e in traced.events)
    assert abs(live - told.live_bytes) <= KERNEL_SCRATCH_BYTES
    assert abs(peak - told.peak_bytes) <= KERNEL_SCRATCH_BYTES
