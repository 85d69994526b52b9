"""TorchEngine: a model with its optimizer, gradient scaler and saved state, alone or wrapped by
DDP or FSDP2.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, first_line
from tightfit.core.strategy import Strategy
from tightfit.runtime.devices import is_out_of_memory, torch_dtype
from tightfit.runtime.kernels.adamw import TritonAdamW
from tightfit.training.step import Engine, Update

# The gradient scaler of fp16, for gradients that may lie in shards.


class SyncedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler with the overflow flag all-reduced over ranks.

    A rank sees its own shards only: without this, the rank with the overflow would skip the update
    and the others would not. torch has `ShardedGradScaler` for FSDP1 and none for `fully_shard`.
    """

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        local = [
            _local_tensor(parameter.grad.detach())
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


def _local_tensor(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _by_device(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Grouped by device and dtype, as the kernel requires."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())


# Training state to and from disk, by torch's distributed checkpoint, whatever holds it.


def save_state(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    alone: bool = False,
) -> None:
    """Write every rank's share into `folder` by torch's distributed checkpoint, synced to disk."""
    state = _state(module, optimizer, scaler)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _without_dist_warning():
        save(state, storage_writer=writer, no_dist=alone or not dist.is_initialized())


def load_state(
    folder: Path, module: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Read this rank's share, in place."""
    reader = FileSystemReader(folder)
    has_optimizer = any(
        key.startswith("optimizer.") for key in reader.read_metadata().state_dict_metadata
    )
    if has_optimizer and not optimizer.state:
        init_optimizer_state(optimizer)
    state = _state(module, optimizer, scaler)
    try:
        with _without_dist_warning():
            load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise InvalidInputError(
            f"The checkpoint {folder} does not fit this plan: {_first_line(error)}.",
            remedy="start the run in a new folder, or with the plan it was started with",
        ) from error
    for parameter, name in _optimizer_names(module, optimizer).items():
        # Tensors were loaded in place; other values (bitsandbytes' step) were replaced.
        optimizer.state[parameter].update(state["optimizer"][name])
    if scaler.is_enabled():
        scaler.load_state_dict(state["scaler"])


def gather_trained(model: nn.Module) -> dict[str, Tensor]:
    """Full trained tensors on rank 0's CPU, gathered one at a time; a tied one once."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    gathered = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        value: Any = parameter.detach()
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if is_first:
            # A copy: the caller may keep it while training goes on.
            gathered[name] = whole.to("cpu", copy=True)
        del whole
    return gathered


def _state(module: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Views of the live tensors by parameter name, independent of sharding and order.

    Not `get_optimizer_state_dict`: it copies, counts a step where none was taken, and cannot load
    what bitsandbytes saves.
    """
    state: dict[str, Any] = {
        "model": {
            name: parameter.detach()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
    }
    if optimizer.state:
        state["optimizer"] = {
            name: dict(optimizer.state[parameter])
            for parameter, name in _optimizer_names(module, optimizer).items()
        }
    if scaler.is_enabled():
        state["scaler"] = scaler.state_dict()
    return state


def _optimizer_names(module: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Names of the parameters with optimizer state."""
    named = module.named_parameters()
    return {parameter: name for name, parameter in named if parameter in optimizer.state}


def init_optimizer_state(optimizer: Optimizer) -> None:
    """Make the optimizer allocate its state, by a step with learning rate 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


@contextmanager
def _without_dist_warning() -> Iterator[None]:
    """Suppress torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        yield


CLIP_EPSILON = 1e-6
"""As in torch's `clip_grad_norm_`."""


class TorchEngine:
    """Forward, backward and update in plain torch, of a module that DDP or FSDP2 may wrap."""

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
        self.scaler = SyncedGradScaler(device.type, enabled=is_scaled)
        self.is_updating = False
        """Whether an update is running: out of memory in it leaves parameters half updated."""
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
        # FSDP2 reduces with every micro-batch: full gradients until the last one would cost the
        # memory that sharding saves.
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
        # All ranks must agree to skip: the norm and the scaler's flag are over all shards.
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
        """Update unless `is_bad`, which the fused kernel reads on the device: the host does not
        wait for the gradients."""
        optimizer: Any = self.optimizer
        optimizer.found_inf = is_bad.float()
        self.is_updating = True
        optimizer.step()
        self.is_updating = False
        optimizer.found_inf = None
        optimizer.zero_grad(set_to_none=True)
        return is_bad

    def _clip(self, most: float) -> Tensor:
        """The norm of all gradients; they are clipped here, or by TritonAdamW as it reads them."""
        if not isinstance(self.optimizer, TritonAdamW):
            return _full_norm(nn.utils.clip_grad_norm_(self._trained, most))
        norm = nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        self.optimizer.scale_next((most / (norm.float() + CLIP_EPSILON)).clamp(max=1.0))
        return norm

    @property
    def objective(self) -> nn.Module:
        """The Objective: the module inside DDP; FSDP2 wraps in place."""
        module: Any = self.module
        inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        return inner

    @property
    def model(self) -> Any:
        """The transformers or peft model inside."""
        return self.objective.model

    def save_state(self, folder: Path, *, alone: bool = False) -> None:
        save_state(folder, self.objective, self.optimizer, self.scaler, alone=alone)

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, on any number of ranks."""
        load_state(folder, self.objective, self.optimizer, self.scaler)

    def trained_state(self) -> dict[str, Tensor]:
        """On rank 0 full tensors on the CPU, named as in `model`; on others nothing."""
        return gather_trained(self.model)


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Eval mode without gradients, under the autocast of training."""
    engine.module.eval()
    try:
        with torch.no_grad(), engine.autocast():
            yield
    finally:
        engine.module.train()


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether its kernel takes `found_inf` to skip an update; not with DTensor shards."""
    is_fused = isinstance(optimizer, AdamW) and bool(optimizer.defaults["fused"])
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return is_fused and not any(isinstance(weight, DTensor) for weight in weights)


def _full_norm(norm: Any) -> Tensor:
    """The norm over all shards."""
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
