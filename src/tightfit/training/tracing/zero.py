"""ZeRO on fake tensors: DeepSpeed's buffers, allocated and freed as it does.

DeepSpeed itself cannot run on fake tensors, which have no addresses. This follows its sources
(0.19, runtime/zero/stage_1_and_2.py, stage3.py), as rank 0 of any number. Simplified: collectives
work in place and allocate nothing; loss scaling and overflow checks, which are scalars, are left
out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tightfit.core.settings import Loss, Sharding
from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.state import ZERO_BUCKET_VALUES
from tightfit.runtime.load import materialize_empty
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from tightfit.training.distributed import DistContext
from tightfit.training.model import build_optimizer
from tightfit.training.step import Update
from tightfit.training.zero import make_stage3_fields

_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a group is padded to a multiple of it per rank."""
_NORM_DTYPE = torch.double
"""Norms are taken of copies in fp64."""


class FakeZeroBase(ABC):
    """The engine protocol, for all stages.

    A gradient is copied into a bucket; a full bucket is reduced, and this rank's part is kept.
    """

    optimizer: Optimizer
    groups: list[Any]
    """Each with `settings` of its optimizer group, a `master` copy and the values it is copied to,
    `own`, unless those are gathered elsewhere."""
    bucket: Tensor | None = None
    bucket_size: int

    def __init__(
        self, module: nn.Module, *, strategy: Strategy, context: DistContext, recorder: Recorder
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.device = context.device
        self.world_size = context.world_size
        self.recorder = recorder
        self.is_boundary = True
        self.waiting: list[nn.Parameter] = []
        """Parameters whose gradients are in the bucket."""
        self.num_waiting = 0

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

    def update(self, learning_rate: float) -> Update:
        """Clip by the norm of all parts, then one call of the optimizer per group."""
        with torch.no_grad():
            norms = [
                torch.linalg.vector_norm(part.to(_NORM_DTYPE))
                for group in self.groups
                for part in self.list_gradients(group)
            ]
        settings = self.optimizer.param_groups
        for group in self.groups:
            with torch.no_grad():
                group.master.grad = self.take_gradient(group)
                group.master.grad.mul_(1.0)
            group.settings["lr"] = learning_rate
            self.optimizer.param_groups = [group.settings]
            self.optimizer.step()
            group.master.grad = None
            if group.own is not None:
                with torch.no_grad():
                    group.own.copy_(group.master)
        self.optimizer.param_groups = settings
        self.finish_update()
        return Update(grad_norm=torch.stack(norms).sum())

    @abstractmethod
    def list_gradients(self, group: Any) -> list[Tensor]:
        """This rank's reduced gradients of a group, part by part."""

    @abstractmethod
    def take_gradient(self, group: Any) -> Tensor:
        """The same as one fp32 tensor."""

    @abstractmethod
    def reduce_bucket(self) -> None:
        """Allocate as the reduction of the gradients in `waiting` does, and keep or drop them."""

    def reduce(self) -> None:
        if self.waiting:
            self.reduce_bucket()
            self.waiting.clear()
            self.num_waiting = 0

    def fill_bucket(self, parameter: nn.Parameter) -> None:
        """Copy a gradient into the bucket; one that is larger than it is reduced by itself."""
        gradient = parameter.grad
        assert gradient is not None
        if self.num_waiting + gradient.numel() > self.bucket_size:
            self.reduce()
        if gradient.numel() <= self.bucket_size:
            assert self.bucket is not None
            slot = self.bucket.narrow(0, self.num_waiting, gradient.numel())
            # Views as each stage makes them: the traced time counts them.
            if self.strategy.sharding is Sharding.ZERO3:
                slot = slot.view(gradient.shape)
                slot.copy_(gradient)
                parameter.grad = slot
            else:
                slot.copy_(gradient.view(-1))
                parameter.grad = slot.view(gradient.shape)
        self.waiting.append(parameter)
        self.num_waiting += gradient.numel()

    def finish_update(self) -> None:  # noqa: B027 (stages 1 and 2 keep nothing gathered)
        """Gather what every rank keeps whole."""

    def traffic(self) -> AbstractContextManager[None]:
        """Allocations inside are for communication."""
        return self.recorder.setting("purpose", COMMUNICATION)

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

    Gradients go into the bucket as they come (stage 2) or after the last micro-batch (stage 1).
    """

    bucket_size = ZERO_BUCKET_VALUES

    def __init__(self, module: nn.Module, optimizer: Optimizer, **settings: Any) -> None:
        super().__init__(module, **settings)
        self.optimizer = optimizer
        self._is_stage_2 = self.strategy.sharding is Sharding.ZERO2
        self.groups = [_Group(self, group) for group in optimizer.param_groups]
        self._group_of = {p: group for group in self.groups for p in group.members}
        self._dtype = self.groups[0].own.dtype
        self._kept: Tensor | None = None
        self._num_kept = 0
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
                        self.fill_bucket(parameter)
            self._settle()

    def list_gradients(self, group: _Group) -> list[Tensor]:
        return group.averaged

    def take_gradient(self, group: _Group) -> Tensor:
        flat = _flatten(group.averaged)
        wide = flat.to(torch.float32)
        del flat
        group.averaged = []
        return wide

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        if self.bucket is None:
            self.bucket = self.make(self.bucket_size, self._dtype, COMMUNICATION)
        if self._is_stage_2:
            self.fill_bucket(parameter)
        elif parameter.grad is not None:
            self.recorder.mark([parameter.grad], GRADIENTS)

    def reduce_bucket(self) -> None:
        """`allreduce_and_scatter`, which copies unless one rank owns all of the bucket."""
        first = self.waiting[0].grad
        assert first is not None
        assert self.bucket is not None
        is_alone = first.numel() > self.bucket_size
        tensor: Any = first.view(-1) if is_alone else self.bucket.narrow(0, 0, self.num_waiting)
        tensor.div_(self.world_size)
        with self.traffic():
            together: list[Tensor] = []
            for part in tensor.split(self._list_slices()):
                together.append(part)
                if sum(t.numel() for t in together) > self.bucket_size:
                    _flatten(together)
                    together = []
            if together:
                _flatten(together)
        for parameter in self.waiting:
            if self._group_of[parameter].starts[parameter] < self._group_of[parameter].size:
                self._keep(parameter)
            elif self._is_stage_2:
                parameter.grad = None

    def _list_slices(self) -> list[int]:
        """Sizes of the bucket's consecutive slices by owner rank."""
        slices: list[list[int]] = []
        for parameter in self.waiting:
            for rank, size in self._group_of[parameter].owners(parameter):
                if slices and slices[-1][0] == rank:
                    slices[-1][1] += size
                else:
                    slices.append([rank, size])
        return [size for _, size in slices]

    def _keep(self, parameter: nn.Parameter) -> None:
        """Copy out of the bucket, which is reused."""
        if self._kept is None:
            size = sum(p.numel() for group in self.groups for p in group.updated)
            self._kept, self._num_kept = self.make(size, self._dtype, GRADIENTS), 0
        assert parameter.grad is not None
        slot = self._kept.narrow(0, self._num_kept, parameter.numel())
        slot.copy_(parameter.grad.view(-1))
        parameter.grad = slot.view(parameter.shape)
        self._num_kept += parameter.numel()

    def _settle(self) -> None:
        """`independent_gradient_partition_epilogue`."""
        self.reduce()
        for group in self.groups:
            new = [p.grad if p.grad is not None else torch.zeros_like(p) for p in group.updated]
            if group.accumulated is None:
                group.accumulated = new
            else:
                for total, gradient in zip(group.accumulated, new, strict=True):
                    total.add_(gradient)
            if self.is_boundary:
                group.averaged, group.accumulated = group.cut(group.accumulated), None
        self.bucket = self._kept = None
        for parameter in self._group_of:
            parameter.grad = None


def _flatten(tensors: list[Any]) -> Tensor:
    """As torch's `_flatten_dense_tensors`: a single tensor is not copied."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _pad(num_values: int, like: Tensor) -> list[Tensor]:
    return [torch.zeros(num_values, dtype=like.dtype, device=like.device)] if num_values else []


# ZeRO-3: parameters are gathered for the module that runs, prefetched, kept and released.

_NEVER_USED = -(10**10)


class PartitionedParameter:
    """One parameter: this rank's partition, and whether it is gathered."""

    def __init__(self, parameter: nn.Parameter, number: int, num_ranks: int) -> None:
        self.parameter = parameter
        self.number = number
        self.num_values = parameter.numel()
        self.num_ranks = num_ranks
        self.part_size = -(-self.num_values // num_ranks)
        self.shape = tuple(parameter.shape)
        self.part = self.make((self.part_size,))
        self.is_gathered = True
        self.pending: PendingGather | None = None
        self.is_persistent = False
        self.users: set[int] = set()
        self.fetched_for = _NEVER_USED
        """The last step of the recorded order that a prefetch has served."""

    def fill(self) -> None:
        """Gather into a new tensor each time: autograd may have saved the last one."""
        self.parameter.data = self.make(self.shape)
        self.is_gathered = True

    def empty(self) -> None:
        self.parameter.data = self.make((0,))
        self.is_gathered = False

    def make(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.parameter.dtype, device=self.parameter.device)


class PendingGather:
    """Parameters gathered by one call; several share a buffer and are copied out of it."""

    def __init__(self, pieces: list[PartitionedParameter]) -> None:
        self.pieces = pieces
        self._buffer: Tensor | None = None
        self._is_finished = False
        first = pieces[0]
        buffer = first.make((sum(p.part_size * p.num_ranks for p in pieces),))
        if len(pieces) == 1:
            first.parameter.data = buffer.narrow(0, 0, first.num_values).view(first.shape)
        else:
            self._buffer = buffer
        for piece in pieces:
            piece.pending = self

    def finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        for piece in self.pieces:
            if self._buffer is None:
                piece.is_gathered = True
            else:
                piece.fill()


class ParameterCoordinator:
    """DeepSpeed's `PartitionedParameterCoordinator`.

    The first pass records the order of modules. From the second on parameters are prefetched, one
    bucket with every module that begins, while fewer than `stage3_max_live_parameters` are
    gathered; those used again within `stage3_max_reuse_distance` are kept.
    """

    def __init__(
        self,
        root: nn.Module,
        pieces: dict[nn.Parameter, PartitionedParameter],
        fields: dict[str, Any],
        recorder: Recorder,
    ) -> None:
        self._root = root
        self._pieces = pieces
        self._recorder = recorder
        self._bucket: int = fields["stage3_prefetch_bucket_size"]
        self._max_live: int = fields["stage3_max_live_parameters"]
        self._reuse_distance: int = fields["stage3_max_reuse_distance"]
        self._external: dict[nn.Module, list[PartitionedParameter]] = {}
        self._order: list[nn.Module] = []
        """Modules in the order in which a step used them, forward and backward."""
        self._is_recording = self._is_recorded = False
        self._queue: deque[tuple[PartitionedParameter, int]] = deque()
        self._step = 0
        self._num_live = 0
        self._active: dict[int, nn.Module] = {}
        self._recomputed: dict[int, set[PartitionedParameter]] = {}
        self._stream = torch.cpu.Stream()
        """Gathers run on a stream of their own, which the recorder reads."""
        self._numbers = {module: number for number, module in enumerate(root.modules())}
        self._persistent = [
            piece
            for piece in pieces.values()
            if piece.num_values <= fields["stage3_param_persistence_threshold"]
        ]
        for piece in self._persistent:
            piece.is_persistent = True

    def add_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Register a parameter that `module` uses but another module owns."""
        self._external.setdefault(module, []).append(self._pieces[parameter])

    def register_hooks(self) -> None:
        self._root.register_forward_pre_hook(lambda *_: self._reset())
        for module in self._numbers:
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    def release_leftovers(self) -> None:
        """Release what no backward hook has released."""
        while self._active:
            _, module = self._active.popitem()
            number = self._numbers[module]
            for piece in {*self._pieces_of(module), *self._recomputed.pop(number, set())}:
                piece.users.discard(number)
                if not piece.is_persistent:
                    self._release(piece)

    def release_all(self) -> None:
        for piece in self._pieces.values():
            self._finish_gather(piece)
            piece.users.clear()
            self._release(piece)

    def gather_persistent(self) -> None:
        with self._traffic():
            for piece in self._persistent:
                if not piece.is_gathered:
                    piece.fill()

    # Hooks

    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        self._fetch(module, is_forward=True)
        remaining = [0]

        def after_backward() -> None:
            remaining[0] -= 1
            if remaining[0] == 0:
                self._release_module(module, is_forward=False)

        def wrap(tensor: Tensor) -> Tensor:
            remaining[0] += 1
            return _call_in_backward(tensor, after_backward)

        return _map_tensors(args, wrap)

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> Any:
        self._release_module(module, is_forward=True)

        before_backward = partial(self._fetch, module, is_forward=False)
        return _map_tensors(output, lambda tensor: _call_in_backward(tensor, before_backward))

    # Order

    def _reset(self) -> None:
        """Start a pass: drops what was prefetched for the last one."""
        self._finish_all()
        if self._is_recording:
            self._is_recording, self._is_recorded = False, True
        elif not self._is_recorded:
            self._order, self._is_recording = [], True
        self._queue.clear()
        if self._is_recorded:
            for step, module in enumerate(self._order):
                ordered = sorted(set(self._pieces_of(module)), key=lambda piece: piece.number)
                self._queue.extend((piece, step) for piece in ordered)
        for piece in self._pieces.values():
            piece.fetched_for = _NEVER_USED
        self._step = 0
        self._num_live = 0

    def _finish_all(self) -> None:
        for piece in self._pieces.values():
            if piece.pending is not None:
                self._finish_gather(piece)
                self._release(piece)

    # Fetch and release

    @torch.no_grad()
    def _fetch(self, module: nn.Module, *, is_forward: bool) -> None:
        number = self._numbers[module]
        if self._is_recording:
            self._order.append(module)
        if self._is_recorded and self._order[self._step : self._step + 1] != [module]:
            # Another order than the recorded one stops prefetching.
            self._order, self._is_recorded = [], False
            self._finish_all()
        if not is_forward:
            self._active[number] = module
        wanted = set(self._pieces_of(module))
        with self._traffic():
            self._gather([p for p in wanted if not p.is_gathered and p.pending is None])
            is_recomputing = is_forward and torch._C._current_graph_task_id() != -1
            for piece in wanted:
                piece.users.add(number)
                if is_recomputing and self._active and not piece.parameter.requires_grad:
                    last = next(reversed(self._active))
                    self._recomputed.setdefault(last, set()).add(piece)
                    piece.users.add(last)
                self._finish_gather(piece)
            if self._is_recorded:
                self._fetch_ahead(wanted)
        self._step += 1

    def _fetch_ahead(self, wanted: set[PartitionedParameter]) -> None:
        missing = {piece for piece in wanted if piece.fetched_for < self._step}
        seen: set[PartitionedParameter] = set()
        while self._queue and len(seen) < len(missing):
            piece, step = self._queue.popleft()
            piece.fetched_for = step
            seen.add(piece)
        most = min(self._max_live - self._num_live, self._bucket)
        ahead: list[PartitionedParameter] = []
        num_values = 0
        while self._queue and num_values < most:
            piece, step = self._queue.popleft()
            piece.fetched_for = max(piece.fetched_for, step)
            if not piece.is_gathered and piece.pending is None and piece not in ahead:
                ahead.append(piece)
                num_values += piece.num_values
        self._gather(ahead)

    def _gather(self, pieces: list[PartitionedParameter]) -> None:
        if not pieces:
            return
        self._num_live += sum(piece.num_values for piece in pieces)
        ordered = sorted(pieces, key=lambda piece: piece.number)
        with torch.cpu.stream(self._stream):
            PendingGather(ordered)

    def _finish_gather(self, piece: PartitionedParameter) -> None:
        if piece.pending is not None:
            with torch.cpu.stream(self._stream):
                piece.pending.finish()
            piece.pending = None

    @torch.no_grad()
    def _release_module(self, module: nn.Module, *, is_forward: bool) -> None:
        number = self._numbers[module]
        own = set(self._pieces_of(module))
        released = set(own)
        if self._is_recorded:
            # Those that are used again soon are kept.
            released = {p for p in own if not p.is_persistent and p.fetched_for <= self._step}
            passed = 0
            for later in self._order[self._step :]:
                if passed >= self._reuse_distance or not released:
                    break
                for piece in self._pieces_of(later):
                    released.discard(piece)
                    passed += piece.num_values
        if not is_forward:
            recomputed = self._recomputed.pop(number, set())
            released |= {piece for piece in recomputed if not piece.is_persistent}
            own |= recomputed
            self._active.pop(number, None)
        for piece in own:
            piece.users.discard(number)
            if piece in released:
                self._release(piece)

    def _release(self, piece: PartitionedParameter) -> None:
        if piece.is_gathered and not piece.users:
            piece.empty()
            self._num_live -= piece.num_values

    def _pieces_of(self, module: nn.Module) -> list[PartitionedParameter]:
        own = [self._pieces[p] for p in module._parameters.values() if p is not None]
        return own + self._external.get(module, [])

    def _traffic(self) -> AbstractContextManager[None]:
        return self._recorder.setting("purpose", COMMUNICATION)


class _Callback(torch.autograd.Function):
    """The identity, with a call in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return (gradients[0], None)


def _call_in_backward(tensor: Tensor, call: Callable[[], None]) -> Tensor:
    apply: Any = _Callback.apply
    wrapped: Tensor = apply(tensor, call)
    return wrapped


def _map_tensors(value: Any, wrap: Callable[[Tensor], Tensor]) -> Any:
    """`wrap` for every tensor that has a gradient; dicts are changed in place."""
    if isinstance(value, Tensor):
        return wrap(value) if value.requires_grad and torch.is_grad_enabled() else value
    if isinstance(value, (tuple, list)):
        mapped = [_map_tensors(part, wrap) for part in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _map_tensors(value[key], wrap)
    return value


class FakeZero3Engine(FakeZeroBase):
    """Stage 3: weights, gradients and state partitioned; parameters gathered while in use."""

    def __init__(self, module: nn.Module, training: Training, **settings: Any) -> None:
        super().__init__(module, **settings)
        text = self.model.config.get_text_config()
        self._fields = make_stage3_fields(text.hidden_size)
        self._pieces = self._partition()
        self.optimizer = build_optimizer(
            module.named_parameters(), self.strategy.optimizer, training
        )
        self._dtype = next(p.dtype for p in module.parameters() if p.requires_grad)
        self.groups = self._build_state()
        self.bucket_size = self._fields["reduce_bucket_size"]
        self.bucket = self.make(self.bucket_size, self._dtype, COMMUNICATION)
        trained = [p for group in self.groups for p in group.members]
        total = sum(self._pieces[p].part_size for p in trained)
        self._gradients = self.make(total, self._dtype, GRADIENTS)
        self._stream = torch.cpu.Stream()
        """`reduce_and_partition_stream`."""
        self.coordinator = ParameterCoordinator(module, self._pieces, self._fields, self.recorder)
        self._register_external()
        self.coordinator.register_hooks()
        hooked: list[Any] = trained
        for parameter in hooked:
            parameter.register_post_accumulate_grad_hook(torch.no_grad()(self.fill_bucket))

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.reduce()
            self.coordinator.release_leftovers()

    def update(self, learning_rate: float) -> Update:
        self.coordinator.release_all()
        return super().update(learning_rate)

    def finish_update(self) -> None:
        self.coordinator.gather_persistent()

    def take_gradient(self, group: _Subgroup) -> Tensor:
        return torch.cat(self.list_gradients(group)).to(torch.float32)

    def _partition(self) -> dict[nn.Parameter, PartitionedParameter]:
        """Each parameter is created, partitioned and freed before the next."""
        pieces: dict[nn.Parameter, PartitionedParameter] = {}
        placed: dict[nn.Parameter, nn.Parameter] = {}
        for owner in list(self.module.modules()):
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in placed:
                    whole = torch.empty_like(parameter, device=self.device)
                    new = nn.Parameter(whole, parameter.requires_grad)
                    new.ds_shape = new.shape  # type: ignore[attr-defined]  # as DeepSpeed sets it
                    placed[parameter] = new
                    pieces[new] = PartitionedParameter(new, len(pieces), self.world_size)
                    self.recorder.hold([pieces[new].part], WEIGHTS)
                    pieces[new].empty()
                    del whole
                owner._parameters[name] = placed[parameter]
        materialize_empty(self.module, self.device)
        return pieces

    def _build_state(self) -> list[_Subgroup]:
        """Trained partitions in one buffer, and their fp32 master copies."""
        groups = [
            _Subgroup(dict(settings), members)
            for settings in self.optimizer.param_groups
            for members in self._split(settings["params"])
        ]
        sizes = [sum(self._pieces[p].part_size for p in group.members) for group in groups]
        for group in groups:
            for parameter in group.members:
                del self._pieces[parameter].part
        flat: Any = self.make(sum(sizes), self._dtype, WEIGHTS)
        self._flat = flat
        converted = None
        for group, own in zip(groups, flat.split(sizes), strict=True):
            converted = own.to(torch.float32)
            group.master = converted.clone().requires_grad_()
            self.recorder.hold([group.master], OPTIMIZER)
            group.settings["params"] = [group.master]
        del converted
        self.optimizer.param_groups = [group.settings for group in groups]
        torch.zeros(max(sizes), dtype=torch.float32, device=self.device)
        return groups

    def _register_external(self) -> None:
        """Parameters read from outside: the head by the loss, adapters by LoRA layers."""
        if self.strategy.loss is Loss.FUSED:
            self.coordinator.add_external(self.module, self.model.get_output_embeddings().weight)
        owners: list[Any] = list(self.module.modules())
        for owner in owners:
            adapters = getattr(owner, "lora_A", None)
            for adapter in adapters.values() if isinstance(adapters, nn.ModuleDict) else ():
                weight: Any = adapter.weight
                self.coordinator.add_external(owner, weight)

    def _split(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        members: list[nn.Parameter] = []
        for parameter in parameters:
            members.append(parameter)
            if sum(self._pieces[p].part_size for p in members) >= self._fields["sub_group_size"]:
                yield members
                members = []
        if members:
            yield members

    def list_gradients(self, group: _Subgroup) -> list[Tensor]:
        before = self.groups[: self.groups.index(group)]
        start = sum(self._pieces[p].part_size for other in before for p in other.members)
        sizes = [self._pieces[p].part_size for p in group.members]
        own: Any = self._gradients.narrow(0, start, sum(sizes))
        return list(own.split(sizes))

    def reduce_bucket(self) -> None:
        """`reduce_scatter_coalesced`: in place for one gradient that divides evenly."""
        sizes = [self._pieces[p].part_size * self.world_size for p in self.waiting]
        is_alone = len(sizes) == 1 and sizes[0] == self._pieces[self.waiting[0]].num_values
        if not is_alone:
            with self.traffic(), torch.cpu.stream(self._stream):
                torch.empty(sum(sizes), dtype=self._dtype, device=self.device)
        for parameter in self.waiting:
            parameter.grad = None


class _Subgroup:
    """Parameters that one call of the optimizer updates, as one flat fp32 tensor."""

    master: Tensor
    own = None  # the 16-bit values are in the engine's flat buffer

    def __init__(self, settings: dict[str, Any], members: list[nn.Parameter]) -> None:
        self.settings = settings
        self.members = members


class LinearKeepingWeight(torch.autograd.Function):
    """DeepSpeed's `LinearFunctionForZeroStage3`: keeps input and parameter, not its transpose."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight, bias)
        if values.dim() == 2 and bias is not None:
            return torch.addmm(bias, values, weight.t())
        product = values.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        values, weight, bias = ctx.saved_tensors
        of_values = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_values = gradient.matmul(weight)
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = rows.t().matmul(values.reshape(-1, values.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_values, of_weight, of_bias


@contextmanager
def deepspeed_linear() -> Iterator[None]:
    """DeepSpeed replaces `functional.linear` when it partitions."""

    def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        apply: Any = LinearKeepingWeight.apply
        product: Tensor = apply(values, weight, bias)
        return product

    with patch.object(functional, "linear", linear):
        yield
