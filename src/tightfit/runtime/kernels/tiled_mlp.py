"""MLPs that run on a tile of the tokens at a time, in both passes.

The forward pass keeps the MLP's input alone; the backward pass runs each tile again, with its
gradients, before the next. Inside a recomputed layer that is no more work: the layer's
recomputation stops at the MLP's input (`_KeepInput`), and the tiles do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

CURRENT_TILE: list[slice] = []
"""The tokens of the tile that runs, counted over the whole micro-batch; empty outside of tiles."""


def tile_mlps(layers: list[nn.Module], name: str, *, num_tiles: int) -> int:
    """Run the layers' modules of this name in tiles; returns how many there are."""
    modules = [getattr(layer, name) for layer in layers if hasattr(layer, name)]
    for module in modules:
        module.forward = partial(_run_in_tiles, module.forward, module, num_tiles)
    return len(modules)


def _run_in_tiles(
    forward: Callable[..., Any], module: nn.Module, num_tiles: int, hidden: Tensor
) -> Any:
    trained = [one for one in module.parameters() if one.requires_grad]
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return _run_forward(forward, hidden, num_tiles)
    keep: Any = _KeepInput
    tiles: Any = _Tiles
    # A tensor that needs a gradient, so that the input is kept even if it needs none.
    anchor = torch.empty(0, device=hidden.device, requires_grad=True)
    kept: Tensor = keep.apply(anchor, hidden)
    return tiles.apply(hidden, [kept], forward, num_tiles, *trained)


def _run_forward(forward: Callable[..., Any], hidden: Tensor, num_tiles: int) -> Any:
    whole: Tensor | None = None
    num_outputs = 0
    for tokens in _split(hidden, num_tiles):
        with _tile(tokens):
            output = forward(_rows(hidden)[:, tokens])
        if isinstance(output, tuple):
            output, num_outputs = output[0], len(output)
        if whole is None:
            whole = output.new_empty(hidden.shape)
        _rows(whole)[:, tokens] = output.reshape(1, -1, output.shape[-1])
    # Of several outputs, as routers return them, layers use the first alone.
    return (whole, *[None] * (num_outputs - 1)) if num_outputs else whole


class _KeepInput(torch.autograd.Function):
    """Saves the input before the MLP runs: a layer's recomputation ends with the last tensor that
    its forward pass saved, and so need not run the MLP."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return anchor.new_empty(0)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> tuple[None, None]:
        return None, None


class _Tiles(torch.autograd.Function):
    """The MLP's output; gradients of its input and of its trained weights, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        kept: list[Tensor],
        forward: Callable[..., Any],
        num_tiles: int,
        *trained: Tensor,
    ) -> Any:
        device = hidden.device.type
        ctx.kept, ctx.call, ctx.num_tiles, ctx.trained = kept, forward, num_tiles, trained
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.random = _save_random_state(hidden.device)
        return _run_forward(forward, hidden, num_tiles)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # The node lives as long as its result.
        node: Any = ctx.kept[0].grad_fn
        (hidden,) = node.saved_tensors
        ctx.kept.clear()
        del node
        enabled, dtype = ctx.autocast
        device = hidden.device
        gradient = _rows(gradients[0])
        of_hidden = hidden.new_empty(hidden.shape)
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        with (
            _random_state(ctx.random, device),
            torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
        ):
            for tokens in _split(hidden, ctx.num_tiles):
                part = _rows(hidden)[:, tokens].detach().requires_grad_()
                with torch.enable_grad(), _tile(tokens):
                    output = ctx.call(part)
                output = output[0] if isinstance(output, tuple) else output
                found = torch.autograd.grad(
                    output,
                    (part, *ctx.trained),
                    gradient[:, tokens].reshape(output.shape),
                    allow_unused=True,
                )
                del output
                _rows(of_hidden)[:, tokens] = found[0]
                sums = [_add(total, one) for total, one in zip(sums, found[1:], strict=True)]
        of_trained = [
            None if total is None else total.to(one.dtype)
            for total, one in zip(sums, ctx.trained, strict=True)
        ]
        return of_hidden, None, None, None, *of_trained


def _add(total: Tensor | None, found: Tensor | None) -> Tensor | None:
    """In fp32: a sum of 16-bit tiles would be rounded once a tile."""
    if found is None:
        return total
    return found.float() if total is None else total.add_(found)


def _rows(values: Tensor) -> Tensor:
    """All tokens in one row: a view, of augmented ones (`fused_lora.py`) too."""
    return values.view(1, -1, values.shape[-1]) if values.dim() == 3 else values[None]


def _split(hidden: Tensor, num_tiles: int) -> list[slice]:
    num_tokens = _rows(hidden).shape[1]
    size = -(-num_tokens // num_tiles)
    return [slice(at, min(at + size, num_tokens)) for at in range(0, num_tokens, size)]


@contextmanager
def _tile(tokens: slice) -> Iterator[None]:
    CURRENT_TILE.append(tokens)
    try:
        yield
    finally:
        CURRENT_TILE.pop()


def _save_random_state(device: torch.device) -> tuple[Tensor, ...]:
    """For dropout inside the MLP, which each tile draws again."""
    own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *own


@contextmanager
def _random_state(saved: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(saved[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(saved[1], device)
        yield
