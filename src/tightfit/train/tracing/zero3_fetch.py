"""Which parameters ZeRO-3 holds whole at any moment: fetched, fetched ahead, kept, released."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import COMMUNICATION

_LONG_AGO = -(10**10)


class Piece:
    """One parameter: this rank's part of it, and whether it stands whole."""

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
        self.is_whole = True
        self.flight: Flight | None = None
        self.is_persistent = False
        self.users: set[int] = set()
        self.fetched_for = _LONG_AGO
        """The last step of the recorded order that a fetch ahead has served."""

    def list_parts(self) -> list[Tensor]:
        return [] if self.part is None else [self.part]

    def fill(self) -> None:
        """In a new place each time: who kept the last one keeps it."""
        self.parameter.data = self._make(self.shape)
        self.is_whole = True

    def fill_in_flight(self) -> None:
        flat = self._make((self.part_size * self.num_ranks,))
        self.parameter.data = flat.narrow(0, 0, self.num_values).view(self.shape)

    def empty(self) -> None:
        self.parameter.data = self._make((0,))
        self.is_whole = False

    def _make(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.parameter.dtype, device=self.parameter.device)


class Flight:
    """Parameters gathered by one call; several arrive in one buffer and are copied out of it."""

    def __init__(self, pieces: list[Piece], device: torch.device) -> None:
        self.pieces = pieces
        self._buffer: Tensor | None = None
        self._is_landed = False
        if len(pieces) == 1:
            pieces[0].fill_in_flight()
        else:
            size = sum(p.part_size * p.num_ranks for p in pieces)
            dtype = pieces[0].parameter.dtype
            self._buffer = torch.empty(size, dtype=dtype, device=device)
        for piece in pieces:
            piece.flight = self

    def land(self) -> None:
        if self._is_landed:
            return
        self._is_landed = True
        for piece in self.pieces:
            if self._buffer is None:
                piece.is_whole = True
            else:
                piece.fill()


@dataclass(slots=True)
class _Order:
    """Modules in the order in which a pass used them, forward and backward."""

    modules: list[nn.Module] = field(default_factory=list)
    is_recording: bool = False
    is_complete: bool = False


class Coordinator:
    """DeepSpeed's `PartitionedParameterCoordinator`.

    The first pass records the order of modules. From the second on the next parameters are
    fetched ahead, a bucket with every module that begins, as long as fewer than
    `stage3_max_live_parameters` stand whole; and what is used again within
    `stage3_max_reuse_distance` is kept.
    """

    def __init__(
        self,
        root: nn.Module,
        pieces: dict[nn.Parameter, Piece],
        fields: dict[str, Any],
        recorder: Recorder,
    ) -> None:
        self._root = root
        self._pieces = pieces
        self._recorder = recorder
        self._bucket: int = fields["stage3_prefetch_bucket_size"]
        self._max_live: int = fields["stage3_max_live_parameters"]
        self._reuse_distance: int = fields["stage3_max_reuse_distance"]
        self._external: dict[nn.Module, list[Piece]] = {}
        self._order = _Order()
        self._queue: deque[tuple[Piece, int]] = deque()
        self._step = 0
        self._num_live = 0
        self._active: dict[int, nn.Module] = {}
        self._recomputed: dict[int, set[Piece]] = {}
        self._stream = torch.cpu.Stream()
        """Gathers run beside the computation; the recorder reads which stream allocates."""
        self._numbers = {module: number for number, module in enumerate(root.modules())}
        self._persistent = [
            piece
            for piece in pieces.values()
            if piece.num_values <= fields["stage3_param_persistence_threshold"]
        ]
        for piece in self._persistent:
            piece.is_persistent = True

    def add_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """A parameter that `module` uses though another holds it."""
        self._external.setdefault(module, []).append(self._pieces[parameter])

    def register_hooks(self) -> None:
        self._root.register_forward_pre_hook(lambda *_: self._reset())
        for module in self._numbers:
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    def release_leftovers(self) -> None:
        """What no backward hook released."""
        while self._active:
            _, module = self._active.popitem()
            number = self._numbers[module]
            for piece in {*self._pieces_of(module), *self._recomputed.pop(number, set())}:
                piece.users.discard(number)
                if not piece.is_persistent:
                    self._release(piece)

    def release_all(self) -> None:
        for piece in self._pieces.values():
            self._land(piece)
            piece.users.clear()
            self._release(piece)

    def gather_persistent(self) -> None:
        with self._traffic():
            for piece in self._persistent:
                if not piece.is_whole:
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
        """A pass begins: what was fetched ahead for the last one is dropped."""
        self._land_all()
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
            piece.fetched_for = _LONG_AGO
        self._step = 0
        self._num_live = 0

    def _land_all(self) -> None:
        for piece in self._pieces.values():
            if piece.flight is not None:
                self._land(piece)
                self._release(piece)

    def _follow(self, module: nn.Module) -> None:
        """Note the module; another than the recorded one ends all foresight until the next pass."""
        if self._order.is_recording:
            self._order.modules.append(module)
        if self._order.is_complete:
            is_known = self._step < len(self._order.modules)
            if not is_known or self._order.modules[self._step] is not module:
                self._order = _Order()
                self._land_all()

    # Fetch and release

    @torch.no_grad()
    def _fetch(self, module: nn.Module, *, is_forward: bool) -> None:
        number = self._numbers[module]
        self._follow(module)
        if not is_forward:
            self._active[number] = module
        wanted = set(self._pieces_of(module))
        with self._traffic():
            self._gather([p for p in wanted if not p.is_whole and p.flight is None])
            is_recomputing = is_forward and torch._C._current_graph_task_id() != -1
            for piece in wanted:
                piece.users.add(number)
                if is_recomputing and self._active and not piece.parameter.requires_grad:
                    last = next(reversed(self._active))
                    self._recomputed.setdefault(last, set()).add(piece)
                    piece.users.add(last)
                self._land(piece)
            if self._order.is_complete:
                self._fetch_ahead(wanted)
        self._step += 1

    def _fetch_ahead(self, wanted: set[Piece]) -> None:
        missing = {piece for piece in wanted if piece.fetched_for < self._step}
        seen: set[Piece] = set()
        while self._queue and len(seen) < len(missing):
            piece, step = self._queue.popleft()
            piece.fetched_for = step
            seen.add(piece)
        most = min(self._max_live - self._num_live, self._bucket)
        ahead: list[Piece] = []
        num_values = 0
        while self._queue and num_values < most:
            piece, step = self._queue.popleft()
            piece.fetched_for = max(piece.fetched_for, step)
            if not piece.is_whole and piece.flight is None and piece not in ahead:
                ahead.append(piece)
                num_values += piece.num_values
        self._gather(ahead)

    def _gather(self, pieces: list[Piece]) -> None:
        if not pieces:
            return
        self._num_live += sum(piece.num_values for piece in pieces)
        ordered = sorted(pieces, key=lambda piece: piece.number)
        with torch.cpu.stream(self._stream):
            Flight(ordered, ordered[0].parameter.device)

    def _land(self, piece: Piece) -> None:
        if piece.flight is not None:
            with torch.cpu.stream(self._stream):
                piece.flight.land()
            piece.flight = None

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

    def _find_released(self, own: set[Piece]) -> set[Piece]:
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

    def _release(self, piece: Piece) -> None:
        if piece.is_whole and not piece.users:
            piece.empty()
            self._num_live -= piece.num_values

    def _pieces_of(self, module: nn.Module) -> list[Piece]:
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
    """Passes a tensor on, and its gradient after a call."""

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
