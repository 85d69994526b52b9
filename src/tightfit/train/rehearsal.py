"""A step on the longest batch before the first real one: what would fail at night fails now."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DivergedError
from tightfit.core.strategy import Optimizer, Strategy
from tightfit.train.agreement import sum_over_ranks
from tightfit.train.batches import Batch
from tightfit.train.engine import TorchEngine
from tightfit.train.place import Place

_STATE_BYTES_PER_VALUE = {
    Optimizer.ADAMW_8BIT: 2,
    Optimizer.ADAMW_PAGED_8BIT: 0,
    Optimizer.ADAFACTOR: 0,
}
"""Optimizer state per trained value, where it is not twice (AdamW) or once (SGD) the value."""


def rehearse(engine: Any, batch: Batch, place: Place) -> float:
    """Mean loss of the longest batch; gradients are made and dropped, nothing is learnt.

    The optimizer's state, which appears with the first update, is stood in for by
    as much empty memory. Raises where the loss is not finite; out of memory comes
    through as torch raises it.
    """
    with engine.autocast():
        loss = engine.module(**batch)
    if isinstance(engine, TorchEngine):
        stand_in = torch.empty(_missing_state_bytes(engine), dtype=torch.uint8, device=place.device)
        engine.backward(loss / max(1, batch["labels"].numel()))
        engine.optimizer.zero_grad(set_to_none=True)
        del stand_in
    num_trained = int((batch["labels"] != -100).sum())
    loss_sum, count = sum_over_ranks(float(loss.detach()), num_trained, device=place.device)
    mean = loss_sum / max(1.0, count)
    if not math.isfinite(mean):
        raise _not_finite(mean, engine)
    return mean


def _not_finite(loss: float, engine: Any) -> DivergedError:
    """Broken weights, or sound ones whose sums overflow the format."""
    problem = f"The loss of the first batch is {loss}, before anything is learnt"
    broken = _find_broken(engine.model)
    if broken is not None:
        return DivergedError(
            f"{problem}: the weight {broken} holds values that are not finite.",
            remedy="fetch the model's files again, or take another checkpoint of it",
        )
    if engine.strategy.compute is Dtype.FP32:
        return DivergedError(
            f"{problem}, though all weights are finite.",
            remedy="check that config.json belongs to these weights",
        )
    return DivergedError(
        f"{problem}: the model's numbers overflow {engine.strategy.compute.value}.",
        remedy="calculate in a wider format: --set compute=fp32 --set weights=fp32 --fresh",
    )


def _find_broken(model: nn.Module) -> str | None:
    """The first weight with an infinity or NaN; packed ones have no such values."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not all(
            bool(torch.isfinite(local).all()) for local in _local([parameter.detach()])
        ):
            return name
    return None


def _missing_state_bytes(engine: TorchEngine) -> int:
    if engine.optimizer.state or engine.strategy.offload.moves_optimizer:
        return 0
    return sum(
        parameter.numel() * _state_bytes(engine.strategy, parameter)
        for group in engine.optimizer.param_groups
        for parameter in _local(group["params"])
    )


def _local(parameters: list[Any]) -> list[torch.Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in parameters]


def _state_bytes(strategy: Strategy, parameter: torch.Tensor) -> int:
    if strategy.optimizer in _STATE_BYTES_PER_VALUE:
        return _STATE_BYTES_PER_VALUE[strategy.optimizer]
    return parameter.element_size() * (1 if strategy.optimizer is Optimizer.SGD_MOMENTUM else 2)
