"""Activation checkpointing: recomputed layers keep their inputs only, on the device or in host
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tightfit.core.strategy import Strategy
from tightfit.models.families.registry import find_family
from tightfit.runtime.host_memory import PinnedBuffer
from tightfit.runtime.kernels.tiled_mlp import tile_mlps
from tightfit.runtime.layers import decoder_layers, find_decoder


def recompute_as_planned(model: nn.Module, strategy: Strategy) -> None:
    """The layers that the strategy recomputes, with its levers for long rows."""
    layers = decoder_layers(find_decoder(model))
    layers = layers[: strategy.count_recomputed(len(layers))]
    if strategy.mlp_tiles > 1:
        config: Any = model.config
        name = find_family(config.get_text_config().model_type).mlp_module
        tile_mlps(layers, name, num_tiles=strategy.mlp_tiles)
    recompute_layers(
        layers,
        num_offloaded=strategy.count_offloaded_inputs(len(layers)),
        num_tokens=strategy.tokens_per_micro_batch,
    )


def recompute_layers(
    layers: list[nn.Module], *, num_offloaded: int = 0, num_tokens: int = 0
) -> None:
    """Keep only these layers' inputs, and compute the rest again in the backward pass.

    Wraps `forward`, not `__call__`, so that FSDP gathers a layer once for recomputation and
    backward together. Non-reentrant, so that frozen embeddings need no gradient.

    The inputs of the first `num_offloaded` go to host memory: copied out while the layer runs, and
    back while the layer behind it runs backward. `num_tokens`: of the largest micro-batch.
    """
    if num_offloaded:
        inputs = LayerInputs(num_offloaded, HostCopies(num_tokens))
        for index, layer in enumerate(layers[: num_offloaded + 1]):
            layer.forward = partial(_run, layer.forward, inputs, index)
        layers = layers[num_offloaded + 1 :]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _run(
    forward: Callable[..., Any],
    inputs: LayerInputs,
    index: int,
    hidden: Tensor,
    *args: Any,
    **kw: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint` would hold the input itself: it is given a stand-in."""
    if not torch.is_grad_enabled():
        return forward(hidden, *args, **kw)
    live = [hidden]
    is_differentiable = hidden.requires_grad

    def run(_stand_in: Tensor, *args: Any, **kw: Any) -> Any:
        if live:  # the forward pass
            return forward(live.pop(), *args, **kw)
        # Operations save what they save because an input needs a gradient.
        return forward(inputs.load(index).requires_grad_(is_differentiable), *args, **kw)

    inputs.keep(index, hidden.detach())
    # On the input's device: the state of its random numbers is kept for dropout.
    stand_in = hidden.new_empty(0)
    del hidden
    return checkpoint(run, stand_in, *args, use_reentrant=False, **kw)


class LayerInputs:
    """The inputs of recomputed layers between the forward and the backward pass.

    Those of the first `num_offloaded` layers are in host memory, that of the next is not: its
    recomputation sends for the one before. At most one is on its way out and one on its way back,
    so that memory does not depend on how fast the bus is.
    """

    def __init__(self, num_offloaded: int, copies: HostCopies) -> None:
        self._num_offloaded = num_offloaded
        self._copies = copies
        self._pending: set[int] = set()
        """Layers whose backward pass is yet to come."""
        self._leaving: Tensor | None = None
        self._last: Tensor | None = None
        self._coming: dict[int, Tensor] = {}

    def keep(self, index: int, hidden: Tensor) -> None:
        """Start to copy out the input of a layer that is about to run."""
        if index in self._pending:
            raise RuntimeError("a second forward pass began before the first one's backward pass")
        self._pending.add(index)
        if self._leaving is not None:
            self._copies.wait()
            self._leaving = None
        if index == self._num_offloaded:
            self._last = hidden
            return
        self._copies.write(index, hidden)
        self._leaving = hidden

    def load(self, index: int) -> Tensor:
        """The input of a layer that is about to run again; the one before it is sent for."""
        self._pending.discard(index)
        if index == self._num_offloaded and self._last is not None:
            found, self._last = self._last, None
        else:
            coming = self._coming.pop(index, None)
            found = self._copies.read(index) if coming is None else coming
            self._copies.wait()
        if index - 1 in self._pending:
            self._coming[index - 1] = self._copies.read(index - 1)
        return found


class _Copy(NamedTuple):
    """A layer's input in host memory."""

    buffer: PinnedBuffer
    shape: torch.Size
    device: torch.device


class HostCopies:
    """Copies in host memory, one a layer, on a stream of their own where the device has streams.

    Buffers are allocated once, for the largest micro-batch: old and new ones side by side would
    be twice as much.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._copies: dict[int, _Copy] = {}
        self._stream: torch.cuda.Stream | None = None

    def write(self, index: int, hidden: Tensor) -> None:
        before = self._copies.pop(index, None)
        buffer = None if before is None else before.buffer
        if buffer is None or not buffer.holds(hidden):
            del before, buffer  # before the larger one is there
            buffer = PinnedBuffer(
                max(hidden.numel(), self._num_tokens * hidden.shape[-1]),
                hidden.dtype,
                hidden.device,
            )
        self._copies[index] = _Copy(buffer, hidden.shape, hidden.device)
        self._copy(buffer.view(hidden.shape), hidden)

    def read(self, index: int) -> Tensor:
        """On the device; `wait` before it is used."""
        buffer, shape, device = self._copies[index]
        # Of the current stream's memory, which may be in use until the stream gets here.
        hidden = torch.empty(shape, dtype=buffer.dtype, device=device)
        self._copy(hidden, buffer.view(shape))
        return hidden

    def wait(self) -> None:
        """The current stream goes on when all copies are done."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _copy(self, there: Tensor, here: Tensor) -> None:
        device = there.device if there.is_cuda else here.device
        if device.type != "cuda":
            there.copy_(here)
            return
        if self._stream is None:
            make: Any = torch.cuda.Stream  # not annotated
            self._stream = make(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            there.copy_(here, non_blocking=True)
