"""Windows as blocks of a causal kernel: outputs and gradients of a masked square."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tightfit.core.errors import UsageError
from tightfit.runtime import window_attention
from tightfit.runtime.window_attention import attend_in_blocks

_aten = torch.ops.aten


def _run_forward(query: Any, key: Any, value: Any, scale: float) -> Any:
    """The CPU's causal kernel, which has no grouped keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=scale
    )
    return window_attention._Forward(output, sums, ())


def _run_backward(gradient: Any, inputs: Any, found: Any, scale: float) -> Any:
    query, key, value = inputs
    groups = query.shape[1] // key.shape[1]
    repeated = [x.repeat_interleave(groups, dim=1) for x in (key, value)]
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, *repeated, found.output, found.sums, 0.0, True, scale=scale
    )
    return gradients[0], *(x.unflatten(1, (-1, groups)).sum(2) for x in gradients[1:])


@pytest.mark.parametrize(("num_tokens", "window"), [(64, 16), (60, 16), (16, 15), (48, 24)])
def test_blocks_are_a_masked_square(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, window: int
) -> None:
    monkeypatch.setattr(window_attention, "_run_forward", _run_forward)
    monkeypatch.setattr(window_attention, "_run_backward", _run_backward)
    torch.manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(2, num_tokens, heads, 8, dtype=torch.float64)
        return x.transpose(1, 2).requires_grad_()

    inputs = draw(4), draw(2), draw(2)
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    expected = functional.scaled_dot_product_attention(
        *inputs, attn_mask=(distance >= 0) & (distance < window), scale=0.3, enable_gqa=True
    )
    output = attend_in_blocks(*inputs, window=window, scale=0.3)
    torch.testing.assert_close(output, expected)
    gradient = torch.randn_like(expected)
    for ours, theirs in zip(
        *(torch.autograd.grad(x, inputs, gradient) for x in (output, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_what_the_kernels_would_ignore_is_refused() -> None:
    x = torch.randn(1, 2, 8, 8)
    for asked in ({"softcap": 30.0}, {"s_aux": x}, {"dropout": 0.1}, {"is_causal": False}):
        with pytest.raises(UsageError, match="Flash attention cannot do"):
            window_attention.window_attention(torch.nn.Module(), x, x, x, None, **asked)
