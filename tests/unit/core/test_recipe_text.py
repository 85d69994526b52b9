"""A recipe that is written for somebody is a recipe, with every line of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tightfit.core.objectives import Objective
from tightfit.core.recipe import Recipe, read_recipe
from tightfit.core.recipe_text import write_recipe
from tightfit.core.yaml_text import read_yaml, write_text_value

STATED = {"model": "./tiny", "data": "train.jsonl", "on": "here", "method": "auto"}
TEXT = write_recipe(STATED, remarks={}, title="tightfit plan recipe.yaml")
OPTIONAL = re.findall(r"^# (\w+: .+)$", TEXT, re.M)
INNER = [
    f"{section}:\n  {line}"
    for section, block in re.findall(r"^# (lora|strategy):\n((?:#   .+\n)+)", TEXT, re.M)
    for line in re.findall(r"^#   (.+)$", block, re.M)
]


@pytest.mark.parametrize("line", [*OPTIONAL, *INNER])
def test_each_line_behind_a_mark_can_be_stated(line: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    readers = [one.value for one in Objective if line.partition(":")[0] in one.record.settings]
    objective = f"objective: {readers[0]}\n" if readers else ""
    path.write_text(f"{TEXT}\n{objective}{line}\n")

    section, colon, below = line.partition(":\n")
    stated = getattr(read_recipe(path), section if colon else line.partition(":")[0])

    if colon:
        stated = getattr(stated, below.split(":")[0].strip())
    assert stated is not None


def test_every_key_of_a_recipe_is_in_the_text() -> None:
    keys = set(re.findall(r"^#? ?(\w+):", TEXT, re.M))

    assert keys == set(Recipe.model_fields)
    assert len(OPTIONAL) > 15
    assert len(INNER) > 6


@pytest.mark.parametrize(
    "text",
    ["train.jsonl", "train.jsonl[:10%]", "true", "1e3", "0x10", "~", "a: b", "a #b", "#a", "'", '"',
     "2n x 4xA100-40GB", "4xV100-32GB", "- a", "on", "null", " a", "ä ö.jsonl", "[a]", "a\nb"],
)  # fmt: skip
def test_text_is_read_back_as_it_was(text: str, tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"key: {write_text_value(text)}  # remark\n", encoding="utf-8")

    assert read_yaml(path).value == {"key": text}


def test_names_stay_without_quotes_where_they_can() -> None:
    assert write_text_value("./SmolLM2-135M") == "./SmolLM2-135M"
    assert write_text_value("4xV100-32GB") == "4xV100-32GB"
