"""TorchEngine: one model with its optimizer, alone or wrapped by DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.runtime.adamw import KernelAdamW
from tightfit.runtime.devices import torch_dtype
from tightfit.train.scaler import AgreedScaler
from tightfit.train.state import gather_trained, load_state, save_state
from tightfit.train.step import Update

CLIP_EPSILON = 1e-6
"""As in torch's `clip_grad_norm_`."""


class TorchEngine:
    """Forward, backward and update in plain torch; what wraps the module is its own affair."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        strategy: Strategy,
        device: torch.device,
        world_size: int = 1,
        max_grad_norm: float | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.strategy = strategy
        self.device = device
        self.world_size = world_size
        self._max_grad_norm = max_grad_norm
        is_scaled = strategy.compute is Dtype.FP16
        self.scaler = AgreedScaler(device.type, enabled=is_scaled)
        self.is_updating = False
        """Whether parameters may be half changed: out of memory then loses the step."""
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._skips_by_itself = not is_scaled and _is_fused(optimizer)

    def autocast(self) -> AbstractContextManager[object]:
        if not self.strategy.is_autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch_dtype(self.strategy.compute))

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        if isinstance(self.module, DistributedDataParallel):
            with nullcontext() if is_last else self.module.no_sync():
                yield
            return
        # FSDP2 adds shards up with every micro-batch: holding whole gradients until the last
        # one would cost the memory that sharding saves.
        yield

    def backward(self, loss: Tensor) -> None:
        scaled: Any = self.scaler.scale(loss)
        scaled.backward()

    def update(self, learning_rate: float) -> Update:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.unscale_(self.optimizer)
        norm = self._clip(self._max_grad_norm or float("inf"))
        if self._skips_by_itself:
            is_skipped = self._step_unless(~torch.isfinite(norm))
            return Update(grad_norm=norm, is_skipped=is_skipped)
        # A skipped step moves nothing, so every rank must come to the same verdict: the norm is
        # over all shards, and so is the scaler's.
        has_overflowed = not torch.isfinite(norm) or self.scaler.has_overflowed(self.optimizer)
        if not has_overflowed:
            self.is_updating = True
            self.optimizer.step()
            self.is_updating = False
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm=norm, is_skipped=has_overflowed)

    def _step_unless(self, is_bad: Tensor) -> Tensor:
        """The update, unless the device finds this to be true: the host queues it without waiting
        for the gradients, and the next step behind it."""
        optimizer: Any = self.optimizer
        optimizer.found_inf = is_bad.float()
        self.is_updating = True
        optimizer.step()
        self.is_updating = False
        optimizer.found_inf = None
        optimizer.zero_grad(set_to_none=True)
        return is_bad

    def _clip(self, most: float) -> Tensor:
        """The norm of all gradients; they are shortened here, or by the update that reads them."""
        if not isinstance(self.optimizer, KernelAdamW):
            return _whole(nn.utils.clip_grad_norm_(self._trained, most))
        norm = nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        self.optimizer.scale_next((most / (norm.float() + CLIP_EPSILON)).clamp(max=1.0))
        return norm

    @property
    def objective(self) -> nn.Module:
        """What DDP wraps; FSDP2 wraps in place."""
        module: Any = self.module
        inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        return inner

    @property
    def model(self) -> Any:
        """The transformers or peft model inside."""
        return self.objective.model

    def save_state(self, folder: Path, *, alone: bool = False) -> None:
        """Trained parameters, optimizer and scaler into an existing folder; all ranks together.

        `alone`: by this rank, which must hold all of it, while the others may be anywhere.
        """
        save_state(folder, self.objective, self.optimizer, self.scaler, alone=alone)

    def load_state(self, folder: Path) -> None:
        """Undo everything since `save_state`, on any number of ranks."""
        load_state(folder, self.objective, self.optimizer, self.scaler)

    def trained_state(self) -> dict[str, Tensor]:
        """On rank 0 whole tensors on the CPU, named as in `model`; elsewhere nothing."""
        return gather_trained(self.model)


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether its kernel takes a flag that says to change nothing; shards do not go with one."""
    is_fused = isinstance(optimizer, AdamW) and bool(optimizer.defaults["fused"])
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return is_fused and not any(isinstance(weight, DTensor) for weight in weights)


def _whole(norm: Any) -> Tensor:
    """The norm over all shards."""
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
