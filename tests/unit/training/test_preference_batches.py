"""Batches of pairs: each trained token belongs to its own answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.core.objectives import ExampleKind
from tightfit.data.token_store import write_synthetic
from tightfit.training.batches import IGNORED, BatchMaker, Item, choose_collate


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_pair_that_is_twice_in_a_batch_counts_twice(is_packed: bool, tmp_path: Path) -> None:
    """As a source of weight 2 gives it, or the end of one epoch and the start of the next."""
    lengths = [9, 5, 7]
    store = write_synthetic(
        tmp_path / "made", lengths, vocab_size=96, seq_len=64, example=ExampleKind.PAIR
    )
    collate = choose_collate(store.description, is_packed=is_packed)
    items: list[Item] = [(2, 0), (4, 2)] if is_packed else [(2,), (0,), (4,), (2,)]

    batch = BatchMaker(store, collate).make(items)

    trained = batch["labels"] != IGNORED
    found = [
        batch["input_ids"][trained & (batch["answer_ids"] == number)].tolist()
        for number in range(len(batch["answer_lengths"]))
    ]
    rows = [store.row(first + at) for first in (2, 0, 4, 2) for at in range(2)]
    # The first token of a sequence has no label: nothing predicts it.
    assert [tokens[-(len(row.tokens) - 1) :] for tokens, row in zip(found, rows, strict=True)] == [
        row.tokens[1:].tolist() for row in rows
    ]
