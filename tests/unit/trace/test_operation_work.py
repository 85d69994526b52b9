"""The work of softmax and of attention over documents, as torch's own sources have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.trace.concrete_values import set_concrete_value
from tightfit.trace.operation_work import SPECIAL_WORK, Work, describe_operation
from tightfit.trace.result import ATTENTION

HEADS, WIDTH = 4, 64


def test_softmax_for_rows_that_may_be_hidden_is_four_kernels() -> None:
    """Scores read twice; written, read and written again; a flag each, written and read."""
    scores = torch.ones(2, 8, 16, dtype=torch.bfloat16)
    softmax = torch.ops.aten._safe_softmax.default

    work = describe_operation(softmax, (scores, -1), {}, softmax(scores, -1))

    assert work.num_bytes == (2 * 2 + 3 * 2 + 2) * scores.numel()
    assert (work.num_kernels, work.num_calls) == (4, 4)


def test_softmax_goes_back_by_a_product_that_is_written_out() -> None:
    """Gradient and result read, their product written; it and the result read, all written."""
    result = torch.ones(2, 8, 16)
    back = torch.ops.aten._softmax_backward_data.default

    args = (result, result, -1, torch.float32)
    work = describe_operation(back, args, {}, back(*args))

    assert work.num_bytes == 6 * 4 * result.numel()
    assert work.num_kernels == 2


def _attend(*lengths: int, is_known: bool = True) -> Work:
    num_tokens = sum(lengths)
    with FakeTensorMode():
        query = torch.empty(num_tokens, HEADS, WIDTH, dtype=torch.bfloat16)
        ends = torch.empty(len(lengths) + 1, dtype=torch.int32)
    if is_known:
        set_concrete_value(ends, torch.tensor((0, *lengths)).cumsum(0))
    args: dict[str, Any] = {"query": query, "key": query, "value": query, "cu_seq_q": ends}
    return SPECIAL_WORK["torch_attn::_varlen_attn"](args | {"window_size": [-1, 0]}, query)


def test_documents_attend_among_themselves_at_the_pace_of_their_mean_length() -> None:
    work = _attend(100, 300, 800)

    assert work.kind == ATTENTION
    assert work.shape == (WIDTH, 400, 1, 0)
    assert work.flops == 4 * HEADS * WIDTH * (100**2 + 300**2 + 800**2)


def test_documents_whose_ends_nobody_knows_are_taken_for_equal() -> None:
    unknown = _attend(100, 300, 800, is_known=False)

    assert unknown == _attend(400, 400, 400)
    assert unknown.flops == pytest.approx(4 * HEADS * WIDTH * 3 * 400**2)
