"""The step: however rows are dealt, packed or padded, the same tokens give the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_stores import draw_rows, make_store
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss, Method, Schedule
from tightfit.core.strategy import Strategy, Training, default_learning_rate
from tightfit.training.batches import BatchLoader, BatchSampler, choose_collate
from tightfit.training.distributed import DistContext
from tightfit.training.engine import TorchEngine
from tightfit.training.loop import learning_rate_at
from tightfit.training.model import Objective, build_optimizer
from tightfit.training.step import mix_seed, train_step

ALONE = DistContext(
    rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu")
)
FP32: dict[str, Any] = {"weights": "fp32", "compute": "fp32", "method": "full"}


def make_engine(training: Training, **fields: Any) -> TorchEngine:
    torch.manual_seed(0)
    make_config: Any = LlamaConfig
    config = make_config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        attn_implementation="sdpa",
    )
    make_model: Any = LlamaForCausalLM
    model = make_model(config).train()
    strategy = Strategy(**(FP32 | fields))
    module = Objective(model, Loss.PLAIN)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(
        module,
        optimizer,
        strategy=strategy,
        device=ALONE.device,
        max_grad_norm=training.max_grad_norm,
    )


def run_steps(
    folder: Path,
    *,
    micro_batch: int,
    is_packed: bool,
    num_steps: int = 20,
    max_grad_norm: float | None = 1.0,
    **fields: Any,
) -> list[float]:
    """Losses of a run over sixteen rows a step; packed, all rows share a step either way."""
    store = make_store(folder, draw_rows(16), seq_len=48)
    training = Training(model_path="none", learning_rate=1e-2, max_grad_norm=max_grad_norm)
    sampler = BatchSampler(
        store, effective_batch=16, seq_len=48, is_packed=is_packed, seed=0, shuffle=True
    )
    collate = choose_collate(store.description, is_packed=is_packed)
    loader = BatchLoader(sampler, collate, micro_batch=micro_batch, context=ALONE)
    engine = make_engine(training, **fields)
    losses = []
    for ready in loader.steps(0, num_steps):
        outcome = train_step(
            engine,
            ready.batches,
            divisor=ready.items.divisor,
            learning_rate=1e-2,
            seeds=tuple(mix_seed(0, ready.items.step, i) for i in range(len(ready.batches))),
        )
        losses.append(float(outcome.loss_sum) / ready.items.num_trained_tokens)
    return losses


def test_accumulation_is_weighted_by_tokens(tmp_path: Path) -> None:
    """Rows of different lengths: a mean of means would differ from the mean over tokens."""
    whole = run_steps(tmp_path / "a", micro_batch=16, is_packed=False)
    dealt = run_steps(tmp_path / "b", micro_batch=2, is_packed=False)

    assert whole[-1] < whole[0] - 0.5
    torch.testing.assert_close(dealt, whole, rtol=0, atol=1e-4)


def test_packed_rows_learn_what_padded_rows_learn(tmp_path: Path) -> None:
    padded = run_steps(tmp_path / "a", micro_batch=16, is_packed=False)
    packed = run_steps(tmp_path / "b", micro_batch=4, is_packed=True)

    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "sgd-momentum", "adafactor", "adamw-8bit"])
def test_every_optimizer_learns(tmp_path: Path, optimizer: str) -> None:
    losses = run_steps(tmp_path, micro_batch=16, is_packed=False, optimizer=optimizer)

    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
@pytest.mark.parametrize("kind", [one for one in Optimizer if not one.record.is_paged])
def test_default_rates_move_weights_about_as_far_as_adamw_does(
    kind: Optimizer, method: Method
) -> None:
    """With gradients clipped to 1, on weights as large as a model's, or an adapter's first."""

    def measure(kind: Optimizer) -> float:
        torch.manual_seed(0)
        weights = {"a": torch.nn.Parameter(torch.randn(64, 512) * 0.02)}
        if method is Method.LORA:
            weights["b"] = torch.nn.Parameter(torch.zeros(512, 64))
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        training = Training(model_path="none", learning_rate=default_learning_rate(method, kind))
        optimizer = build_optimizer(weights.items(), kind, training)
        always = {name: torch.randn_like(weight) for name, weight in weights.items()}
        for _ in range(50):
            for name, weight in weights.items():
                weight.grad = always[name] + torch.randn_like(weight)
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
        moved = [(weights[name].detach() - before[name]).square().sum() for name in weights]
        return float(torch.stack(moved).sum().sqrt())

    assert 0.1 < measure(kind) / measure(Optimizer.ADAMW) < 10


@pytest.mark.parametrize(
    ("optimizer", "is_decided_there"),
    [("adamw", True), ("adamw-kernel", True), ("adamw-foreach", False)],
)
def test_a_step_of_no_numbers_leaves_no_trace(optimizer: str, is_decided_there: bool) -> None:
    """Where the device decides, the host does not read what it found."""
    training = Training(model_path="none", learning_rate=1e-2)
    states = []
    for factors in ((1.0, float("inf"), 2.0), (1.0, 2.0)):
        engine = make_engine(training, optimizer=optimizer)
        for factor in factors:
            weights = [p for p in engine.module.parameters() if p.requires_grad]
            engine.backward(torch.stack([(factor * p).square().sum() for p in weights]).sum())
            update = engine.update(1e-2)
            assert isinstance(update.is_skipped, torch.Tensor) == is_decided_there
            assert bool(update.is_skipped) == (factor == float("inf"))
            assert all(p.grad is None for p in weights)
        state = engine.optimizer.state
        states.append([*weights, *(x for p in weights for x in state[p].values())])
    for found, wanted in zip(*states, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_clipping_inside_the_update_is_clipping_before_it(tmp_path: Path) -> None:
    """Gradients of this run are far longer than 0.05 at first."""
    names = ("adamw", "adamw-kernel")
    before, inside = (
        run_steps(
            tmp_path / name, micro_batch=16, is_packed=False, optimizer=name, max_grad_norm=0.05
        )
        for name in names
    )
    free = run_steps(
        tmp_path / "free", micro_batch=16, is_packed=False, optimizer="adamw", max_grad_norm=None
    )

    torch.testing.assert_close(inside, before, rtol=0, atol=1e-5)
    assert abs(free[-1] - before[-1]) > 1e-3


@pytest.mark.parametrize("schedule", [Schedule.COSINE, Schedule.LINEAR])
@pytest.mark.parametrize("num_steps", [1, 7, 100])
def test_rates_are_those_of_transformers(schedule: Schedule, num_steps: int) -> None:
    """But for its first step, at rate 0: the warm-up is a step ahead."""
    training = Training(
        model_path="none", learning_rate=3e-4, schedule=schedule, warmup_fraction=0.1
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    make: Any = {
        Schedule.COSINE: get_cosine_schedule_with_warmup,
        Schedule.LINEAR: get_linear_schedule_with_warmup,
    }[schedule]
    num_warmup = -(-num_steps // 10)
    theirs = make(optimizer, num_warmup_steps=num_warmup, num_training_steps=num_steps)
    rates = []
    for _ in range(num_steps):
        rates += theirs.get_last_lr()
        optimizer.step()
        theirs.step()

    ours = [learning_rate_at(step, num_steps, training) for step in range(num_steps)]
    assert rates[0] == 0
    assert ours == pytest.approx([*rates[1:num_warmup], 3e-4, *rates[num_warmup:]])
    assert min(ours) > 0
