"""Triton kernels between the grouped products of experts: gating, its backward, and the sum of each
token's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightfit.runtime.kernels.gating import CLAMP_LIMIT, CLAMP_SLOPE, Gating

_BLOCK = 1024
"""Columns that a program works on at a time."""
_CLAMP_LIMIT: tl.constexpr = tl.constexpr(CLAMP_LIMIT)
_CLAMP_SLOPE: tl.constexpr = tl.constexpr(CLAMP_SLOPE)


def _block(width: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(width)))


def apply_gate(inner: Tensor, bias: Tensor | None, experts: Tensor, gating: Gating) -> Tensor:
    """As `experts.apply_gate`."""
    width = inner.shape[1] // 2
    made = inner.new_empty(len(inner), width)
    block = _block(width)
    _gate_rows[(len(inner), triton.cdiv(width, block))](
        *(made, inner, bias, experts, width),
        gating=int(gating),
        has_bias=bias is not None,
        block=block,
    )
    return made


def gate_backward(
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    gating: Gating,
    *,
    needs_values: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `experts.gate_backward`."""
    inner, bias, narrow, weight, experts = saved
    width = narrow.shape[1]
    made = torch.empty_like(inner)
    grad_weight = torch.empty(len(inner), dtype=torch.float32, device=inner.device)
    values = torch.empty_like(narrow) if needs_values else None
    _gate_back[(len(inner),)](
        *(made, grad_weight, values, inner, bias, narrow, weight, experts, width),
        gating=int(gating),
        has_bias=bias is not None,
        needs_values=needs_values,
        block=_block(width),
    )
    return made, grad_weight, values


def combine(
    rows: Tensor, places: Tensor, chosen: Tensor, weights: Tensor | None, bias: Tensor | None
) -> Tensor:
    """As `experts.combine`."""
    num_tokens, num_choices = places.shape
    width = rows.shape[1]
    made = rows.new_empty(num_tokens, width)
    block = _block(width)
    _combine_rows[(num_tokens, triton.cdiv(width, block))](
        *(made, rows, places, chosen, weights, bias, width),
        num_choices=num_choices,
        has_weights=weights is not None,
        has_bias=bias is not None,
        block=block,
    )
    return made


@triton.jit
def _load_pair(
    inner, bias, row, expert, columns, width, gating: tl.constexpr, has_bias: tl.constexpr
):  # fmt: skip
    """Gate and up of some columns."""
    is_inside = columns < width
    if gating == 2:
        first, second = 2 * columns, 2 * columns + 1
    else:
        first, second = columns, columns + width
    start = row * 2 * width
    gate = tl.load(inner + start + first, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(inner + start + second, mask=is_inside, other=0.0).to(tl.float32)
    if has_bias:
        start = expert * 2 * width
        gate += tl.load(bias + start + first, mask=is_inside, other=0.0).to(tl.float32)
        up += tl.load(bias + start + second, mask=is_inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gate_rows(
    made, inner, bias, experts, width,
    gating: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    expert = tl.load(experts + row)
    gate, up = _load_pair(inner, bias, row, expert, columns, width, gating, has_bias)
    if gating == 0:
        value = gate * tl.sigmoid(gate) * up
    elif gating == 1:
        turn = _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        value = 0.5 * gate * (1.0 + turn) * up
    else:
        gate = tl.minimum(gate, _CLAMP_LIMIT)
        up = tl.minimum(tl.maximum(up, -_CLAMP_LIMIT), _CLAMP_LIMIT)
        value = (up + 1.0) * gate * tl.sigmoid(gate * _CLAMP_SLOPE)
    tl.store(made + row * width + columns, value, mask=columns < width)


@triton.jit
def _gate_back(
    made, grad_weight, values, inner, bias, narrow, weight, experts, width,
    gating: tl.constexpr, has_bias: tl.constexpr, needs_values: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + row)
    factor = tl.load(weight + row).to(tl.float32)
    total = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        is_inside = columns < width
        gate, up = _load_pair(inner, bias, row, expert, columns, width, gating, has_bias)
        gradient = tl.load(narrow + row * width + columns, mask=is_inside, other=0.0)
        gradient = gradient.to(tl.float32)
        if gating == 0:
            sigmoid = tl.sigmoid(gate)
            activated = gate * sigmoid
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
            value = activated * up
            grad_gate = slope * up
            grad_up = activated
        elif gating == 1:
            cube = 0.044715 * gate * gate * gate
            turn = _tanh(0.7978845608028654 * (gate + cube))
            activated = 0.5 * gate * (1.0 + turn)
            inside = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
            slope = 0.5 * (1.0 + turn) + 0.5 * gate * (1.0 - turn * turn) * inside
            value = activated * up
            grad_gate = slope * up
            grad_up = activated
        else:
            is_free = gate <= _CLAMP_LIMIT
            is_up_free = (up >= -_CLAMP_LIMIT) & (up <= _CLAMP_LIMIT)
            gate = tl.minimum(gate, _CLAMP_LIMIT)
            up = tl.minimum(tl.maximum(up, -_CLAMP_LIMIT), _CLAMP_LIMIT)
            sigmoid = tl.sigmoid(gate * _CLAMP_SLOPE)
            activated = gate * sigmoid
            slope = sigmoid * (1.0 + _CLAMP_SLOPE * gate * (1.0 - sigmoid))
            value = (up + 1.0) * activated
            grad_gate = tl.where(is_free, slope * (up + 1.0), 0.0)
            grad_up = tl.where(is_up_free, activated, 0.0)
        total += tl.where(is_inside, value * gradient, 0.0)
        gradient *= factor
        if gating == 2:
            first, second = 2 * columns, 2 * columns + 1
        else:
            first, second = columns, columns + width
        tl.store(made + row * 2 * width + first, grad_gate * gradient, mask=is_inside)
        tl.store(made + row * 2 * width + second, grad_up * gradient, mask=is_inside)
        if needs_values:
            tl.store(values + row * width + columns, value * factor, mask=is_inside)
    tl.store(grad_weight + row, tl.sum(total, axis=0))


@triton.jit
def _combine_rows(
    made, rows, places, chosen, weights, bias, width,
    num_choices: tl.constexpr, has_weights: tl.constexpr, has_bias: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < width
    total = tl.zeros((block,), dtype=tl.float32)
    for choice in tl.static_range(0, num_choices):
        pair = token * num_choices + choice
        place = tl.load(places + pair)
        value = tl.load(rows + place * width + columns, mask=is_inside, other=0.0).to(tl.float32)
        if has_bias:
            expert = tl.load(chosen + pair)
            value += tl.load(bias + expert * width + columns, mask=is_inside, other=0.0).to(
                tl.float32
            )
        if has_weights:
            value *= tl.load(weights + pair).to(tl.float32)
        total += value
    tl.store(made + token * width + columns, total, mask=is_inside)
