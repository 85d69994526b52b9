"""The data order: every row once an epoch, the same rows in a step on any number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_stores import draw_rows, make_store

from tightfit.training.batches import BatchLoader, BatchSampler, choose_collate, count_trained
from tightfit.training.distributed import DistContext


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_store(folder, draw_rows(23))
    return folder


def make_sampler(
    folder: Path, *, effective_batch: int = 8, is_packed: bool = False
) -> BatchSampler:
    from tightfit.data.token_store import TokenStore

    return BatchSampler(
        TokenStore(folder / "train"),
        effective_batch=effective_batch,
        seq_len=40,
        is_packed=is_packed,
        seed=5,
        shuffle=True,
    )


def context_of(rank: int, world_size: int) -> DistContext:
    return DistContext(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        device=torch.device("cpu"),
    )


def rows_of_step(
    sampler: BatchSampler, step: int, *, world_size: int, micro_batch: int
) -> Counter[int]:
    found: Counter[int] = Counter()
    for rank in range(world_size):
        items = sampler.deal(step, rank=rank, world_size=world_size, micro_batch=micro_batch)
        found.update(row for batch in items.micro_batches for item in batch for row in item)
    return found


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_epoch_shows_every_row_once(store_folder: Path, is_packed: bool) -> None:
    sampler = make_sampler(store_folder, is_packed=is_packed)

    for epoch in range(2):
        seen: Counter[int] = Counter()
        for step in range(sampler.steps_per_epoch):
            seen += rows_of_step(
                sampler, epoch * sampler.steps_per_epoch + step, world_size=2, micro_batch=2
            )
        assert seen == Counter(range(23))


@given(
    world_size=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2]),
    step=st.integers(0, 7),
)
def test_ranks_and_micro_batches_do_not_change_a_step(
    store_folder: Path, world_size: int, micro_batch: int, step: int
) -> None:
    sampler = make_sampler(store_folder)

    whole = rows_of_step(sampler, step, world_size=1, micro_batch=8)

    assert rows_of_step(sampler, step, world_size=world_size, micro_batch=micro_batch) == whole


def test_epochs_differ_and_repeat(store_folder: Path) -> None:
    first, again = make_sampler(store_folder), make_sampler(store_folder)

    orders = [[rows_of_step(first, step, world_size=1, micro_batch=8) for step in range(6)]]
    orders += [[rows_of_step(again, step, world_size=1, micro_batch=8) for step in range(6)]]

    assert orders[0] == orders[1]
    assert orders[0][:3] != orders[0][3:]


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_tensors_hold_what_the_step_counts(store_folder: Path, is_packed: bool) -> None:
    """The divisor of the loss is known before any tensor is made; here both are counted."""
    sampler = make_sampler(store_folder, is_packed=is_packed)
    collate = choose_collate(sampler.store.description, is_packed=is_packed)

    for step in range(sampler.steps_per_epoch):
        num_trained = []
        for rank in range(2):
            loader = BatchLoader(sampler, collate, micro_batch=2, context=context_of(rank, 2))
            [ready] = loader.steps(step, step + 1)
            assert len(ready.batches) == 2
            num_trained += [count_trained(b, is_encoder_decoder=False) for b in ready.batches]
        assert sum(num_trained) == ready.items.num_trained_tokens > 0


def test_the_longest_batch_is_the_longest(store_folder: Path) -> None:
    sampler = make_sampler(store_folder)

    longest = sampler.longest(2)

    lengths = sorted(sampler.store.lengths.tolist(), reverse=True)
    assert [int(sampler.store.lengths[item[0]]) for item in longest] == lengths[:2]


@given(num_epochs=st.floats(0.01, 5))
def test_epochs_become_whole_steps(store_folder: Path, num_epochs: float) -> None:
    sampler = make_sampler(store_folder)  # 23 rows in steps of 8: three an epoch

    num_steps = sampler.count_steps(num_epochs)

    assert num_steps - 1 < num_epochs * 3 <= num_steps


def test_an_error_in_the_thread_reaches_the_trainer(store_folder: Path) -> None:
    sampler = make_sampler(store_folder)

    def broken(_sequences: object) -> dict[str, torch.Tensor]:
        raise ValueError("no tensors today")

    loader = BatchLoader(sampler, broken, micro_batch=2, context=context_of(0, 1))

    with pytest.raises(ValueError, match="no tensors today"):
        list(loader.steps(0, 2))


def test_the_highest_token_is_known(tmp_path: Path) -> None:
    store = make_store(tmp_path, [([3, 7, 2], [False, True, True]), ([1, 95], [False, True])])

    assert store.find_highest_token() == 95
