"""Profiles of generated datasets, checked against counts made by hand."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from machine_pace import allow
from tightfit.core.errors import InvalidInputError
from tightfit.core.objectives import ExampleKind
from tightfit.data.profile import (
    TOKENS_PER_MESSAGE,
    TOKENS_PER_ROW,
    profile_dataset,
    profile_lengths,
)
from tightfit.data.readers import ReadProgress

NEEDS = "un-skip with: pip install 'tightfit[data]'"
FRAME = 2 * TOKENS_PER_MESSAGE + TOKENS_PER_ROW
"""What the template adds to one prompt and one answer."""


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """One word is one token, so that tests can count in their heads."""
    tokenizers = pytest.importorskip("tokenizers", reason=NEEDS)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_rows(path: Path, sizes: list[tuple[int, int]]) -> Path:
    """Prompt-completion rows of so many words each."""
    rows = [{"prompt": "a " * prompt, "completion": "b " * answer} for prompt, answer in sizes]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_numbers_of_a_small_set(tmp_path: Path, model_folder: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [(4, 5), (9, 10), (30, 40), (4, 5)])

    profile = profile_dataset(path, seq_len=50, model=str(model_folder))

    assert profile.is_exact
    assert profile.format == "prompt-completion"
    assert profile.num_rows == profile.num_counted_rows == 4
    # 20, 30, 81 cut to 50, 20
    assert FRAME == 11
    assert profile.num_tokens == 20 + 30 + 50 + 20
    assert profile.mean_tokens == 30
    assert profile.max_tokens == 50
    assert profile.longest_row_tokens == 81
    assert profile.num_truncated == 1
    assert profile.num_lost_tokens == 31
    # each answer and its end mark, less what was cut off
    assert profile.num_trained_tokens == 6 + 11 + (41 - 31) + 6
    assert profile.histogram == ((20, 2), (30, 1), (50, 1))
    assert profile.percentiles == {"p50": 20, "p90": 50, "p95": 50, "p99": 50}
    assert profile.num_packed_rows == 3  # 50 | 30+20 | 20
    assert profile.packing_waste_fraction == pytest.approx(1 - 120 / 150)
    assert profile.padding_waste_fraction["1"] == pytest.approx(0.0)
    assert profile.padding_waste_fraction["4"] == pytest.approx(1 - 120 / 200)


def write_pairs(path: Path, sizes: list[tuple[int, int, int]]) -> Path:
    """Prompts with a chosen and a rejected answer of so many words each."""
    rows = [
        {"prompt": "a " * prompt, "chosen": "b " * chosen, "rejected": "c " * rejected}
        for prompt, chosen, rejected in sizes
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_pair_is_as_long_as_its_longer_answer(tmp_path: Path, model_folder: Path) -> None:
    """And the prompt is read with both."""
    path = write_pairs(tmp_path / "a.jsonl", [(4, 5, 9), (9, 20, 10), (30, 40, 2)])

    profile = profile_dataset(path, seq_len=50, model=str(model_folder), example=ExampleKind.PAIR)

    assert (profile.format, profile.num_rows) == ("pairs", 3)
    # 24, 40, 81 cut to 50; the shorter ones 20, 30 and 43
    assert profile.mean_tokens == pytest.approx((24 + 40 + 50) / 3)
    assert profile.max_tokens == 50
    assert profile.num_tokens == 24 + 40 + 50 + 20 + 30 + 43
    # answers with their end, less what is cut off
    assert profile.num_trained_tokens == 6 + 10 + 21 + 11 + (41 - 31) + 3
    assert (profile.longest_row_tokens, profile.num_truncated, profile.num_lost_tokens) == (
        *(81, 1, 31),
    )


def test_a_pair_is_two_labelled_answers(tmp_path: Path, model_folder: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [(4, 5, 9), (9, 20, 10)])

    profile = profile_dataset(
        path, seq_len=50, model=str(model_folder), example=ExampleKind.LABELLED
    )

    assert (profile.num_rows, profile.num_tokens) == (4, 24 + 40 + 20 + 30)
    assert profile.mean_tokens == pytest.approx((24 + 40 + 20 + 30) / 4)


def test_text_is_trained_whole(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two three"}\n{"text": "four five"}\n')

    profile = profile_dataset(path, seq_len=64, model=str(model_folder))

    assert profile.format == "text"
    assert profile.num_tokens == profile.num_trained_tokens == 5 + 2


def test_files_of_different_formats_mix(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [(3, 3)])
    (tmp_path / "b.txt").write_text("words\n")

    profile = profile_dataset(tmp_path, seq_len=64)

    assert profile.format == "prompt-completion+text"
    assert profile.num_rows == 2
    assert "guessed" in profile.tokenizer
    assert not profile.is_exact


def test_mixed_keys_inside_one_file_are_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [(3, 3)] * 5)
    path.write_text(path.read_text() + '\n{"instruction": "x", "output": "y"}\n')

    with pytest.raises(InvalidInputError, match=r"a\.jsonl line 6 lacks `prompt`"):
        profile_dataset(path, seq_len=64)


def test_large_sets_are_sampled_and_say_so(tmp_path: Path, model_folder: Path) -> None:
    rng = random.Random(2)
    sizes = [(rng.randint(1, 60), rng.randint(1, 60)) for _ in range(6000)]
    sizes[3000] = (400, 500)
    path = write_rows(tmp_path / "a.jsonl", sizes)

    whole = profile_dataset(path, seq_len=1024, model=str(model_folder))
    part = profile_dataset(path, seq_len=1024, model=str(model_folder), sample_limit=1000)

    assert 250 <= part.num_counted_rows <= 1000
    assert f"{part.num_counted_rows:,} of 6,000 rows" in part.tokenizer
    assert "rows counted" not in whole.tokenizer
    assert part.num_rows == whole.num_rows == sum(rows for _, rows in part.histogram)
    assert part.num_tokens == pytest.approx(whole.num_tokens, rel=0.04)
    assert part.num_trained_tokens == pytest.approx(whole.num_trained_tokens, rel=0.06)
    assert part.num_packed_rows == pytest.approx(whole.num_packed_rows, rel=0.05)
    assert part.longest_row_tokens == whole.longest_row_tokens == 900 + FRAME


def test_the_same_file_gives_the_same_profile(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [(n % 50 + 1, n % 7 + 1) for n in range(3000)])

    first = profile_dataset(path, seq_len=128, sample_limit=500)

    assert profile_dataset(path, seq_len=128, sample_limit=500) == first


def test_one_enormous_row_is_fine(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [(3, 500_000), (3, 3)])

    profile = profile_dataset(path, seq_len=128)

    assert profile.num_truncated == 1
    assert profile.max_tokens == 128
    assert profile.longest_row_tokens > 400_000


def test_nothing_to_train_is_found_before_anything_runs(tmp_path: Path) -> None:
    empty = write_rows(tmp_path / "empty.jsonl", [(5, 0)] * 3)
    cut = write_rows(tmp_path / "cut.jsonl", [(500, 5)] * 3)

    with pytest.raises(InvalidInputError, match="no row has an answer"):
        profile_dataset(empty, seq_len=128)
    with pytest.raises(InvalidInputError, match="every answer is cut off at 128"):
        profile_dataset(cut, seq_len=128)


@pytest.mark.parametrize("seq_len", [0, -5, 10**12])
def test_absurd_lengths_are_refused(tmp_path: Path, seq_len: int) -> None:
    path = write_rows(tmp_path / "a.jsonl", [(3, 3)])

    with pytest.raises(InvalidInputError, match="makes no sense"):
        profile_dataset(path, seq_len=seq_len)


def test_ten_thousand_rows_in_a_moment_with_progress(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [(n % 150 + 1, 60) for n in range(10_000)])
    seen: list[int] = []

    def watch(state: ReadProgress) -> None:
        seen.append(state.num_rows)

    started = time.process_time()
    profile = profile_dataset(path, seq_len=2048, progress=watch)

    assert time.process_time() - started < allow(1.5)
    assert seen == sorted(seen)
    assert seen[-1] == profile.num_rows == 10_000


@pytest.mark.parametrize("example", [ExampleKind.ANSWER, ExampleKind.PAIR])
def test_other_lengths_are_profiled_as_if_each_had_been_asked_for(
    tmp_path: Path, model_folder: Path, example: ExampleKind
) -> None:
    sizes = [(3, 4), (600, 100), (900, 300), (20, 3000), (2000, 10)] * 3
    path = write_rows(tmp_path / "a.jsonl", sizes)
    if example is ExampleKind.PAIR:
        pairs = [
            {"prompt": "a " * prompt, "chosen": "b " * answer, "rejected": "c " * (answer // 2)}
            for prompt, answer in sizes
        ]
        path.write_text("\n".join(map(json.dumps, pairs)))
    source, model = [path], str(model_folder)

    asked, *others = profile_lengths(source, seq_len=700, model=model, example=example)

    assert [one.seq_len for one in others] == [512, 1024, 2048, 4096]
    for one in (asked, *others):
        assert one == profile_dataset(source, seq_len=one.seq_len, model=model, example=example)
    assert others[-1].num_truncated == others[-1].num_lost_tokens == 0 < others[0].num_truncated


def test_lengths_of_plain_text_lose_nothing(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 3000)
    found = profile_lengths(tmp_path / "a.txt", seq_len=1024, model=str(model_folder))
    assert len(found) > 2
    for one in found:
        assert one.num_lost_tokens == 0
        assert one == profile_dataset(
            tmp_path / "a.txt", seq_len=one.seq_len, model=str(model_folder)
        )
