"""Engines: `build_engine` makes the one that a plan names; TorchEngine holds a model with its
optimizer, gradient scaler and saved state, alone or wrapped by DDP or FSDP2.
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
from tightfit.core.errors import InvalidInputError, UserError, first_line
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.planning.plan import Plan
from tightfit.runtime.kernels.adamw import TritonAdamW
from tightfit.runtime.libraries import is_out_of_memory, torch_dtype
from tightfit.runtime.load import load_base
from tightfit.runtime.staged import prefer_staged
from tightfit.training.distributed import DistContext
from tightfit.training.model import build_optimizer, prepare_model
from tightfit.training.preference import build_objective
from tightfit.training.sharding import load_sharded, replicate
from tightfit.training.step import Engine, TrainEngine, Update


def build_engine(plan: Plan, context: DistContext) -> TrainEngine:
    """The engine that the plan's sharding names, ready for its first step."""
    strategy, training = plan.strategy, plan.training
    assert training is not None, "a plan that runs says what it learns"
    _check_plan(strategy, context)
    if strategy.sharding.is_zero:
        from tightfit.training.zero import build_zero_engine

        return build_zero_engine(plan, context)
    if strategy.sharding.is_fsdp:
        module: nn.Module = load_sharded(plan, training, context)
    else:
        folder = prefer_staged(Path(training.model_path))
        torch.manual_seed(training.seed)  # random weights are the same on every rank
        model = load_base(folder, strategy, context.device, random_weights=training.random_weights)
        module = build_objective(prepare_model(model, strategy, training), strategy, training)
        if strategy.sharding is Sharding.DDP and context.world_size > 1:
            module = replicate(module, context)
    return TorchEngine(
        module,
        build_optimizer(module.named_parameters(), strategy.optimizer, training),
        strategy=strategy,
        device=context.device,
        world_size=context.world_size,
        max_grad_norm=training.max_grad_norm,
    )


def _check_plan(strategy: Strategy, context: DistContext) -> None:
    """Refuse what would fail later, or silently do something else."""
    if strategy.sharding is Sharding.SINGLE and context.world_size > 1:
        raise UserError(
            f"The plan is for one process, and {context.world_size} were started.",
            remedy="start it with tightfit train, which starts as many as the plan says",
        )
    if strategy.copies_reference and strategy.sharding.shards_optimizer:
        raise UserError(
            f"A frozen copy of the weights cannot be kept under {strategy.sharding.value}.",
            remedy="--set precompute_reference=true",
        )
    record = strategy.optimizer.record
    problem = record.fsdp_problem if strategy.sharding.is_fsdp else ""
    problem = record.zero_problem if strategy.sharding.is_zero else problem
    if problem:
        raise UserError(
            f"{problem[0].upper()}{problem[1:]}.",
            remedy="--set optimizer=adamw, or --sharding ddp",
        )


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
        # The kernel requires gradients of one device and dtype.
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = parameter.grad.detach()
                    local = grad.to_local() if hasattr(grad, "to_local") else grad
                    kinds.setdefault((local.device, local.dtype), []).append(local)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype in kinds):
            raise ValueError("fp16 gradients cannot be unscaled without losing the small ones")
        verdict = found_inf
        for (there, _), gradients in kinds.items():
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
        optimizer: Any = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.unscale_(optimizer)
        norm = self._clip(self._max_grad_norm or float("inf"))
        is_skipped: bool | Tensor
        if self._skips_by_itself:
            # The fused kernel reads the flag on the device: the host does not wait for gradients.
            is_skipped = ~torch.isfinite(norm)
            optimizer.found_inf = is_skipped.float()
        else:
            # All ranks must agree to skip: the norm and the scaler's flag are over all shards.
            is_skipped = not torch.isfinite(norm) or self.scaler.has_overflowed(optimizer)
        if self._skips_by_itself or not is_skipped:
            self.is_updating = True
            optimizer.step()
            self.is_updating = False
        if self._skips_by_itself:
            optimizer.found_inf = None
        if self.scaler.is_enabled():
            self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm=norm, is_skipped=is_skipped)

    def _clip(self, most: float) -> Tensor:
        """The norm of all gradients; they are clipped here, or by TritonAdamW as it reads them."""
        if not isinstance(self.optimizer, TritonAdamW):
            clipped: Any = nn.utils.clip_grad_norm_(self._trained, most)
            norm: Tensor = clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped
            return norm
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
        """Write every rank's share by torch's distributed checkpoint, synced to disk."""
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        with _without_dist_warning():
            save(self._state(), storage_writer=writer, no_dist=alone or not dist.is_initialized())

    def load_state(self, folder: Path) -> None:
        """Restore in place what `save_state` wrote, on any number of ranks."""
        reader = FileSystemReader(folder)
        saved_keys = reader.read_metadata().state_dict_metadata
        if not self.optimizer.state and any(key.startswith("optimizer.") for key in saved_keys):
            init_optimizer_state(self.optimizer)
        state = self._state()
        try:
            with _without_dist_warning():
                load(state, storage_reader=reader, no_dist=not dist.is_initialized())
        except (CheckpointException, RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            failures = error.failures if isinstance(error, CheckpointException) else {}
            cause = next((failure[0] for failure in failures.values()), error)
            raise InvalidInputError(
                f"The checkpoint {folder} does not fit this plan: {first_line(cause)}.",
                remedy="start the run in a new folder, or with the plan it was started with",
            ) from error
        for name, parameter in self._optimized():
            # Tensors were loaded in place; other values (bitsandbytes' step) were replaced.
            self.optimizer.state[parameter].update(state["optimizer"][name])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def _state(self) -> dict[str, Any]:
        """Views of the live tensors by parameter name, independent of sharding and order.

        Not `get_optimizer_state_dict`: it copies, counts a step where none was taken, and cannot
        load what bitsandbytes saves.
        """
        trained = {n: p.detach() for n, p in self.objective.named_parameters() if p.requires_grad}
        state: dict[str, Any] = {"model": trained}
        if self.optimizer.state:
            state["optimizer"] = {
                name: dict(self.optimizer.state[parameter]) for name, parameter in self._optimized()
            }
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        return state

    def _optimized(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters with optimizer state."""
        return [
            (name, parameter)
            for name, parameter in self.objective.named_parameters()
            if parameter in self.optimizer.state
        ]

    def trained_state(self) -> dict[str, Tensor]:
        """On rank 0 full tensors on the CPU, named as in `model`; on others nothing."""
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        is_full = self.strategy.method is Method.FULL  # whose result has frozen parameters too
        gathered = {}
        for name, parameter in self.model.named_parameters():
            if not is_full and not parameter.requires_grad:
                continue
            value = parameter.detach()
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if is_first:
                # A copy: the caller may keep it while training goes on.
                gathered[name] = whole.to("cpu", copy=True)
            del whole  # before the next one is gathered
        return gathered


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
