"""Attention over documents of varying length, laid end to end: bounds, and the kernel called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import EnvironmentFaultError

if TYPE_CHECKING:
    import torch

_BOUNDS_ATTRIBUTE = "_tightfit_bounds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where documents begin and end in a batch laid out as one row."""

    offsets: torch.Tensor
    """int32, one more than there are documents: 0, end of the first, ..., number of tokens."""
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenCall:
    """One attention over documents. Tensors are [tokens, heads, head_dim]."""

    bounds: Bounds
    scale: float | None
    window: int | None
    """Tokens a query sees, itself included. None: all before it."""
    softcap: float | None
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """A kernel and what it can do."""

    run: Callable[..., Any]
    is_flash_attn: bool
    """The flash-attn package's calling convention instead of torch's."""
    has_scale: bool
    has_window: bool
    has_grouped_heads: bool
    has_softcap: bool
    has_dropout: bool


def find_bounds(position_ids: torch.Tensor) -> Bounds:
    """Document bounds of `[rows, tokens]` positions, which restart where a document begins.

    A document never spans two rows. Positions need not start at zero: a document
    ends where the next position is not one more.
    """
    import torch

    num_rows, num_columns = position_ids.shape
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    offsets = starts.reshape(-1).nonzero().reshape(-1).to(torch.int32)
    end = offsets.new_tensor([num_rows * num_columns])
    offsets = torch.cat([offsets, end])
    return Bounds(offsets=offsets, longest=int(offsets.diff().max()))


def varlen_inputs(position_ids: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for the model's forward, so that no layer has to find the bounds.

    Made where the batch still lies in host memory, they cost the GPU no wait. The
    names are those of transformers' FlashAttentionKwargs, which the models hand down.
    """
    bounds = find_bounds(position_ids)
    return {
        "cu_seq_lens_q": bounds.offsets,
        "cu_seq_lens_k": bounds.offsets,
        "max_length_q": bounds.longest,
        "max_length_k": bounds.longest,
    }


def recall_bounds(position_ids: torch.Tensor, num_rows: int) -> Bounds:
    """`find_bounds`, once per batch: every layer is handed the same tensor of positions."""
    known: Bounds | None = getattr(position_ids, _BOUNDS_ATTRIBUTE, None)
    if known is None or known.offsets.device != position_ids.device:
        # transformers passes one row of positions where all rows have the same.
        known = find_bounds(position_ids.expand(num_rows, -1))
        setattr(position_ids, _BOUNDS_ATTRIBUTE, known)
    return known


@lru_cache(maxsize=1)
def find_kernel() -> VarlenKernel | None:
    """torch's own kernel where this torch has one, else the flash-attn package's, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return _find_flash_attn()
    known = inspect.signature(varlen_attn).parameters
    return VarlenKernel(
        run=varlen_attn,
        is_flash_attn=False,
        # torch 2.10 has `is_causal` alone; 2.11 a scale and a window; 2.12 grouped heads.
        has_scale="scale" in known,
        has_window="window_size" in known,
        has_grouped_heads="enable_gqa" in known,
        has_softcap=False,
        has_dropout=False,
    )


def _find_flash_attn() -> VarlenKernel | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return VarlenKernel(
        run=flash_attn_varlen_func,
        is_flash_attn=True,
        has_scale=True,
        has_window=True,
        has_grouped_heads=True,
        has_softcap="softcap" in inspect.signature(flash_attn_varlen_func).parameters,
        has_dropout=True,
    )


def require_kernel() -> VarlenKernel:
    kernel = find_kernel()
    if kernel is None:
        raise EnvironmentFaultError(
            "Attention over packed documents needs torch 2.10 or the flash-attn package.",
            remedy="pip install -U torch, or --set attention=sdpa",
        )
    return kernel


def attend(
    kernel: VarlenKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: VarlenCall,
) -> torch.Tensor:
    """Causal attention inside each document; grouped keys are repeated where a kernel must."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not kernel.has_grouped_heads:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    bounds = (call.bounds.offsets, call.bounds.offsets, call.bounds.longest, call.bounds.longest)
    run = _run_flash_attn if kernel.is_flash_attn else _run_torch
    return run(kernel, (query, key, value, *bounds), call)


def _run_torch(kernel: VarlenKernel, inputs: tuple[Any, ...], call: VarlenCall) -> torch.Tensor:
    options: dict[str, Any] = {}
    if kernel.has_scale:
        options["scale"] = call.scale
    elif call.scale is not None:
        # The kernel divides by the root of the width; what is asked for beyond goes in before.
        query = inputs[0] * (call.scale * inputs[0].shape[-1] ** 0.5)
        inputs = (query, *inputs[1:])
    if kernel.has_window:
        options["window_size"] = _window(call)
    else:
        options["is_causal"] = True
    if kernel.has_grouped_heads:
        options["enable_gqa"] = inputs[0].shape[1] != inputs[1].shape[1]
    output: torch.Tensor = kernel.run(*inputs, **options)
    return output


def _run_flash_attn(
    kernel: VarlenKernel, inputs: tuple[Any, ...], call: VarlenCall
) -> torch.Tensor:
    options: dict[str, Any] = {
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": _window(call),
        "dropout_p": call.dropout,
    }
    if call.softcap is not None:
        options["softcap"] = call.softcap
    output: torch.Tensor = kernel.run(*inputs, **options)
    return output


def _window(call: VarlenCall) -> tuple[int, int]:
    """(tokens back, tokens ahead), -1 for no limit; the query itself is not counted."""
    return (-1 if call.window is None else call.window - 1, 0)
