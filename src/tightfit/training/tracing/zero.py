"""ZeRO-1 and 2 on fake tensors: DeepSpeed's buffers, allocated and freed as it does.

DeepSpeed itself cannot run on fake tensors, which have no addresses. This follows its sources
(0.19, runtime/zero/stage_1_and_2.py), as rank 0 of any number. Simplified: collectives work in
place and allocate nothing; loss scaling and overflow checks, which are scalars, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.core.strategy import Sharding, Strategy
from tightfit.core.training import Training
from tightfit.estimation.state import ZERO_BUCKET_VALUES
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from tightfit.training.distributed import DistContext
from tightfit.training.optimizers import build_optimizer
from tightfit.training.step import Update
from tightfit.training.tracing.engine import load_fake_weights

_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a group is padded to a multiple of it per rank."""
_NORM_DTYPE = torch.double
"""Norms are taken of copies in fp64."""


def build_fake_zero(
    module: nn.Module,
    strategy: Strategy,
    training: Training,
    *,
    context: DistContext,
    recorder: Recorder,
) -> Any:
    """The engine of the strategy's stage. Call inside the fake mode and the recorder."""
    settings: dict[str, Any] = {"strategy": strategy, "context": context, "recorder": recorder}
    if strategy.sharding is Sharding.ZERO3:
        from tightfit.training.tracing.zero3 import FakeZero3Engine

        return FakeZero3Engine(module, training, **settings)
    has_random_weights = training.random_weights
    load_fake_weights(
        module, strategy, context.device, recorder=recorder, has_random_weights=has_random_weights
    )
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return FakeZeroEngine(module, optimizer, **settings)


class FakeZeroBase:
    """The engine protocol, for all stages."""

    def __init__(
        self, module: nn.Module, *, strategy: Strategy, context: DistContext, recorder: Recorder
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.device = context.device
        self.world_size = context.world_size
        self.recorder = recorder
        self.is_boundary = True

    @property
    def model(self) -> Any:
        return self.module.model

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        self.is_boundary = is_last
        yield

    def trained_state(self) -> dict[str, Tensor]:
        """Gather one trained parameter at a time, as for a copy to the host."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                shape = getattr(parameter, "ds_shape", parameter.shape)
                torch.empty(shape, dtype=parameter.dtype, device=self.device)
        return {}

    def make(self, num_values: int, dtype: torch.dtype, category: str) -> Tensor:
        tensor = torch.empty(num_values, dtype=dtype, device=self.device)
        self.recorder.hold([tensor], category)
        return tensor


class _Group:
    """One optimizer group: a flat buffer, of which this rank updates a partition."""

    def __init__(self, engine: FakeZeroBase, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.members: list[nn.Parameter] = settings["params"]
        step = _ALIGNMENT * engine.world_size
        num_values = sum(p.numel() for p in self.members)
        padding = -num_values % step
        self.size = (num_values + padding) // engine.world_size
        flat = _flatten([*self.members, *_pad(padding, self.members[0])])
        engine.recorder.hold([flat], WEIGHTS)
        self.starts: dict[nn.Parameter, int] = {}
        start = 0
        for parameter in self.members:
            part = flat.narrow(0, start, parameter.numel())
            parameter.data = part.view(parameter.shape)
            self.starts[parameter] = start
            start += parameter.numel()
        self.own = flat.narrow(0, 0, self.size)
        copied = self.own.detach().clone()
        self.master = copied.to(torch.float32).requires_grad_()
        engine.recorder.hold([self.master], OPTIMIZER)
        settings["params"] = [self.master]
        self.accumulated: list[Tensor] | None = None
        self.averaged: list[Tensor] = []

    @property
    def updated(self) -> list[nn.Parameter]:
        """Parameters with values in this rank's partition."""
        return [p for p in self.members if self.starts[p] < self.size]

    def owners(self, parameter: nn.Parameter) -> list[tuple[int, int]]:
        """(rank, values) of the partitions of a parameter."""
        at, end = self.starts[parameter], self.starts[parameter] + parameter.numel()
        found = []
        while at < end:
            rank = at // self.size
            stop = min(end, (rank + 1) * self.size)
            found.append((rank, stop - at))
            at = stop
        return found

    def cut(self, gradients: list[Tensor]) -> list[Tensor]:
        """This rank's partition of full gradients."""
        parts = []
        for parameter, gradient in zip(self.updated, gradients, strict=True):
            inside = min(parameter.numel(), self.size - self.starts[parameter])
            parts.append(gradient.reshape(-1).narrow(0, 0, inside))
        missing = self.size - sum(part.numel() for part in parts)
        return parts + _pad(missing, self.own)


class FakeZeroEngine(FakeZeroBase):
    """Stage 1 and 2: full 16-bit weights, fp32 state of this rank's partition.

    A gradient is copied into the reduce bucket as it comes (stage 2) or after the last
    micro-batch (stage 1). A full bucket is reduced, in a copy if several ranks own its values.
    This rank's partition is kept, the rest freed.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, **settings: Any) -> None:
        super().__init__(module, **settings)
        self.optimizer = optimizer
        self._is_stage_2 = self.strategy.sharding is Sharding.ZERO2
        self._groups = [_Group(self, group) for group in optimizer.param_groups]
        self._group_of = {p: group for group in self._groups for p in group.members}
        self._dtype = self._groups[0].own.dtype
        self._bucket: Tensor | None = None
        self._kept: Tensor | None = None
        self._num_kept = 0
        self._waiting: list[nn.Parameter] = []
        self._num_waiting = 0
        hooked: list[Any] = list(self._group_of)
        for parameter in hooked:
            parameter.register_post_accumulate_grad_hook(self._take)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if not self._is_stage_2:
                if not self.is_boundary:
                    return
                for parameter in self._group_of:
                    if parameter.grad is not None:
                        self._add(parameter)
            self._settle()

    def update(self, learning_rate: float) -> Update:
        with torch.no_grad():
            norms = [
                torch.linalg.vector_norm(part.to(_NORM_DTYPE))
                for group in self._groups
                for part in group.averaged
            ]
        groups = self.optimizer.param_groups
        for group in self._groups:
            self._prepare(group)
            self.optimizer.param_groups = [group.settings]
            group.settings["lr"] = learning_rate
            self.optimizer.step()
            group.master.grad = None
            with torch.no_grad():
                group.own.copy_(group.master)
        self.optimizer.param_groups = groups
        return Update(grad_norm=torch.stack(norms).sum())

    @torch.no_grad()
    def _prepare(self, group: _Group) -> None:
        flat = _flatten(group.averaged)
        wide = flat.to(torch.float32)
        del flat
        group.master.grad = wide
        group.averaged = []
        wide.mul_(1.0)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        if self._bucket is None:
            self._bucket = self.make(ZERO_BUCKET_VALUES, self._dtype, COMMUNICATION)
        if self._is_stage_2:
            self._add(parameter)
        elif parameter.grad is not None:
            self.recorder.mark([parameter.grad], GRADIENTS)

    def _add(self, parameter: nn.Parameter) -> None:
        if self._num_waiting + parameter.numel() > ZERO_BUCKET_VALUES:
            self._reduce()
        if parameter.numel() <= ZERO_BUCKET_VALUES:
            assert self._bucket is not None
            assert parameter.grad is not None
            slot = self._bucket.narrow(0, self._num_waiting, parameter.numel())
            slot.copy_(parameter.grad.view(-1))
            parameter.grad = slot.view(parameter.shape)
        self._waiting.append(parameter)
        self._num_waiting += parameter.numel()

    def _reduce(self) -> None:
        """Reduce the bucket; `allreduce_and_scatter` copies unless one rank owns all of it."""
        if not self._waiting:
            return
        first = self._waiting[0].grad
        assert first is not None
        assert self._bucket is not None
        is_alone = first.numel() > ZERO_BUCKET_VALUES
        tensor: Any = first.view(-1) if is_alone else self._bucket.narrow(0, 0, self._num_waiting)
        tensor.div_(self.world_size)
        with self._traffic():
            self._exchange(list(tensor.split(self._list_slices())))
        for parameter in self._waiting:
            if self._group_of[parameter].starts[parameter] < self._group_of[parameter].size:
                self._keep(parameter)
            elif self._is_stage_2:
                parameter.grad = None
        self._waiting.clear()
        self._num_waiting = 0

    def _exchange(self, slices: list[Tensor]) -> None:
        together: list[Tensor] = []
        for part in slices:
            together.append(part)
            if sum(t.numel() for t in together) > ZERO_BUCKET_VALUES:
                _flatten(together)
                together = []
        if together:
            _flatten(together)

    def _list_slices(self) -> list[int]:
        """Sizes of the bucket's consecutive slices by owner rank."""
        slices: list[list[int]] = []
        for parameter in self._waiting:
            for rank, size in self._group_of[parameter].owners(parameter):
                if slices and slices[-1][0] == rank:
                    slices[-1][1] += size
                else:
                    slices.append([rank, size])
        return [size for _, size in slices]

    def _keep(self, parameter: nn.Parameter) -> None:
        """Copy out of the bucket, which is reused."""
        if self._kept is None:
            size = sum(p.numel() for group in self._groups for p in group.updated)
            self._kept, self._num_kept = self.make(size, self._dtype, GRADIENTS), 0
        assert parameter.grad is not None
        slot = self._kept.narrow(0, self._num_kept, parameter.numel())
        slot.copy_(parameter.grad.view(-1))
        parameter.grad = slot.view(parameter.shape)
        self._num_kept += parameter.numel()

    def _settle(self) -> None:
        """`independent_gradient_partition_epilogue`."""
        self._reduce()
        for group in self._groups:
            new = [p.grad if p.grad is not None else torch.zeros_like(p) for p in group.updated]
            if group.accumulated is None:
                group.accumulated = new
            else:
                for total, gradient in zip(group.accumulated, new, strict=True):
                    total.add_(gradient)
            if self.is_boundary:
                group.averaged, group.accumulated = group.cut(group.accumulated), None
        self._bucket = self._kept = None
        for parameter in self._group_of:
            parameter.grad = None

    @contextmanager
    def _traffic(self) -> Iterator[None]:
        before, self.recorder.purpose = self.recorder.purpose, COMMUNICATION
        yield
        self.recorder.purpose = before


def _flatten(tensors: list[Any]) -> Tensor:
    """As torch's `_flatten_dense_tensors`: a single tensor is not copied."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _pad(num_values: int, like: Tensor) -> list[Tensor]:
    return [torch.zeros(num_values, dtype=like.dtype, device=like.device)] if num_values else []
