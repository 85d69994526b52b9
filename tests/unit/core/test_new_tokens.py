"""Names of new tokens: read from files, checked, and the rows that they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.api.training.settings import read_settings
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.new_tokens import (
    MAX_NEW_TOKENS,
    NewTokens,
    check_new_tokens,
    count_rows,
    read_token_files,
)
from tightfit.core.recipe import read_recipe


def test_a_recipe_names_tokens_or_a_file_of_them(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("<sql>\r\n</sql>\nÜbermaß\n")
    recipe = tmp_path / "a.yaml"
    recipe.write_text(
        "model: ./base\nadd_tokens: '@tokens.txt'\nadd_special_tokens: ['<|a|>', '<|b|>']\n"
    )

    fixed = read_recipe(recipe).fixed_strategy()

    assert fixed["add_tokens"] == ("<sql>", "</sql>", "Übermaß")
    assert fixed["add_special_tokens"] == ("<|a|>", "<|b|>")


def test_set_takes_names_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("One\nTwo")

    found = read_settings([f"add_tokens=<SQL>,@{tmp_path / 't.txt'}"])

    assert found == {"add_tokens": ("<SQL>", "One", "Two")}


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (NewTokens(plain=("a1", "")), "`add_tokens` entry 2 is empty"),
        (NewTokens(plain=("  ",)), "nothing but spaces"),
        (NewTokens(plain=("x\ty",)), "0x9"),
        (NewTokens(special=("x\x00",)), "`add_special_tokens` entry 1"),
        (NewTokens(plain=("\ud800",)), "0xd800"),
        (NewTokens(plain=("\U00100000",)), "0x100000"),
        (NewTokens(plain=("<x>",), special=("<x>",)), "is there already, as `add_tokens` entry 1"),
        (NewTokens(plain=tuple(map(str, range(MAX_NEW_TOKENS + 1)))), "too many"),
    ],
)
def test_what_can_be_no_token_is_refused_by_its_place(new: NewTokens, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_new_tokens(new)
    assert said in caught.value.problem


def test_a_file_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("good\n\nmore\n")

    with pytest.raises(UsageError, match=r"t\.txt line 2 is empty"):
        read_token_files([f"@{path}"])
    with pytest.raises(InvalidInputError, match=r"missing\.txt cannot be read"):
        read_token_files(["@missing.txt"], tmp_path)


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "wanted"),
    [(151_936, 151_700, 151_936), (49_152, 49_153, 49_216), (384, 384, 384), (384, 448, 448)],
)
def test_rows_to_spare_are_used_before_a_matrix_grows(
    num_rows: int, num_tokens: int, wanted: int
) -> None:
    assert count_rows(num_rows, num_tokens) == wanted
