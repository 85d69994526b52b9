"""Casts to e4m3: exact where they can be, and shared only by those that are given one tensor."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tightfit.runtime.kernels.fp8 import (
    FP8,
    _kept_rows,
    cast_columns,
    cast_input,
    cast_rows,
    scale_matrix,
    turn,
)

BF16 = torch.bfloat16


def test_scaling_loses_nothing() -> None:
    """Values that e4m3 has, at any power of two, come back as they were."""
    exact = torch.tensor([1.0, -1.875, 0.0, 1.25]).repeat(40, 4).to(BF16)
    rows = exact * (2.0 ** torch.arange(-20, 20))[:, None].to(BF16)
    values, scale = cast_rows(rows)
    assert values.dtype is FP8
    assert torch.equal(values.float() * scale, rows.float())


@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e-30, 447.9, 3e38])
def test_no_row_leaves_the_range(largest: float) -> None:
    rows = torch.tensor([[largest, -largest, largest / 3] * 16]).to(BF16)
    for values, scale in (cast_rows(rows), scale_matrix(rows)):
        assert torch.isfinite(values.float()).all()
        assert torch.isfinite(scale).all()
        assert torch.allclose(values.float() * scale, rows.float(), rtol=2**-4)


def test_what_is_not_finite_comes_back_so() -> None:
    rows = torch.ones(2, 16, dtype=BF16)
    rows[0, 3], rows[1, 5] = float("nan"), float("inf")
    values, scale = cast_rows(rows)
    back = values.float() * scale
    assert not back.isfinite().any(), "nor does what it is summed with hide it"


def test_a_turned_matrix_is_cast_by_its_columns() -> None:
    matrix = torch.randn(32, 48).to(BF16)
    values, scale = cast_columns(matrix)
    assert values.is_contiguous()
    assert scale.shape == (48, 1)
    assert torch.equal(values, cast_rows(matrix.t().contiguous())[0])


def test_a_turned_matrix_is_what_it_was() -> None:
    matrix = torch.randn(32, 48).to(FP8)
    assert turn(matrix).is_contiguous()
    assert torch.equal(turn(matrix).float(), matrix.float().t())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("cast", [cast_rows, scale_matrix])
def test_casts_are_one_graph_for_any_shape(cast: Any) -> None:
    compiled: Any = torch.compile(cast, dynamic=True, fullgraph=True, backend="aot_eager")
    for shape in ((32, 64), (48, 16)):
        x = torch.randn(shape).to(BF16)
        assert all(map(torch.equal, compiled(x), cast(x)))


# One cast for several layers


def draw() -> torch.Tensor:
    return torch.randn(2, 8, 32).to(BF16)


def test_the_same_tensor_is_cast_once() -> None:
    x = draw()
    first = cast_input(x, is_followed=True)
    again = cast_input(x, is_followed=False)
    assert first is again
    assert first[0].shape == (16, 32)
    assert cast_input(x, is_followed=False) is not first, "the last to need it let it go"


def test_a_tensor_that_was_written_to_is_cast_anew() -> None:
    x = draw()
    before, _ = cast_input(x, is_followed=True)
    x.mul_(-1)
    after, _ = cast_input(x, is_followed=False)
    assert torch.equal(after.float(), -before.float())


def test_an_equal_tensor_is_another() -> None:
    x = draw()
    first = cast_input(x, is_followed=True)
    assert cast_input(x.clone(), is_followed=False) is not first
    assert _kept_rows._entry is None, "one at a time"


def test_a_view_of_the_same_memory_is_another() -> None:
    x = draw()
    first = cast_input(x, is_followed=True)
    found = cast_input(x.view(8, 2, 32), is_followed=False)
    assert found is not first
    assert torch.equal(found[0].float(), first[0].float())


def test_a_cast_goes_with_its_tensor() -> None:
    x = draw()
    values = weakref.ref(cast_input(x, is_followed=True)[0])
    gc.collect()
    assert values() is not None
    del x
    gc.collect()
    assert values() is None


def test_a_tensor_that_counts_no_writes_is_cast_each_time() -> None:
    with torch.inference_mode():
        x = draw()
        assert cast_input(x, is_followed=True) is not cast_input(x, is_followed=True)
    assert _kept_rows._entry is None
