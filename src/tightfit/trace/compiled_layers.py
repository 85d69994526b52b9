"""Compiled layers in a trace: torch's own partitioner decides what a layer keeps for its backward
pass, and what lies between two kernels allocates nothing.

AOTAutograd captures each kind of layer once, on the fake tensors that it is called with, through
inductor's decompositions, passes over the joint graph, and partitioner. No code is generated: the
two graphs run node by node. Kernels of libraries (products, attention, grouped products) run as in
any trace. Inductor fuses all others: a result is allocated where a library's kernel or the graph's
caller reads it, and lies in registers elsewhere.

Not followed: the order in which inductor schedules its kernels, and values that it writes out
because too much would be computed again. Graphs that Dynamo would cut in two are captured as one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from tightfit.trace.operation_work import Work
from tightfit.trace.recorder import Recorder
from tightfit.trace.result import MEMORY_BOUND


class CannotCompile(Exception):  # noqa: N818  an outcome, not an error: the closed form remains
    """A layer is not one graph."""


def import_compiler() -> None:
    """Call before triton's stub is there: inductor has its own for a machine without triton."""
    import torch._functorch.aot_autograd
    import torch._inductor.decomposition
    import torch._inductor.fx_passes.joint_graph  # noqa: F401


class CompiledLayers:
    """Stands for `torch.compile` in a trace; keeps the graphs of each kind of layer."""

    def __init__(self) -> None:
        self._known: dict[object, Callable[..., Any]] = {}
        self._is_capturing = False

    def compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's unbound `forward`, compiled where a recorder is active."""

        def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_decoding = kwargs.get("past_key_values") is not None  # by another, plain process
            if is_decoding or _find_recorder() is None:
                return forward(layer, *args, **kwargs)
            return self._run(forward, layer, args, kwargs)

        return run

    def _run(
        self,
        forward: Callable[..., Any],
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        tensors = [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        settings = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        call = tuple(map(_describe, (*state.values(), *leaves)))
        key = (_describe_layer(layer), call, str(spec), settings)
        if key not in self._known:
            flat = _flatten(forward, layer, list(state), leaves, spec)
            self._known[key] = self._capture(flat, tensors, num_state=len(state))
        return self._known[key](*tensors)

    def _capture(
        self, flat: Callable[..., Any], tensors: list[Tensor], *, num_state: int
    ) -> Callable[..., Any]:
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.decomposition import select_decomp_table

        made: Callable[..., Any] = aot_function(
            flat,
            fw_compiler=self._interpret,
            bw_compiler=self._interpret,
            partition_fn=_partition,
            decompositions=select_decomp_table(),
            num_params_buffers=num_state,
        )
        self._is_capturing = True
        try:
            with _disable_current_modes(), _compiling():
                made(*tensors)
        except _CapturedError:
            return made
        finally:
            self._is_capturing = False
        raise AssertionError("the first call ends where the graph would run")

    def _interpret(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        del example_inputs  # the nodes know their shapes
        program = _Program(gm)

        def run(values: list[Any]) -> Any:
            if self._is_capturing:
                raise _CapturedError
            recorder = _find_recorder()
            assert recorder is not None, "a trace runs inside its recorder"
            return program.run(values, recorder)

        run._boxed_call = True  # type: ignore[attr-defined]  # it frees the values as it goes
        return run


def _partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """As inductor's own: passes over the joint graph, then the cut that keeps least."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(detect_fake_mode(inputs)):
        made: Any = joint_graph_passes(joint)
    return min_cut_rematerialization_partition(made, inputs, compiler="inductor", **options)


class _CapturedError(Exception):
    """The graphs are there, and nothing has run."""


def _find_recorder() -> Recorder | None:
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, Recorder)), None)


@contextmanager
def _compiling() -> Iterator[None]:
    """Code sees that it is compiled, and may not step out of the graph."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotCompile

    with (
        patch.object(torch.compiler, "is_compiling", lambda: True),
        patch.object(torch.compiler, "disable", refuse),
    ):
        yield


def _flatten(
    forward: Callable[..., Any], layer: nn.Module, names: list[str], leaves: list[Any], spec: Any
) -> Callable[..., Any]:
    """The layer's forward as a function of its parameters, its buffers and the tensors among its
    arguments."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def flat(*values: Tensor) -> Any:
        state = dict(zip(names, values, strict=False))
        given = list(others)
        for place, value in zip(places, values[len(names) :], strict=True):
            given[place] = value
        args, kwargs = _pytree.tree_unflatten(given, spec)
        with _reparametrize_module(layer, state):
            return forward(layer, *args, **kwargs)

    return flat


# What makes two layers of one kind

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_OWN_NUMBER = "layer_idx"


def _describe_layer(layer: nn.Module) -> object:
    """What its code can depend on, apart from its number."""
    return tuple(
        (
            name,
            type(part),
            tuple(
                (key, value)
                for key, value in vars(part).items()
                if isinstance(value, _PLAIN) and key != _OWN_NUMBER
            ),
        )
        for name, part in layer.named_modules()
    )


def _describe(value: Any) -> object:
    """Of an argument: the shape of a tensor, the contents of anything else."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, _PLAIN):
        return value
    parts = getattr(value, "__dict__", {})
    return type(value), tuple((name, _describe(part)) for name, part in parts.items())


# One graph, run node by node

_VIEW, _FUSED, _KERNEL = "view", "fused", "kernel"
_ALIASES = frozenset({"_unsafe_view", "view_of"})
"""Views whose schema does not say so."""
_LOOPS = frozenset(
    {
        *("_to_copy", "arange", "bucketize", "cat", "clone", "constant_pad_nd", "copy", "cumsum"),
        *("convert_element_type", "embedding", "empty", "empty_like", "flip", "full", "full_like"),
        *("gather", "index", "inductor_lookup_seed", "inductor_random", "inductor_seed"),
        *("inductor_seeds", "iota", "lift_fresh_copy", "new_empty", "new_full", "new_zeros"),
        *("ones", "ones_like", "repeat", "roll", "scalar_tensor", "select_scatter"),
        *("slice_scatter", "where", "zeros", "zeros_like"),
    }
)
"""Inductor makes loops of them, beside all that torch marks as pointwise and the reductions."""
_REDUCTIONS = frozenset(
    {
        *("all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min"),
        *("prod", "sum", "var", "var_mean"),
    }
)
LOOPED_VALUE_SHARE = 0.45
"""Time of a value that a fused loop computes and sums, of a separately addressed value's in memory.
Fit to Nemotron 3 Nano in h200_families.json: its scan broadcasts to 1.5e12 values a step."""


@lru_cache(maxsize=4096)
def _kind_of(target: Any) -> str:
    if target is operator.getitem:
        return _VIEW
    if not isinstance(target, torch._ops.OpOverload):
        return _KERNEL
    aliases = [returned.alias_info for returned in target._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    if is_view or _short_name(target) in _ALIASES:
        return _VIEW
    is_loop = torch.Tag.pointwise in target.tags or _short_name(target) in _LOOPS
    return _FUSED if is_loop or _is_reduction(target) else _KERNEL


def _is_reduction(target: Any) -> bool:
    return _short_name(target) in _REDUCTIONS


def _short_name(target: Any) -> str:
    return str(target.name()).partition("::")[2].partition(".")[0]


class _Program:
    """A graph that runs on fake tensors and allocates what its compiled code would."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._module = graph
        self._nodes: Sequence[fx.Node] = list(graph.graph.nodes)
        self._kinds = {
            node: _kind_of(node.target) for node in self._nodes if node.op == "call_function"
        }
        self._stored = self._find_stored()
        self._sources: dict[fx.Node, dict[fx.Node, None]] = {}
        """The values in memory that a value lies in, or is computed from."""
        self._ends: dict[fx.Node, list[fx.Node]] = {}
        """The values in memory that a node is the last to read."""
        self._find_lives()
        self._last_reads = self._find_last_reads()
        self._work = self._group_kernels()
        """Of each fused kernel, by the last node that it stores."""

    def _find_stored(self) -> set[fx.Node]:
        """Results of fused operations that are written to memory."""
        stored = {
            node
            for node, kind in self._kinds.items()
            if kind == _FUSED and _is_reduction(node.target)
        }
        for node in self._nodes:
            if node.op == "output" or self._kinds.get(node) == _KERNEL:
                for read in node.all_input_nodes:
                    base = read
                    while self._kinds.get(base) == _VIEW:
                        base = base.all_input_nodes[0]
                    if self._kinds.get(base) == _FUSED:
                        stored.add(base)
        return stored

    def _find_lives(self) -> None:
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            read = self._read_by([node])
            last |= dict.fromkeys(read, node)
            is_given = node.op == "placeholder"
            is_held = is_given or self._kinds.get(node) == _KERNEL or node in self._stored
            self._sources[node] = {node: None} if is_held else read
            if is_held:
                last[node] = node
        for node, end in last.items():
            self._ends.setdefault(end, []).append(node)

    def _read_by(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
        """The values in memory that these nodes read."""
        inputs = [one for node in nodes for one in node.all_input_nodes]
        return {source: None for one in inputs for source in self._sources[one]}

    def _find_last_reads(self) -> dict[fx.Node, list[fx.Node]]:
        """The values that a node is the last to take as an argument."""
        last = {read: node for node in self._nodes for read in (node, *node.all_input_nodes)}
        found: dict[fx.Node, list[fx.Node]] = {}
        for read, node in last.items():
            found.setdefault(node, []).append(read)
        return found

    def _group_kernels(self) -> dict[fx.Node, Work]:
        """Fused operations between two of the libraries' kernels count as one kernel."""
        found: dict[fx.Node, Work] = {}
        group: list[fx.Node] = []
        num_looped = 0
        for node in self._nodes:
            kind = self._kinds.get(node)
            if kind == _FUSED and _is_reduction(node.target):
                num_looped += sum(x.numel() for x in _list_values(node.all_input_nodes[0]))
            if node in self._stored:
                group.append(node)
            elif group and (kind == _KERNEL or node.op == "output"):
                found[group[-1]] = self._describe_kernel(group, num_looped)
                group, num_looped = [], 0
        return found

    def _describe_kernel(self, stored: list[fx.Node], num_looped: int) -> Work:
        """Reads and writes each value in memory once."""
        values = [
            x
            for node in (self._read_by(stored) | dict.fromkeys(stored))
            for x in _list_values(node)
        ]
        num_bytes = sum(x.numel() * x.element_size() for x in values)
        is_looping = num_looped > num_bytes
        indexed = LOOPED_VALUE_SHARE * num_looped if is_looping else 0.0
        return Work(MEMORY_BOUND, num_bytes=float(num_bytes), num_indexed=indexed)

    def run(self, values: list[Any], recorder: Recorder) -> Any:
        """The graph's results; `values`, its arguments, are taken out of the list."""
        made: dict[fx.Node, Any] = {}
        """Until the last node that takes it has run: it computes, but may not be a kernel yet."""
        held: dict[fx.Node, Any] = {}
        """What is in memory, until the last kernel that reads it."""
        values.reverse()
        for node in self._nodes:
            if node.op == "placeholder":
                made[node] = held[node] = values.pop()
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], made.__getitem__)
            elif node.op == "get_attr":
                made[node] = getattr(self._module, str(node.target))
            else:
                self._call(node, made, held, recorder)
            for one in self._last_reads.get(node, ()):
                made.pop(one, None)
            for one in self._ends.get(node, ()):
                held.pop(one, None)
        raise AssertionError("a graph ends with its output")

    def _call(
        self, node: fx.Node, made: dict[fx.Node, Any], held: dict[fx.Node, Any], recorder: Recorder
    ) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
        func: Any = node.target
        if self._kinds[node] == _KERNEL:
            made[node] = held[node] = func(*args, **kwargs)
            return
        with recorder.setting("is_paused", True):
            made[node] = func(*args, **kwargs)
        del args, kwargs
        if node not in self._stored:
            return
        held[node] = made[node]
        self._free_overwritten(node, made, held)
        recorder.adopt(_pytree.tree_leaves(made[node]), f"compiled {func.name()}")
        if node in self._work:
            recorder.launched(self._work[node])

    def _free_overwritten(
        self, node: fx.Node, made: dict[fx.Node, Any], held: dict[fx.Node, Any]
    ) -> None:
        """A kernel writes its result over an operand of that size which nothing reads after it."""
        size = _storage_bytes(made[node])
        for one in self._ends.get(node, ()):
            if one is not node and _storage_bytes(held[one]) == size:
                del held[one]
                for read in self._last_reads.get(node, ()):
                    if read is not node:
                        made.pop(read, None)
                return


def _list_values(node: fx.Node) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor)]


def _storage_bytes(result: Any) -> int:
    tensors = [x for x in _pytree.tree_leaves(result) if isinstance(x, Tensor)]
    return sum(int(x.untyped_storage().nbytes()) for x in tensors)
