"""The one training step, and the all-reduce of its metrics.

The tracer runs `train_step` on fake tensors: prediction and run share this function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.core.strategy import Strategy
from tightfit.runs.metrics import PreferenceRecord
from tightfit.training.batches import KL_PREFIX, Batch, split_kl
from tightfit.training.rewards import describe_rewards
from tightfit.training.routing import RoutingSums, measure_loads


class Engine(Protocol):
    """What a step needs of the model's holder: plain torch, DDP, FSDP2 or DeepSpeed."""

    module: nn.Module
    """The wrapped `Objective`."""
    world_size: int

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context of the forward pass."""

    def accumulate(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Wraps one micro-batch: gradients are all-reduced with the last one only."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the loss's gradients."""

    def update(self, learning_rate: float) -> Update:
        """Clip, step the optimizer, drop the gradients."""


class TrainEngine(Engine, Protocol):
    """An engine with what the loop needs beside steps: checkpoints and the result."""

    device: torch.device
    strategy: Strategy
    is_updating: bool
    """Whether an update is running: out of memory in it leaves parameters half updated."""

    @property
    def model(self) -> Any:
        """The transformers or peft model inside."""

    @property
    def optimizer(self) -> Any: ...

    def save_state(self, folder: Path, *, alone: bool = False) -> None:
        """Write parameters, optimizer and scaler into an existing folder; all ranks together.

        `alone`: by this rank, which must hold the full state.
        """

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote."""

    def trained_state(self) -> dict[str, Tensor]:
        """On rank 0 full tensors on the CPU, named as in `model`; on others nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of one optimizer update."""

    grad_norm: Tensor | None
    """Over all trained parameters, before clipping. None if the engine does not report it."""
    is_skipped: bool | Tensor = False
    """The gradients were not finite: normal under fp16's scaler, an error otherwise. A tensor if
    the update kernel decided it on the device; reading it synchronizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One rank's result of a step."""

    loss_sum: Tensor
    """Of this rank's trained tokens or pairs, with the weighted router loss."""
    update: Update


def train_step(
    engine: Engine,
    batches: Sequence[Batch],
    *,
    divisor: int,
    learning_rate: float,
    seeds: Sequence[int],
) -> StepOutcome:
    """Forward and backward over every micro-batch, then one update.

    The loss is the mean over the step's trained tokens, or pairs, of all ranks (`divisor`), so each
    has the same weight however rows are split. DDP, FSDP and ZeRO average gradients over ranks, so
    each rank scales its sum by `world_size`. One seed per micro-batch: dropout is reproducible
    without saved random state.
    """
    scale = engine.world_size / divisor
    sums = []
    if KL_PREFIX + "input_ids" in batches[0]:
        torch.manual_seed(seeds[0])  # of the adapters' dropout
        with torch.no_grad(), engine.autocast():
            kl = measure_kl(engine, batches, num_examples=divisor)
        batches = [with_kl(batch, kl) for batch in batches]
    for position, (batch, seed) in enumerate(zip(batches, seeds, strict=True)):
        torch.manual_seed(seed)
        with engine.accumulate(is_last=position == len(batches) - 1):
            with engine.autocast():
                loss = engine.module(**batch)
            sums.append(loss.detach())
            engine.backward(loss * scale)
            del loss
    update = engine.update(learning_rate)
    return StepOutcome(loss_sum=torch.stack(sums).sum(), update=update)


def measure_kl(engine: Engine, batches: Iterable[Batch], *, num_examples: int) -> Tensor:
    """The mean log-ratio over the mismatched rows of all batches and ranks, and at least 0: the
    same however rows are split. Without gradients."""
    sums = [engine.module(**split_kl(batch)[1]) for batch in batches]
    total = torch.stack(sums).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return (total / num_examples).clamp(min=0)


def with_kl(batch: Batch, kl: Tensor) -> Batch:
    """The batch with the estimate in place of the mismatched rows."""
    return split_kl(batch)[0] | {"kl": kl}


def mix_seed(seed: int, *numbers: int) -> int:
    """A seed of its own for each combination of `numbers` (step, micro-batch, rank)."""
    mixed = seed
    for number in numbers:
        mixed = (mixed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % 2**63
    return mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedMetrics:
    """A step's metrics and flags after the all-reduce: the same on every rank."""

    loss: float
    """Mean over the step's trained tokens, or pairs, without the router loss."""
    grad_norm: float | None
    is_skipped: bool
    must_stop: bool
    must_save: bool
    router_loss: float | None = None
    """Mean over micro-batches and ranks by their trained tokens, without its weight."""
    expert_load_max: float | None = None
    idle_experts_fraction: float | None = None
    preference: PreferenceRecord | None = None


def all_reduce_metrics(
    outcome: StepOutcome,
    *,
    divisor: int,
    must_stop: bool,
    must_save: bool,
    routing: RoutingSums | None = None,
    preference: Tensor | None = None,
) -> ReducedMetrics:
    """Sum losses, flags, rewards and expert counts over ranks, in one collective and one read; a
    flag set on one rank holds on all."""
    loss = outcome.loss_sum.double()
    is_skipped = torch.as_tensor(outcome.update.is_skipped, dtype=loss.dtype, device=loss.device)
    router_loss = loss.new_zeros(())
    counts = rewards = loss.new_zeros(0)
    if preference is not None:
        rewards = preference.double()
    if routing is not None:
        router_loss = routing.router_loss.double()
        counts = routing.expert_tokens.reshape(-1).double()
    flags = loss.new_tensor([float(must_stop), float(must_save)])
    values = torch.cat([torch.stack([loss, is_skipped, router_loss]), flags, rewards, counts])
    if dist.is_initialized():
        dist.all_reduce(values)
    num_fixed, num_rewards = 5, len(rewards)
    sums, rewards = values[:num_fixed], values[num_fixed : num_fixed + num_rewards]
    loads = values[num_fixed + num_rewards :]
    if routing is not None and len(loads):
        loads = measure_loads(loads.view(routing.expert_tokens.shape))
    read: list[float] = torch.cat([sums, rewards, loads]).tolist()
    loss_sum, skipped, router_sum, stop, save = read[:num_fixed]
    described, measured = read[num_fixed:][:num_rewards], read[num_fixed + num_rewards :]
    norm = outcome.update.grad_norm
    weight = 0.0 if routing is None else routing.loss_weight
    return ReducedMetrics(
        loss=(loss_sum - weight * router_sum) / divisor,
        grad_norm=None if norm is None else float(norm),
        is_skipped=skipped > 0,
        must_stop=stop > 0,
        must_save=save > 0,
        router_loss=router_sum / divisor if weight else None,
        expert_load_max=measured[0] if measured else None,
        idle_experts_fraction=measured[1] if measured else None,
        preference=None if preference is None else describe_rewards(described),
    )
