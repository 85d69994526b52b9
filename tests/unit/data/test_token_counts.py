"""Token counters: exact ones against the library, guesses against known truths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import InvalidInputError
from tightfit.data.profile import find_tokenizer, guess_tokens, token_counter

NEEDS = "un-skip with: pip install 'tightfit[data]'"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a tiny word-level tokenizer that, as some do, asks to cut and to pad."""
    tokenizers = pytest.importorskip("tokenizers", reason=NEEDS)
    vocabulary = {"<unk>": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_model_folder_is_counted_exactly(model_folder: Path) -> None:
    counter = token_counter(str(model_folder))

    assert counter.is_exact
    assert counter.count(["one two three one", "", "two", "half \ud800 pair"]) == [4, 0, 1, 3]
    assert str(model_folder) in counter.description


def test_a_hub_id_is_found_in_the_local_cache(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    for commit in ("aaa", "bbb"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        text = (model_folder / "tokenizer.json").read_text()
        (repository / "snapshots" / commit / "tokenizer.json").write_text(text)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("aaa\n")

    assert find_tokenizer("org/name") == repository / "snapshots" / "aaa" / "tokenizer.json"
    assert token_counter("org/name").is_exact
    assert find_tokenizer("org/other") is None


@pytest.mark.parametrize(
    "model", [None, "no-such-model", "a/b/c", "a\0b/c", "~nobody-x/y", "x" * 9999]
)
def test_without_a_tokenizer_lengths_are_guessed(model: str | None) -> None:
    counter = token_counter(model)

    assert not counter.is_exact
    assert "guessed" in counter.description
    assert counter.count(["hello there"]) == [3]


def test_without_the_library_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    counter = token_counter(str(tmp_path))

    assert not counter.is_exact
    assert "pip install 'tightfit[data]'" in counter.description


@pytest.mark.parametrize("content", ["", "{", "{}", json.dumps({"model": 5}), "\x00"])
def test_a_broken_tokenizer_is_a_message(tmp_path: Path, content: str) -> None:
    pytest.importorskip("tokenizers", reason=NEEDS)
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(InvalidInputError, match=r"tokenizer\.json"):
        token_counter(str(tmp_path))


# Fewest and most tokens that six published vocabularies make of a sentence: GPT-2, SmolLM2,
# Mistral v3, Mistral Tekken, Qwen, DeepSeek. A guess for no tokenizer in particular lies between.
KNOWN: list[tuple[str, int, int]] = [
    ("The quick brown fox jumps over the lazy dog near the river bank.", 14, 16),
    ("SELECT name, age FROM people WHERE age > 56 ORDER BY name;", 14, 18),
    ("In 2019, 48 of 1,250 trains were 15 minutes late (3.84%).", 18, 31),
    ("Москва является столицей Российской Федерации.", 7, 51),
    ("今天的天气非常好,我们去公园散步吧。", 9, 34),
]


@pytest.mark.parametrize(("text", "fewest", "most"), KNOWN)
def test_guesses_agree_with_real_vocabularies(text: str, fewest: int, most: int) -> None:
    assert fewest <= guess_tokens(text) <= most


@given(text=st.text())
def test_a_guess_is_never_more_than_a_token_per_byte(text: str) -> None:
    assert (guess_tokens(text) == 0) <= (not text.strip() or not text.isprintable())
    assert 0 <= guess_tokens(text) <= len(text.encode())


@given(left=st.text(), right=st.text())
def test_more_text_is_never_fewer_tokens(left: str, right: str) -> None:
    assert guess_tokens(f"{left}\n{right}") >= max(guess_tokens(left), guess_tokens(right))


def test_runs_of_letters_that_are_no_word_cost_by_length() -> None:
    assert guess_tokens("x" * 8000) >= 1000


def test_nothing_heavy_is_imported() -> None:
    probe = "import sys, tightfit.data.profile, tightfit.core.recipe; print(*sys.modules)"
    names = subprocess.check_output([sys.executable, "-c", probe], text=True).split()
    assert {"torch", "transformers", "tokenizers", "pyarrow", "numpy"}.isdisjoint(names)
