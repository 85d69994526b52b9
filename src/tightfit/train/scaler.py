"""The gradient scaler of fp16, for gradients that may lie in shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class AgreedScaler(torch.amp.GradScaler):
    """torch's scaler, with one verdict on overflow for all ranks.

    A rank sees its own shards only: left alone, the rank that holds the overflow
    would skip the update and lower its scale, and the others would not. torch has
    such a scaler for FSDP1 (`ShardedGradScaler`) and none for `fully_shard`.
    """

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        local = [
            _local(parameter.grad.detach())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not allow_fp16 and any(gradient.dtype is torch.float16 for gradient in local):
            raise ValueError("fp16 gradients cannot be unscaled without losing the small ones")
        verdict = found_inf
        for gradients in _by_device(local):
            there = gradients[0].device
            found = torch.zeros_like(found_inf, device=there)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(there))
            verdict = torch.maximum(verdict, found.to(verdict.device))
        if dist.is_initialized():
            dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
        return {verdict.device: verdict}

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Whether the gradients just unscaled hold an infinity, on any rank."""
        if not self.is_enabled():
            return False
        found: dict[Any, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(bool(verdict) for verdict in found.values())


def _local(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _by_device(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Apart by device and dtype, as the kernel wants them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())
