"""Recorder: a dispatch mode that records every allocation and operation of a run on fake
tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.trace.concrete_values import ConcreteValues
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.kernel_stubs import LAUNCH_LISTENERS
from tightfit.trace.operation_work import (
    OperationCollector,
    OperationContext,
    Work,
    describe_launch,
)
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
from tightfit.trace.result import RECOMPUTE, TRITON

_WRAPPERS = ("torch._compile", "torch._dynamo")
"""torch modules on the call stack between an operation and a dispatch mode."""


def is_autograd_engine_call() -> bool:
    """Whether autograd's engine issued this operation, not a backward function in Python."""
    # Recomputed layers run with gradients enabled; the engine does not.
    if torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(3)  # skips this function, its caller and the dispatch method
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


class ReferenceCounts(NamedTuple):
    """References that C++ holds to a tensor and to its storage, which a view shares."""

    tensor: int
    storage: int

    def __le__(self, other: object) -> bool:
        most = cast("ReferenceCounts", other)
        return self.tensor <= most.tensor and self.storage <= most.storage


def count_references(tensor: torch.Tensor) -> ReferenceCounts:
    """The tensor's count is 0 where this torch version does not expose it."""
    counter: Any = getattr(tensor, "_use_count", None)
    of_storage: Any = torch._C._storage_Use_Count
    return ReferenceCounts(
        tensor=0 if counter is None else int(counter()),
        storage=int(of_storage(tensor.untyped_storage()._cdata)),
    )


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts references to the engine's own gradient when a second one is added to it."""

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


_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default
MOST_REPEATED = 3
"""Identical micro-batches in a row whose allocations are recorded."""


class RecorderPosition(NamedTuple):
    """A position in a recording."""

    event: int
    operation: tuple[int, int]


class Recorder(TorchDispatchMode):
    """Records when every storage is allocated and freed.

    Run it inside a `FakeTensorMode` with CPU tensors. Sizes are those of the GPU; workspace that
    the GPU's kernels allocate beside their results comes from `emulation`. Integers and masks are
    computed for real (`ConcreteValues`), because shapes depend on them.
    """

    def __init__(self, emulation: GpuEmulation, *, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage = "load"
        self.step = 0
        self.layer: int | None = None
        self.module_names: list[str] = [""]
        self.purpose: str | None = None
        """The category of new allocations, where the caller knows it."""
        self.is_paused = False
        """Set while operations run that are not part of the job."""
        self._emulation = emulation
        self._patches = ExitStack()
        self._vocab_size = vocab_size
        self._shadows = ConcreteValues()
        self.notes = OperationCollector(vocab_size=vocab_size)
        """The operations of the last step."""
        self._drafts: list[Allocation] = []
        """Their category is often known only at their end: empty until then."""
        self._ends: dict[int, str] = {}
        """Stages in which allocations were freed, if in the step that made them."""
        self._events: list[int] = []
        self._live: dict[int, int] = {}
        self._emptied: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        """Allocations of repeated micro-batches, which end with the original."""
        self._streams: list[Any] = [torch.cpu.current_stream()]
        self._is_open = True
        self._sole_owner = count_engine_references()
        self._sharded = _sharded_tensor()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoids a wrapper around each call that keeps torch.compile away; nothing is compiled."""
        return False

    def __enter__(self) -> Any:
        self._patches.enter_context(self._emulation.use_functions())
        LAUNCH_LISTENERS.append(self._record_launch)
        self._patches.callback(LAUNCH_LISTENERS.remove, self._record_launch)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._patches.close()

    # Called by the job

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Record tensors that exist already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._begin(storage, "", tensor)
            if storage._cdata in self._live:  # an empty shard has no memory
                self._change(self._live[storage._cdata], category=category, op="")

    def mark(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of tensors that were recorded without one."""
        for tensor in tensors:
            index = self._live.get(tensor.untyped_storage()._cdata)
            if index is not None and self._drafts[index].category in ("", COMMUNICATION):
                self._change(index, category=category)

    def adopt(self, tensors: Iterable[torch.Tensor], op: str) -> None:
        """Record tensors that an operation made while the recorder was paused."""
        for tensor in tensors:
            self._note(tensor, op)

    def launched(self, work: Work) -> None:
        """Record a triton kernel."""
        self.notes.add(self._moment(), TRITON, work)

    def _change(self, index: int, **fields: Any) -> None:
        self._drafts[index] = replace(self._drafts[index], **fields)

    @contextmanager
    def setting(self, name: str, value: Any) -> Iterator[None]:
        """Set an attribute inside the block."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def position(self) -> RecorderPosition:
        return RecorderPosition(len(self._events), self.notes.position())

    def repeat_step(self, since: RecorderPosition) -> bool:
        """Record the step that began at `since` once more, as the next step.

        Returns False and records nothing where the next step may differ: see `repeat_events`.
        """
        events = self._events[since.event :]
        again = repeat_events(events, first=len(self._drafts) + 1)
        if again is None:
            return False
        self.step += 1
        self._repeat(events, again)
        return True

    def repeat_micro_batch(self, since: RecorderPosition, times: int) -> bool:
        """Record the micro-batch that began at `since` `times` more. Each loss, a scalar, lives
        until the step ends. Returns False as for steps; nothing more can be recorded then.

        All its operations are recorded, its allocations at most `MOST_REPEATED` times: further
        identical micro-batches reuse the same memory.
        """
        events = self._events[since.event :]
        losses = {event for event in events if event > 0 and not self._drafts[event - 1].shape}
        kept = [event for event in losses if event - 1 in self._live.values()]
        for _ in range(min(times, MOST_REPEATED)):
            again = repeat_events(events, first=len(self._drafts) + 1, may_stay=losses)
            if again is None:
                return False
            for event in kept:
                follower = again[events.index(event)] - 1
                self._followers.setdefault(event - 1, []).append(follower)
            self._repeat(events, again)
        return self.notes.repeat(since.operation, times)

    def _repeat(self, events: list[int], again: list[int]) -> None:
        for event in events:
            if event > 0:
                if event - 1 in self._ends:
                    self._ends[len(self._drafts)] = self._ends[event - 1]
                self._drafts.append(replace(self._drafts[event - 1], step=self.step))
        self._events.extend(again)

    def mark_stage(self) -> None:
        """Record an empty allocation, so that the stage has a peak even if it allocates nothing."""
        self._free([self._add(0, "", (), "uint8", category=TEMPORARY)])

    def finish(self) -> Recording:
        """Return the recording and stop."""
        self._is_open = False
        return Recording(
            allocations=[
                draft if draft.category else replace(draft, category=self._judge(index, draft))
                for index, draft in enumerate(self._drafts)
            ],
            events=self._events,
            operations=self.notes.finish(),
        )

    # Called by torch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._sharded in types:
            return NotImplemented  # its local shard is dispatched separately
        if func is _device_of and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # a fast path: asked twice for every operation
        if self.is_paused:
            return func(*args, **kwargs)
        if func is _aten.add.Tensor and self._is_accumulation(args, kwargs):
            # torch accumulates gradients in place, except those of subclasses such as fake tensors.
            func = _aten.add_.Tensor
        elif func is _aten.index_put.default and self._is_gradient_of_index(args):
            func = _aten._index_put_impl_.default
        scratch = self._emulation.workspace_blocks(func, args, kwargs)
        is_before = bool(scratch) and self._emulation.allocates_workspace_first(func)
        workspace = self._allocate_workspace(scratch, func) if is_before else []
        result = self._emulation.cast_results(func, self._shadows.run(func, args, kwargs))
        self.notes.note(self._moment(), (func, args, kwargs, result))
        if self.stage == "save" and func is _aten._to_copy.default:
            return result  # copied to host memory to be written to disk
        for leaf in self._emulation.order_results(func, tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, func)
        self._record_persistent_workspace(func, args)
        self._free(workspace or self._allocate_workspace(scratch, func))
        return result

    def _record_launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A triton kernel, which is not dispatched by torch."""
        if not self.is_paused:
            self.launched(describe_launch(args, kwargs))

    def _moment(self) -> OperationContext:
        # In a backward pass modules are called only where a layer is recomputed.
        is_recomputed = self.stage == "backward" and len(self.module_names) > 1
        stage = RECOMPUTE if is_recomputed else self.stage
        return OperationContext(self.step, stage, self.layer, self.module_names[-1])

    def _note(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._begin(storage, func, tensor)

    def _record_persistent_workspace(self, func: Any, args: tuple[Any, ...]) -> None:
        """Workspaces that CUDA libraries allocate at a first call and keep."""
        thread = "autograd" if self.stage == "backward" else "main"
        for index in self._allocate_workspace(
            self._emulation.persistent_blocks(func, args, thread), func
        ):
            self._change(index, layer=None)

    def _allocate_workspace(self, sizes: list[int], func: Any) -> list[int]:
        """Blocks that the kernel needs beside its results."""
        return [self._add(size, str(func), (size,), "uint8", category=TEMPORARY) for size in sizes]

    def _free(self, workspace: list[int]) -> None:
        self._events.extend(-(index + 1) for index in workspace)

    def _is_accumulation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the engine adds a gradient to one that only it references."""
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

    def _add(
        self, size: int, op: str, shape: tuple[int, ...], dtype: str, *, category: str = ""
    ) -> int:
        index = len(self._drafts)
        self._drafts.append(
            Allocation(
                num_bytes=size,
                op=op,
                module=self.module_names[-1],
                stage=self.stage,
                step=self.step,
                layer=self.layer,
                shape=shape,
                dtype=dtype,
                category=category or self.purpose or "",
                stream=self._number_stream(),
            )
        )
        self._events.append(index + 1)
        return index

    def _number_stream(self) -> int:
        """FSDP2 uses streams on a CPU too, where they have no effect."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    def _end(self, key: int, index: int) -> None:
        if self._live.get(key) != index:
            return  # freed by a resize before
        del self._live[key]
        if not self._is_open:
            return
        for ended in (*reversed(self._followers.pop(index, [])), index):
            self._events.append(-(ended + 1))
            if self._drafts[ended].step == self.step:
                self._ends[ended] = self.stage
            else:
                self._ends.pop(ended, None)

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

    def _judge(self, index: int, draft: Allocation) -> str:
        """The category of an allocation, by where it began and ended."""
        end_stage = self._ends.get(index)
        if draft.stage == "load":
            return TEMPORARY if end_stage == "load" else WEIGHTS
        if draft.shape and draft.shape[-1] == self._vocab_size and draft.stage != "update":
            return LOGITS
        if draft.stage == "forward" and end_stage != "forward":
            return ACTIVATIONS
        return TEMPORARY


def _sharded_tensor() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


def track_modules(root: nn.Module, layers: Sequence[nn.Module], recorder: Recorder) -> None:
    """Install hooks that set the recorder's current module and decoder layer.

    In the backward pass a layer begins when the gradient of its output arrives.
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
