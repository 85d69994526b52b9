"""ZeRO-3 on fake tensors: parameters gathered for the module that runs, prefetched, kept and
released as DeepSpeed does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.core.strategy import Loss
from tightfit.core.training import Training
from tightfit.runtime.load import materialize_empty
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from tightfit.training.optimizers import build_optimizer
from tightfit.training.step import Update
from tightfit.training.tracing.zero import FakeZeroBase
from tightfit.training.zero import make_stage3_fields

# Which parameters ZeRO-3 holds whole at any moment: fetched, fetched ahead, kept, released.

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
        self.part: Tensor | None = torch.empty(
            self.part_size, dtype=parameter.dtype, device=parameter.device
        )
        self.is_gathered = True
        self.pending: PendingGather | None = None
        self.is_persistent = False
        self.users: set[int] = set()
        self.fetched_for = _NEVER_USED
        """The last step of the recorded order that a prefetch has served."""

    def list_parts(self) -> list[Tensor]:
        return [] if self.part is None else [self.part]

    def fill(self) -> None:
        """Gather into a new tensor each time: autograd may have saved the last one."""
        self.parameter.data = self._make(self.shape)
        self.is_gathered = True

    def allocate_pending(self) -> None:
        flat = self._make((self.part_size * self.num_ranks,))
        self.parameter.data = flat.narrow(0, 0, self.num_values).view(self.shape)

    def empty(self) -> None:
        self.parameter.data = self._make((0,))
        self.is_gathered = False

    def _make(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.parameter.dtype, device=self.parameter.device)


class PendingGather:
    """Parameters gathered by one call; several share a buffer and are copied out of it."""

    def __init__(self, pieces: list[PartitionedParameter], device: torch.device) -> None:
        self.pieces = pieces
        self._buffer: Tensor | None = None
        self._is_finished = False
        if len(pieces) == 1:
            pieces[0].allocate_pending()
        else:
            size = sum(p.part_size * p.num_ranks for p in pieces)
            dtype = pieces[0].parameter.dtype
            self._buffer = torch.empty(size, dtype=dtype, device=device)
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


@dataclass(slots=True)
class _Order:
    """Modules in the order in which a step used them, forward and backward."""

    modules: list[nn.Module] = field(default_factory=list)
    is_recording: bool = False
    is_complete: bool = False


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
        self._order = _Order()
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

        def before_backward() -> None:
            self._fetch(module, is_forward=False)

        return _map_tensors(output, lambda tensor: _call_in_backward(tensor, before_backward))

    # Order

    def _reset(self) -> None:
        """Start a pass: drops what was prefetched for the last one."""
        self._finish_all()
        if self._order.is_recording:
            self._order = _Order(modules=self._order.modules, is_complete=True)
        elif not self._order.is_complete:
            self._order = _Order(is_recording=True)
        self._queue.clear()
        if self._order.is_complete:
            for step, module in enumerate(self._order.modules):
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

    def _follow(self, module: nn.Module) -> None:
        """Record the module; another order than the recorded one stops prefetching."""
        if self._order.is_recording:
            self._order.modules.append(module)
        if self._order.is_complete:
            is_known = self._step < len(self._order.modules)
            if not is_known or self._order.modules[self._step] is not module:
                self._order = _Order()
                self._finish_all()

    # Fetch and release

    @torch.no_grad()
    def _fetch(self, module: nn.Module, *, is_forward: bool) -> None:
        number = self._numbers[module]
        self._follow(module)
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
            if self._order.is_complete:
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
            PendingGather(ordered, ordered[0].parameter.device)

    def _finish_gather(self, piece: PartitionedParameter) -> None:
        if piece.pending is not None:
            with torch.cpu.stream(self._stream):
                piece.pending.finish()
            piece.pending = None

    @torch.no_grad()
    def _release_module(self, module: nn.Module, *, is_forward: bool) -> None:
        number = self._numbers[module]
        own = set(self._pieces_of(module))
        released = self._find_released(own)
        if not is_forward:
            recomputed = self._recomputed.pop(number, set())
            released |= {piece for piece in recomputed if not piece.is_persistent}
            own |= recomputed
            self._active.pop(number, None)
        for piece in own:
            piece.users.discard(number)
            if piece in released:
                self._release(piece)

    def _find_released(self, own: set[PartitionedParameter]) -> set[PartitionedParameter]:
        if not self._order.is_complete:
            return set(own)
        released = {
            piece for piece in own if not piece.is_persistent and piece.fetched_for <= self._step
        }
        passed = 0
        for module in self._order.modules[self._step :]:
            if passed >= self._reuse_distance or not released:
                break
            for piece in self._pieces_of(module):
                released.discard(piece)
                passed += piece.num_values
        return released

    def _release(self, piece: PartitionedParameter) -> None:
        if piece.is_gathered and not piece.users:
            piece.empty()
            self._num_live -= piece.num_values

    def _pieces_of(self, module: nn.Module) -> list[PartitionedParameter]:
        own = [self._pieces[p] for p in module._parameters.values() if p is not None]
        return own + self._external.get(module, [])

    @contextmanager
    def _traffic(self) -> Any:
        before, self._recorder.purpose = self._recorder.purpose, COMMUNICATION
        try:
            yield
        finally:
            self._recorder.purpose = before


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


_NORM_DTYPE = torch.double


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
        self._subgroups = self._build_state()
        self._bucket_size: int = self._fields["reduce_bucket_size"]
        self._bucket = self.make(self._bucket_size, self._dtype, COMMUNICATION)
        trained = [p for group in self._subgroups for p in group.members]
        total = sum(self._pieces[p].part_size for p in trained)
        self._gradients = self.make(total, self._dtype, GRADIENTS)
        self._waiting: list[nn.Parameter] = []
        self._num_waiting = 0
        self._stream = torch.cpu.Stream()
        """`reduce_and_partition_stream`."""
        self.coordinator = ParameterCoordinator(module, self._pieces, self._fields, self.recorder)
        self._register_external()
        self.coordinator.register_hooks()
        hooked: list[Any] = trained
        for parameter in hooked:
            parameter.register_post_accumulate_grad_hook(self._take)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._reduce()
            self.coordinator.release_leftovers()

    def update(self, learning_rate: float) -> Update:
        self.coordinator.release_all()
        with torch.no_grad():
            norms = [
                torch.linalg.vector_norm(part.to(_NORM_DTYPE))
                for group in self._subgroups
                for part in self._cut(group)
            ]
        groups = self.optimizer.param_groups
        for group in self._subgroups:
            with torch.no_grad():
                group.master.grad = torch.cat(self._cut(group)).to(torch.float32)
                group.master.grad.mul_(1.0)
            group.settings["lr"] = learning_rate
            self.optimizer.param_groups = [group.settings]
            self.optimizer.step()
            group.master.grad = None
        self.optimizer.param_groups = groups
        self.coordinator.gather_persistent()
        return Update(grad_norm=torch.stack(norms).sum())

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
                    self.recorder.hold(pieces[new].list_parts(), WEIGHTS)
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
                self._pieces[parameter].part = None
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

    def _cut(self, group: _Subgroup) -> list[Tensor]:
        """This rank's gradients of a subgroup."""
        start = 0
        for other in self._subgroups:
            if other is group:
                break
            start += sum(self._pieces[p].part_size for p in other.members)
        sizes = [self._pieces[p].part_size for p in group.members]
        own: Any = self._gradients.narrow(0, start, sum(sizes))
        return list(own.split(sizes))

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        piece = self._pieces[parameter]
        size = piece.num_values
        if self._waiting and self._num_waiting + size > self._bucket_size:
            self._reduce()
        assert parameter.grad is not None
        if self._num_waiting + size <= self._bucket_size:
            slot = self._bucket.narrow(0, self._num_waiting, size).view(piece.shape)
            slot.copy_(parameter.grad)
            parameter.grad = slot
        self._waiting.append(parameter)
        self._num_waiting += size

    def _reduce(self) -> None:
        """`reduce_scatter_coalesced`: in place for one gradient that divides evenly."""
        if not self._waiting:
            return
        sizes = [self._pieces[p].part_size * self.world_size for p in self._waiting]
        is_alone = len(sizes) == 1 and sizes[0] == self._pieces[self._waiting[0]].num_values
        if not is_alone:
            before, self.recorder.purpose = self.recorder.purpose, COMMUNICATION
            with torch.cpu.stream(self._stream):
                torch.empty(sum(sizes), dtype=self._dtype, device=self.device)
            self.recorder.purpose = before
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting.clear()
        self._num_waiting = 0


class _Subgroup:
    """Parameters that one call of the optimizer updates, as one flat fp32 tensor."""

    master: Tensor

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
    from unittest.mock import patch

    def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        apply: Any = LinearKeepingWeight.apply
        product: Tensor = apply(values, weight, bias)
        return product

    with patch.object(functional, "linear", linear):
        yield
