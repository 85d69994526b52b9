"""Tiny models, random rows and plans for training tests, all made on the spot."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import ExampleKind
from tightfit.core.settings import Method, Schedule, Sharding
from tightfit.core.strategy import Strategy, Training
from tightfit.data.token_store import NewRow, StoreDescription, StoreFile, StoreWriter, TokenStore
from tightfit.estimation.job import estimate_job
from tightfit.hardware.local import CpuReading, describe_cpu
from tightfit.hardware.machine import read_machine
from tightfit.hardware.types import Node
from tightfit.models.config import read_config_file
from tightfit.planning.plan import Plan, PlanHardware
from tightfit.training.batches import BatchMaker, BatchSampler, choose_collate, without_loss
from tightfit.training.distributed import DistContext
from tightfit.training.engine import build_engine
from tightfit.training.loop import learning_rate_at
from tightfit.training.model import find_routing
from tightfit.training.preference import find_preference
from tightfit.training.step import ReducedMetrics, all_reduce_metrics, mix_seed, train_step
from tiny_configs import tiny_config

VOCABULARY = 128
NUM_STEPS = 20
EFFECTIVE_BATCH = 4


def make_model(folder: Path, *, is_tied: bool = False, **changes: Any) -> Path:
    """A Llama of 4 layers with random weights, as transformers saves it."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM

    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    config = transformers.LlamaConfig(**(settings | changes), tie_word_embeddings=is_tied)
    torch.manual_seed(7)
    model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def make_mixture(folder: Path) -> Path:
    """A Qwen3-MoE of 2 layers, each of 4 experts."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    config: Any = transformers.Qwen3MoeConfig
    made = config(
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(7)
    auto.from_config(made, dtype=torch.float32).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def make_family(folder: Path, model_type: str) -> Path:
    """A tiny model of any family, without dropout."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.for_model(**tiny_config(model_type))
    config.vocab_size = VOCABULARY
    torch.manual_seed(7)
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def make_store(
    folder: Path,
    *,
    num_rows: int = 23,
    seed: int = 3,
    example: ExampleKind = ExampleKind.ANSWER,
) -> TokenStore:
    """Rows of 4 to 32 random tokens; the first third of each carries no loss."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    writer = StoreWriter(folder)
    for number, length in enumerate(draw.integers(4, 33, num_rows)):
        trained = np.arange(length) >= max(1, length // 3)
        tokens = draw.integers(1, VOCABULARY, length).astype(np.int32)
        writer.add(
            NewRow(
                tokens=tokens,
                trained=trained,
                num_trained=int(trained.sum()),
                has_stop=False,
                num_lost=0,
                file=0,
                number=number,
                digest=number,
                is_good=number % 3 > 0,
            )
        )
    writer.close()
    description = StoreDescription(
        key="drawn",
        num_rows=num_rows,
        num_tokens=writer.num_tokens,
        num_blob_tokens=writer.num_tokens,
        num_trained_tokens=sum(writer.columns["num_trained"]),
        seq_len=32,
        template="none",
        pad_token_id=0,
        stop_token_ids=(2,),
        num_rows_with_stop=0,
        sources=("rows",),
        files=(StoreFile(path="rows", unit="row", source=0),),
        example=example,
    )
    writer.write_store("train", np.arange(num_rows), description)
    return TokenStore(folder / "train")


def make_plan(model: Path, **changes: Any) -> Plan:
    """A plan as far as training reads it; fp32 without dropout unless told otherwise."""
    settings: dict[str, Any] = {
        "method": Method.FULL,
        "weights": Dtype.FP32,
        "compute": Dtype.FP32,
        "adapter_dtype": Dtype.FP32,
        "lora_rank": 6,  # which four processes cannot share evenly
        "lora_targets": ("q_proj", "down_proj"),
        "micro_batch": 2,
        "seq_len": 32,
        "checkpointing": False,
        "attention": Attention.SDPA,
        "sharding": Sharding.SINGLE,
    }
    training = Training(
        model_path=str(model),
        learning_rate=3e-3,
        schedule=Schedule.COSINE,
        warmup_fraction=0.25,  # Adam's first steps turn the noise of tiny gradients into its sign
        weight_decay=0.01,
        seed=11,
    )
    strategy = Strategy(**(settings | changes))
    spec = read_config_file(model / "config.json", name="tiny")
    gpu = describe_cpu(read_machine(), CpuReading(model="any", hz=2e9, flags=frozenset({"avx2"})))
    node = Node(gpu=gpu, num_gpus=strategy.gpus_per_node, host_memory_bytes=8 * 2**30)
    return Plan(
        tightfit_version="0",
        model=spec,
        strategy=strategy,
        hardware=PlanHardware(group="cpu", node=node, num_nodes=1, source="words"),
        data=None,
        num_epochs=1.0,
        effective_batch=EFFECTIVE_BATCH,
        estimate=estimate_job(spec=spec, strategy=strategy, node=node),
        cost=None,
        training=training,
        why=(),
    )


def lone_place() -> DistContext:
    return DistContext(
        rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu")
    )


@dataclass
class Trainer:
    """The loop of a run without its files: feed, batches and the real step."""

    plan: Plan
    store: TokenStore
    context: DistContext

    def __post_init__(self) -> None:
        shared = self.plan.strategy.context_parallel
        self.context = replace(self.context, context_parallel=shared)
        self.engine = build_engine(self.plan, self.context)
        self.routing = find_routing(self.engine.module)
        self.metrics: list[ReducedMetrics] = []
        """Of every step taken."""
        assert self.plan.training is not None
        self.training = self.plan.training
        self.sampler = BatchSampler(
            self.store,
            effective_batch=self.plan.effective_batch,
            seq_len=32,
            is_packed=self.plan.strategy.packing,
            seed=self.training.seed,
            shuffle=True,
        )
        self.maker = BatchMaker(
            self.store,
            choose_collate(self.store.description, is_packed=self.plan.strategy.packing),
            seed=self.training.seed,
            needs_kl=self.plan.strategy.objective.record.needs_kl,
        )
        self.preference = find_preference(self.engine.module)

    def train(self, start: int, end: int) -> list[float]:
        return [self._step(step) for step in range(start, end)]

    def batches(self, step: int) -> tuple[list[dict[str, torch.Tensor]], int]:
        dealt = self.sampler.deal(
            step,
            rank=self.context.batch_rank,
            world_size=self.context.num_batch_ranks,
            micro_batch=self.plan.strategy.micro_batch,
        )
        made = []
        for items in dealt.micro_batches:
            batch = self.maker.make(items or ((0,),), nll_weight=dealt.nll_weight)
            made.append(batch if items else without_loss(batch))
        return made, dealt.divisor

    def _step(self, step: int) -> float:
        batches, num_trained = self.batches(step)
        outcome = train_step(
            self.engine,
            batches,
            divisor=num_trained,
            learning_rate=learning_rate_at(step, NUM_STEPS, self.training),
            seeds=tuple(
                mix_seed(self.training.seed, step, number, self.context.rank)
                for number in range(len(batches))
            ),
        )
        agreed = all_reduce_metrics(
            outcome,
            divisor=num_trained,
            must_stop=False,
            must_save=False,
            routing=None if self.routing is None else self.routing.take(),
            preference=None if self.preference is None else self.preference.take(),
        )
        self.metrics.append(agreed)
        return agreed.loss


def quiet() -> None:
    """One thread, and no warnings of libraries about each other."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
