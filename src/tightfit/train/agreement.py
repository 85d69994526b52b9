"""What all ranks must know of a step, in one small exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tightfit.train.step import StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The same on every rank."""

    loss: float
    """Mean over the step's trained tokens."""
    grad_norm: float | None
    is_skipped: bool
    must_stop: bool
    must_save: bool


def agree(
    outcome: StepOutcome, *, num_trained_tokens: int, must_stop: bool, must_save: bool
) -> Agreed:
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
    return Agreed(
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
