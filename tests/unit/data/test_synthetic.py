"""Made-up rows: as many, as long and as much trained as asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.core.objectives import ExampleKind
from tightfit.core.profiles import DataProfile
from tightfit.data.profile import profile_from_store
from tightfit.data.token_store import (
    MAX_SYNTHETIC_TOKENS,
    count_rows,
    draw_lengths,
    write_synthetic,
)

ROWS = DataProfile(
    source="rows.jsonl",
    format="alpaca",
    num_rows=1000,
    num_tokens=150_000,
    num_trained_tokens=50_000,
    mean_tokens=150.0,
    max_tokens=512,
    percentiles={},
    histogram=((64, 500), (128, 300), (512, 200)),
    num_truncated=0,
    seq_len=512,
    tokenizer="guessed",
    is_exact=False,
    padding_waste_fraction={},
    packing_waste_fraction=0.0,
    num_packed_rows=300,
)


def test_lengths_are_spread_as_the_datas_are() -> None:
    lengths = draw_lengths(ROWS, 100)
    assert [lengths.count(size) for size in (64, 128, 512)] == [50, 30, 20]


def test_rows_are_whole_steps_within_the_bound() -> None:
    assert count_rows(2048, effective_batch=16, num_steps=23) == 16 * 23
    assert count_rows(2**20, effective_batch=16, num_steps=23) == 16 * 2
    assert count_rows(2 * MAX_SYNTHETIC_TOKENS, effective_batch=3, num_steps=23) == 3


def test_full_rows_train_all_but_the_first_token(tmp_path: Path) -> None:
    store = write_synthetic(tmp_path / "rows", [32] * 8, vocab_size=100, seq_len=32)

    assert len(store) == 8
    assert store.num_trained.tolist() == [31] * 8
    assert store.find_highest_token() < 75
    assert int(store.row(0).tokens.min()) >= 25
    assert store.row(0).tokens.tolist() != store.row(1).tokens.tolist()
    profile = profile_from_store(store)
    assert (profile.num_tokens, profile.max_tokens, profile.seq_len) == (256, 32, 32)


def test_the_trained_part_stands_at_the_end(tmp_path: Path) -> None:
    store = write_synthetic(
        tmp_path / "rows", [40, 10], vocab_size=100, seq_len=40, trained_fraction=0.3
    )
    assert store.num_trained.tolist() == [12, 3]
    assert store.row(0).trained.tolist() == [False] * 28 + [True] * 12


def test_an_encoder_decoder_has_both_sides(tmp_path: Path) -> None:
    store = write_synthetic(
        tmp_path / "rows", [16], vocab_size=100, seq_len=16, is_encoder_decoder=True
    )
    assert (store.lengths.tolist(), store.num_trained.tolist()) == ([32], [16])
    assert profile_from_store(store).max_tokens == 16


@pytest.mark.parametrize("vocab_size", [1, 2, 3])
def test_the_smallest_vocabularies_are_drawn_from(tmp_path: Path, vocab_size: int) -> None:
    store = write_synthetic(tmp_path / "rows", [8], vocab_size=vocab_size, seq_len=8)
    assert 0 <= store.find_highest_token() < vocab_size


def test_pairs_and_labelled_answers_are_as_long_as_asked(tmp_path: Path) -> None:
    lengths = [10, 20, 30]
    pairs = write_synthetic(
        tmp_path / "pairs", lengths, vocab_size=100, seq_len=32, example=ExampleKind.PAIR
    )
    profile = profile_from_store(pairs)
    assert pairs.lengths.tolist() == [10, 10, 20, 20, 30, 30]
    assert (profile.num_rows, profile.mean_tokens, profile.num_tokens) == (3, 20.0, 120)
    labelled = write_synthetic(
        tmp_path / "labelled", lengths, vocab_size=100, seq_len=32, example=ExampleKind.LABELLED
    )
    assert labelled.is_good is not None
    assert labelled.is_good.tolist() == [True, False, True]
