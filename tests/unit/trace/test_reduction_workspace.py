"""Scratch of sums and means: what an H200 was seen to allocate, and how it must behave."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.trace import kernel_workspace
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.kernel_stubs import pretend_cuda
from tightfit.trace.kernel_workspace import find_multiprocessors, reduction_workspace

H200 = find_multiprocessors((9, 0))


def sums(shape: tuple[int, ...], dims: list[int] | None, **options: torch.dtype) -> list[int]:
    with FakeTensorMode():
        source = torch.empty(shape, dtype=options.pop("source", torch.bfloat16))
    return reduction_workspace((source,) if dims is None else (source, dims), dict(options), H200)


@pytest.mark.parametrize(
    ("shape", "buffer_bytes"),
    [
        ((4, 2048, 2048), 134_217_728),
        ((4, 1024, 2048), 67_108_864),
    ],
)
def test_a_norms_gradient_takes_what_an_h200_was_seen_to_take(
    shape: tuple[int, ...], buffer_bytes: int
) -> None:
    """Recorded with torch 2.11 in the backward pass of Llama-3.2-1B; beside it a small block."""
    buffer, semaphores = sums(shape, [0, 1])
    assert buffer == buffer_bytes
    assert 0 < semaphores <= 512


@pytest.mark.parametrize("dims", [[-1], [2]])
def test_rows_of_many_tokens_need_nothing(dims: list[int]) -> None:
    """The norms' own mean over the width, of which the same recording shows no block."""
    assert sums((64, 128, 2048), dims, source=torch.float32) == []


def test_few_tokens_are_summed_by_one_block() -> None:
    assert sums((512, 2048), [0]) == []
    assert sums((1024, 2048), [0]) != []


def test_a_sum_of_everything_shares_one_output() -> None:
    buffer, semaphores = sums((8192, 2048), None)
    assert semaphores == 4
    assert buffer % 4 == 0
    assert buffer <= 4 * H200.count * H200.threads


def test_small_integers_are_copied_into_large_ones_first() -> None:
    copied = sums((4, 1024), None, source=torch.bool)
    assert copied[0] == 4 * 1024 * 8
    assert sums((4, 1024), None, source=torch.int64) == copied[1:]


def test_half_precision_is_widened_inside_other_types_before() -> None:
    assert sums((64, 32), [0], dtype=torch.float32) == []
    assert sums((64, 32), [0], source=torch.float32, dtype=torch.float64) == [64 * 32 * 8]


def test_layout_decides_not_the_order_of_dimensions() -> None:
    with FakeTensorMode():
        tokens_first = torch.empty(8192, 2048, dtype=torch.bfloat16)
        plain = reduction_workspace((tokens_first, [0]), {}, H200)
        assert reduction_workspace((tokens_first.t(), [1]), {}, H200) == plain
        assert reduction_workspace((tokens_first.view(4, 2048, 2048), [0, 1]), {}, H200) == plain
        assert reduction_workspace((tokens_first.view(8192, 1, 2048), [0, 1]), {}, H200) == plain


def test_odd_widths_are_read_one_by_one() -> None:
    """Vectors of four make a buffer four times as large for each column."""
    (odd, _), (even, _) = sums((8192, 2047), [0]), sums((8192, 2048), [0])
    assert odd < even


def test_smaller_cards_spread_less() -> None:
    with FakeTensorMode():
        args = (torch.empty(65536, 2048, dtype=torch.bfloat16), [0])
        found = [
            reduction_workspace(args, {}, find_multiprocessors(card, count))[0]
            for card, count in (((7, 5), None), ((8, 9), None), ((9, 0), None), ((9, 0), 264))
        ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_tensors_beyond_32_bit_offsets_are_summed_in_halves() -> None:
    """The last offset of 2**19 rows of 4096 bytes still fits into 32 bits."""
    fits, too_long = sums((2**19, 2048), [0]), sums((2**19 + 2, 2048), [0])
    assert sums((2**20, 2048), [0]) == fits
    assert too_long == sums((2**18 + 1, 2048), [0])
    assert too_long[0] < fits[0]


def test_cards_that_are_not_in_the_table_count_as_the_next_older() -> None:
    assert find_multiprocessors((8, 7)).count == find_multiprocessors((8, 6)).count
    assert find_multiprocessors((6, 1)).count == find_multiprocessors((7, 0)).count
    assert find_multiprocessors((10, 3)).threads == 2048


def test_the_emulation_knows_reductions_by_their_operations() -> None:
    emulation = GpuEmulation((9, 0), "2.11.0", 91900)
    with FakeTensorMode():
        source = torch.empty(8192, 2048, dtype=torch.bfloat16)
    aten = torch.ops.aten
    for func, args in (
        (aten.sum.dim_IntList, (source, [0])),
        (aten.mean.dim, (source, [0], True)),
        (aten.linalg_vector_norm.default, (source, 2, [0])),
    ):
        assert emulation.workspace_blocks(func, args, {})[0] == 134_217_728


@pytest.mark.parametrize("card", [(7, 5), (8, 0), (9, 0)])
def test_a_library_that_asks_is_told_of_as_many(card: tuple[int, int]) -> None:
    with pretend_cuda("tightfit.trace", card):
        count = vars(kernel_workspace)["torch"].cuda.get_device_properties(0).multi_processor_count

    assert count == find_multiprocessors(card).count
