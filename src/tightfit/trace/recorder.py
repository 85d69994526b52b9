"""Recorder: a dispatch mode that records every allocation and operation of a run on fake
tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.trace.concrete_values import ConcreteValues
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.kernel_stubs import LAUNCH_LISTENERS
from tightfit.trace.operation_work import OperationCollector, OperationContext, describe_launch
from tightfit.trace.operations import RECOMPUTE, TRITON
from tightfit.trace.recording import (
    ACTIVATIONS,
    COMMUNICATION,
    LOGITS,
    TEMPORARY,
    WEIGHTS,
    Allocation,
    Recording,
    repeat_events,
)

_WRAPPERS = ("torch._compile", "torch._dynamo")
"""Modules of torch's that stand between an operation and a dispatch mode."""


def is_autograd_engine_call() -> bool:
    """Whether autograd's engine runs this operation itself, not a backward function in Python."""
    # Layers that are recomputed in the backward pass record gradients; the engine does not.
    if torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(3)  # beyond the dispatch method and its question
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


class ReferenceCounts(NamedTuple):
    """References that C++ holds to a tensor and to its storage; a view shares its base's."""

    tensor: int
    storage: int

    def __le__(self, other: object) -> bool:
        most = cast("ReferenceCounts", other)
        return self.tensor <= most.tensor and self.storage <= most.storage


def count_references(tensor: torch.Tensor) -> ReferenceCounts:
    """0 for the tensor where this torch does not tell."""
    counter: Any = getattr(tensor, "_use_count", None)
    of_storage: Any = torch._C._storage_Use_Count
    return ReferenceCounts(
        tensor=0 if counter is None else int(counter()),
        storage=int(of_storage(tensor.untyped_storage()._cdata)),
    )


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how often the engine's own gradient is referred to when another meets it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = ReferenceCounts(tensor=0, storage=0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.seen = count_references(args[0])
        return func(*args, **(kwargs or {}))


def count_engine_references() -> ReferenceCounts:
    """References to a gradient that only the engine holds, as seen from a dispatch mode."""
    value = torch.ones(2, requires_grad=True)
    summed = (value * 2 + value * 3).sum()
    with _Counter() as counter:
        summed.backward()  # type: ignore[no-untyped-call]
    seen: ReferenceCounts = counter.seen
    return seen


# Recorder: sees every tensor operation of a fake run, and notes what it allocates and frees.

_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default
MOST_REPEATED = 3
"""Like micro-batches in a row whose allocations are noted."""


@dataclass(slots=True)
class _OpenAllocation:
    """An allocation while it is recorded; what it served is known only at its end."""

    num_bytes: int
    op: str
    module: str
    stage: str
    step: int
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    category: str | None = None
    stream: int = 0
    end_stage: str | None = None
    """The stage it was freed in, if in the same step."""


class RecorderPosition(NamedTuple):
    """A moment of a recording."""

    event: int
    operation: tuple[int, int]


class Recorder(TorchDispatchMode):
    """Notes the beginning and end of every storage that operations make under it.

    Run it inside a `FakeTensorMode` of CPU tensors: sizes are those of the card, and what
    the card's kernels allocate beyond their results is added by `habits`. Whole numbers
    and masks are computed for real (`ConcreteValues`), because shapes depend on them.
    """

    def __init__(self, habits: GpuEmulation, *, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage = "load"
        self.step = 0
        self.layer: int | None = None
        self.module_names: list[str] = [""]
        self.purpose: str | None = None
        """The category of whatever is made now, where the caller knows it."""
        self.is_paused = False
        """Whether operations that run now are none of the job's."""
        self._habits = habits
        self._of_card = ExitStack()
        self._vocab_size = vocab_size
        self._shadows = ConcreteValues()
        self.notes = OperationCollector(vocab_size=vocab_size)
        """What the operations of the last step do."""
        self._drafts: list[_OpenAllocation] = []
        self._events: list[int] = []
        self._live: dict[int, int] = {}
        self._emptied: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        """Allocations that end when another does, which they repeat."""
        self._streams: list[Any] = [torch.cpu.current_stream()]
        self._is_open = True
        self._sole_owner = count_engine_references()
        self._sharded = _sharded_tensor()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap each call to keep its compiler away; nothing here is compiled."""
        return False

    def __enter__(self) -> Any:
        self._of_card.enter_context(self._habits.functions())
        LAUNCH_LISTENERS.append(self._hear)
        self._of_card.callback(LAUNCH_LISTENERS.remove, self._hear)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)  # type: ignore[no-untyped-call]
        self._of_card.close()

    # What the caller tells

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Tensors that stand in memory from now on, whoever made them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._begin(storage, "", tensor)
            if storage._cdata in self._live:  # an empty shard takes nothing
                draft = self._drafts[self._live[storage._cdata]]
                draft.category, draft.op = category, ""

    def mark(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """What tensors that were recorded before turned out to be."""
        for tensor in tensors:
            index = self._live.get(tensor.untyped_storage()._cdata)
            if index is not None and self._drafts[index].category in (None, COMMUNICATION):
                self._drafts[index].category = category

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def find_place(self) -> RecorderPosition:
        return RecorderPosition(len(self._events), self.notes.find_place())

    def repeat_step(self, since: RecorderPosition) -> bool:
        """Note the step that began there once more, as the one that follows it.

        False, and nothing noted, where it may not be the same: see `repeat_events`.
        """
        events = self._events[since.event :]
        again = repeat_events(events, first=len(self._drafts) + 1)
        if again is None:
            return False
        self.step += 1
        self._repeat(events, again)
        return True

    def repeat_micro_batch(self, since: RecorderPosition, times: int) -> bool:
        """Note the micro-batch that began there as often again. Its loss stays, one number until
        the step ends, and so do theirs. False as for steps, and nothing more can be noted then.

        Its operations are all noted, its allocations `MOST_REPEATED` times: one more like those
        before it finds the memory that they found.
        """
        events = self._events[since.event :]
        losses = {event for event in events if event > 0 and not self._drafts[event - 1].shape}
        standing = [event for event in losses if event - 1 in self._live.values()]
        for _ in range(min(times, MOST_REPEATED)):
            again = repeat_events(events, first=len(self._drafts) + 1, may_stay=losses)
            if again is None:
                return False
            for event in standing:
                follower = again[events.index(event)] - 1
                self._followers.setdefault(event - 1, []).append(follower)
            self._repeat(events, again)
        return self.notes.repeat(since.operation, times)

    def _repeat(self, events: list[int], again: list[int]) -> None:
        made = [self._drafts[event - 1] for event in events if event > 0]
        self._drafts.extend(replace(draft, step=self.step) for draft in made)
        self._events.extend(again)

    def stand_still(self) -> None:
        """Note the moment: what stands now is its stage's, even where the stage makes nothing."""
        index = self._add(0, "", (), "uint8")
        self._drafts[index].category = TEMPORARY
        self._give_back([index])

    def finish(self) -> Recording:
        """The recording; nothing is noted any more."""
        self._is_open = False
        return Recording(
            allocations=[self._settle(draft) for draft in self._drafts],
            events=self._events,
            operations=self.notes.finish(),
        )

    # What torch tells

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._sharded in types:
            return NotImplemented  # its shard comes by itself
        if func is _device_of and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # asked twice for every operation: not worth the long way
        if self.is_paused:
            return func(*args, **kwargs)
        if func is _aten.add.Tensor and self._is_accumulation(args, kwargs):
            # torch adds gradients that meet in place, but not those of tensor subclasses.
            func = _aten.add_.Tensor
        elif func is _aten.index_put.default and self._is_gradient_of_index(args):
            func = _aten._index_put_impl_.default
        scratch = self._habits.scratch_bytes(func, args, kwargs)
        is_first = bool(scratch) and self._habits.takes_scratch_first(func)
        taken = self._take(scratch, func) if is_first else []
        result = self._habits.as_made(func, self._shadows.run(func, args, kwargs))
        self.notes.note(self._moment(), (func, args, kwargs, result))
        if self.stage == "save" and func is _aten._to_copy.default:
            return result  # into host memory, on its way to the disk
        for leaf in self._habits.order_results(func, tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, func)
        self._stand(func, args)
        self._give_back(taken or self._take(scratch, func))
        return result

    def _hear(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A kernel of triton's, which torch does not see."""
        if not self.is_paused:
            self.notes.add(self._moment(), TRITON, describe_launch(args, kwargs))

    def _moment(self) -> OperationContext:
        # No module is called in a backward pass, unless it is computed again.
        is_again = self.stage == "backward" and len(self.module_names) > 1
        stage = RECOMPUTE if is_again else self.stage
        return OperationContext(self.step, stage, self.layer, self.module_names[-1])

    def _note(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._begin(storage, func, tensor)

    def _stand(self, func: Any, args: tuple[Any, ...]) -> None:
        """What the card's libraries take at a first call and keep, when the results are there."""
        thread = "autograd" if self.stage == "backward" else "main"
        for index in self._take(self._habits.standing_bytes(func, args, thread), func):
            self._drafts[index].layer = None  # whichever layer came first

    def _take(self, sizes: list[int], func: Any) -> list[int]:
        """Blocks that the card's kernel needs beside its results."""
        taken = [self._add(size, str(func), (size,), "uint8") for size in sizes]
        for index in taken:
            self._drafts[index].category = TEMPORARY
        return taken

    def _give_back(self, taken: list[int]) -> None:
        self._events.extend(-(index + 1) for index in taken)

    def _is_accumulation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is the engine adding a second gradient to one that nobody else holds."""
        if self.stage != "backward" or kwargs or not is_autograd_engine_call():
            return False
        first, second = args[0], args[1]
        return (
            isinstance(first, torch.Tensor)
            and isinstance(second, torch.Tensor)
            and first.shape == second.shape
            and first.dtype == second.dtype
            and count_references(first) <= self._sole_owner
        )

    def _is_gradient_of_index(self, args: tuple[Any, ...]) -> bool:
        """`index_backward` (TensorAdvancedIndexing.cpp) copies zeros for tensor subclasses only."""
        is_adding = len(args) > 3 and bool(args[3])
        return self.stage == "backward" and is_adding and is_autograd_engine_call()

    def _begin(self, storage: torch.UntypedStorage, op: Any, tensor: torch.Tensor) -> None:
        size = storage.nbytes()
        if not size:
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        index = self._add(size, str(op), tuple(tensor.shape), dtype)
        key = storage._cdata
        self._live[key] = index
        weakref.finalize(storage, self._end, key, index)

    def _add(self, size: int, op: str, shape: tuple[int, ...], dtype: str) -> int:
        index = len(self._drafts)
        self._drafts.append(
            _OpenAllocation(
                size,
                op,
                self.module_names[-1],
                self.stage,
                self.step,
                self.layer,
                shape,
                dtype,
                self.purpose,
                self._number_stream(),
            )
        )
        self._events.append(index + 1)
        return index

    def _number_stream(self) -> int:
        """FSDP2 names streams on a CPU too, where they do nothing."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    def _end(self, key: int, index: int) -> None:
        if self._live.get(key) != index:
            return  # resized away before
        del self._live[key]
        if not self._is_open:
            return
        for ended in (*reversed(self._followers.pop(index, [])), index):
            self._events.append(-(ended + 1))
            draft = self._drafts[ended]
            draft.end_stage = self.stage if draft.step == self.step else None

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees and remakes gathered parameters by resizing their storage."""
        key = storage._cdata
        index = self._live.get(key)
        if index is not None:
            self._end(key, index)
            self._emptied[key] = index
        size = storage.nbytes()
        if size and self._is_open:
            before = self._drafts[self._emptied[key]] if key in self._emptied else None
            shape, dtype = (before.shape, before.dtype) if before else ((size,), "uint8")
            new = self._add(size, "resize_", shape, dtype)
            self._live[key] = new
            weakref.finalize(storage, self._end, key, new)

    def _settle(self, draft: _OpenAllocation) -> Allocation:
        return Allocation(
            num_bytes=draft.num_bytes,
            op=draft.op,
            module=draft.module,
            stage=draft.stage,
            step=draft.step,
            layer=draft.layer,
            shape=draft.shape,
            dtype=draft.dtype,
            category=draft.category or self._judge(draft),
            stream=draft.stream,
        )

    def _judge(self, draft: _OpenAllocation) -> str:
        """What an allocation served, by where it began and ended."""
        if draft.stage == "load":
            return TEMPORARY if draft.end_stage == "load" else WEIGHTS
        if draft.shape and draft.shape[-1] == self._vocab_size and draft.stage != "update":
            return LOGITS
        if draft.stage == "forward" and draft.end_stage != "forward":
            return ACTIVATIONS
        return TEMPORARY


def _sharded_tensor() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


# Who is running: names of modules and numbers of layers for the recorder, forward and backward.


def track_modules(root: nn.Module, layers: Sequence[nn.Module], recorder: Recorder) -> None:
    """Tell `recorder` which module runs, and in which decoder layer.

    In the backward pass a layer begins when the gradient of its output is there.
    """
    number_of = {id(layer): number for number, layer in enumerate(layers)}
    for name, module in root.named_modules():
        _track_name(module, name, recorder)
    for layer in layers:
        _track_layer(layer, number_of[id(layer)], recorder)


def _track_name(module: nn.Module, name: str, recorder: Recorder) -> None:
    def enter(_module: nn.Module, _args: Any) -> None:
        recorder.module_names.append(name)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        recorder.module_names.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _track_layer(layer: nn.Module, number: int, recorder: Recorder) -> None:
    def enter(_module: nn.Module, _args: Any) -> None:
        recorder.layer = number

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        recorder.layer = None
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]

    def begin_backward(_gradient: torch.Tensor) -> None:
        recorder.layer = number

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)
