"""The one training step, a function of the engine, its batches and the step's numbers; and its
metrics, all-reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.train.batches import Batch


class Engine(Protocol):
    """What a step needs of whatever holds the model: plain torch, DDP, FSDP2 or DeepSpeed."""

    module: nn.Module
    """The wrapped `Objective`."""
    world_size: int

    def autocast(self) -> AbstractContextManager[object]:
        """The arithmetic of the forward pass."""

    def accumulate(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Around one micro-batch: gradients are exchanged with the last one only."""

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to those of the micro-batches before it."""

    def update(self, learning_rate: float) -> Update:
        """Clip, step the optimizer, drop the gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the optimizer did."""

    grad_norm: Tensor | None
    """Over all trained parameters, before clipping. None where the engine does not tell."""
    is_skipped: bool | Tensor = False
    """The gradients overflowed: fp16's scaler lowers its scale, anything else is a fault. A tensor
    where the device decided it by itself: who reads it waits for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The numbers of one step."""

    num_trained_tokens: int
    """Over all ranks and micro-batches."""
    learning_rate: float
    seeds: tuple[int, ...]
    """One per micro-batch, so that dropout needs no saved random state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one rank knows after a step."""

    loss_sum: Tensor
    """Of this rank's trained tokens."""
    update: Update


def train_step(engine: Engine, batches: Sequence[Batch], plan: StepPlan) -> StepOutcome:
    """Forward and backward over every micro-batch, then one update.

    The loss is the mean over the step's trained tokens of all ranks: each token
    weighs the same, however the rows are dealt. Ranks' gradients are averaged by
    whatever wraps the module, so each rank counts its sum `world_size` times.
    Only the loss outlives a forward pass.
    """
    scale = engine.world_size / plan.num_trained_tokens
    sums = []
    for position, (batch, seed) in enumerate(zip(batches, plan.seeds, strict=True)):
        torch.manual_seed(seed)
        with engine.accumulate(is_last=position == len(batches) - 1):
            with engine.autocast():
                loss = engine.module(**batch)
            sums.append(loss.detach())
            engine.backward(loss * scale)
            del loss
    update = engine.update(plan.learning_rate)
    return StepOutcome(loss_sum=torch.stack(sums).sum(), update=update)


def mix_seed(seed: int, *places: int) -> int:
    """A seed for one place of the run, unlike that of any other place."""
    mixed = seed
    for place in places:
        mixed = (mixed * 6_364_136_223_846_793_005 + place + 1_442_695_040_888_963_407) % 2**63
    return mixed


# What all ranks must know of a step, in one small exchange.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedMetrics:
    """The same on every rank."""

    loss: float
    """Mean over the step's trained tokens."""
    grad_norm: float | None
    is_skipped: bool
    must_stop: bool
    must_save: bool


def all_reduce_metrics(
    outcome: StepOutcome, *, num_trained_tokens: int, must_stop: bool, must_save: bool
) -> ReducedMetrics:
    """Add up the ranks' losses; what one rank wishes, all do."""
    loss = outcome.loss_sum.double()
    is_skipped = torch.as_tensor(outcome.update.is_skipped, dtype=loss.dtype, device=loss.device)
    told = torch.stack([loss, is_skipped])
    stop, save = float(must_stop), float(must_save)
    if dist.is_initialized():
        told = torch.cat([told, told.new_tensor([stop, save])])
        dist.all_reduce(told)
        loss_sum, skipped, stop, save = told.tolist()
    else:
        loss_sum, skipped = told.tolist()
    norm = outcome.update.grad_norm
    return ReducedMetrics(
        loss=loss_sum / num_trained_tokens,
        grad_norm=None if norm is None else float(norm),
        is_skipped=skipped > 0,
        must_stop=stop > 0,
        must_save=save > 0,
    )


def sum_over_ranks(*values: float, device: torch.device) -> list[float]:
    """Plain numbers added over all ranks."""
    told = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(told)
    summed: list[float] = told.tolist()
    return summed
