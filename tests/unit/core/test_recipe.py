"""Recipes: what they mean, and that every error is one readable message."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.core.recipe import TOP_LEVEL_HOMES, Recipe, StrategyOverrides, read_recipe
from tightfit.core.settings import RENAMED_SETTINGS, Method
from tightfit.core.strategy import Strategy

Write = Callable[[str], Path]
EXAMPLE = Path(__file__).parents[3] / "docs" / "recipe.example.yaml"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def error_of(path: Path) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read_recipe(path)
    assert caught.value.remedy
    return caught.value.problem


def test_the_documented_example_is_valid_and_starts_with_its_command() -> None:
    recipe = read_recipe(EXAMPLE)

    assert EXAMPLE.read_text().startswith("# tightfit plan docs/recipe.example.yaml\n")
    assert recipe.on == "4xV100-32GB"
    assert recipe.learning_rate == pytest.approx(0.0002)
    assert recipe.lora.targets == ("all-linear",)


def test_commented_parts_of_the_example_are_valid_too(write: Write) -> None:
    commented = re.compile(r"^( *)# ((?:  )*(?:- )?[a-z_]+:.*)$")
    lines = EXAMPLE.read_text().splitlines()
    keys = [line for line in lines if commented.match(line)]
    recipe = read_recipe(write("\n".join(commented.sub(r"\1\2", line) for line in lines)))

    assert len(keys) >= 20, "the scan lost the commented keys"
    assert [(item.split, item.weight, item.take) for item in recipe.data] == [
        ("train", 2.0, None),
        ("train", 1.0, "10%"),
        ("eval", 1.0, None),
        ("train", 1.0, None),
    ]
    assert str(recipe.data[-1].tools).endswith("/tools.json")
    assert recipe.fixed_strategy()["micro_batch"] == 4
    assert recipe.fixed_strategy()["dora"] is True
    assert recipe.eval_every == 200
    assert recipe.log_to == ("tensorboard",)


def test_a_model_is_enough(write: Write) -> None:
    recipe = read_recipe(write("model: Llama-2-7b"))

    assert recipe.fixed_strategy() == {}
    assert recipe.num_epochs == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: rows.jsonl", [("rows.jsonl", 1.0)]),
        ("data: [a.jsonl, b.csv]", [("a.jsonl", 1.0), ("b.csv", 1.0)]),
        ("data: {path: a.jsonl, weight: 3}", [("a.jsonl", 3.0)]),
        ("data:\n  - a.jsonl\n  - path: b.csv\n    weight: 0.5", [("a.jsonl", 1), ("b.csv", 0.5)]),
    ],
)
def test_data_has_short_and_long_forms(
    write: Write, text: str, expected: list[tuple[str, float]]
) -> None:
    path = write(f"model: m\n{text}\n")

    recipe = read_recipe(path)

    assert [(item.path, item.weight) for item in recipe.data] == [
        (str(path.parent / name), weight) for name, weight in expected
    ]


def test_paths_start_at_the_recipe_and_absolute_ones_stay(write: Write, tmp_path: Path) -> None:
    recipe = read_recipe(write("model: ./base\ndata: [in/a.txt, /data/b.txt]\noutput: out\n"))

    assert recipe.model == str(tmp_path / "base")
    assert [item.path for item in recipe.data] == [str(tmp_path / "in/a.txt"), "/data/b.txt"]
    assert recipe.output == str(tmp_path / "out")


def test_paths_through_a_parent_are_short_but_never_lead_elsewhere(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    recipe = read_recipe(write("model: ./x/../base\ndata: [link/../rows.jsonl]\noutput: ../out\n"))

    assert recipe.model == str(tmp_path / "base")
    assert Path(recipe.data[0].path).resolve() == tmp_path / "far" / "rows.jsonl"
    assert recipe.output == str(tmp_path.parent / "out")


def test_hub_ids_are_no_paths(write: Write) -> None:
    assert read_recipe(write("model: org/name")).model == "org/name"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2E-5", 2e-5), ("0.001", 0.001), ("1.5e-3", 1.5e-3), ("1", 1.0)],
)
def test_numbers_are_read_as_people_write_them(write: Write, text: str, value: float) -> None:
    assert read_recipe(write(f"model: m\nlearning_rate: {text}")).learning_rate == value


def test_on_is_a_key_and_not_a_truth_value(write: Write) -> None:
    assert read_recipe(write("model: m\non: here")).on == "here"


def test_qlora_means_lora_on_four_bits(write: Write) -> None:
    fixed = read_recipe(write("model: m\nmethod: qlora\nlora: {rank: 8}")).fixed_strategy()

    assert fixed == {"method": Method.LORA, "weights": Dtype.NF4, "lora_rank": 8}


def test_overrides_come_in_the_types_of_strategy(write: Write) -> None:
    text = "model: m\nseq_len: 512\npacking: true\nstrategy: {attention: eager, micro_batch: 4}"

    fixed = read_recipe(write(text)).fixed_strategy()

    strategy = Strategy(**fixed)
    assert strategy.attention is Attention.EAGER
    assert (strategy.micro_batch, strategy.seq_len, strategy.packing) == (4, 512, True)


def test_every_strategy_field_has_exactly_one_home_in_a_recipe() -> None:
    assert set(StrategyOverrides.model_fields) | set(TOP_LEVEL_HOMES) == set(
        Strategy.model_fields
    ) - {"trainer"}
    assert not set(StrategyOverrides.model_fields) & set(TOP_LEVEL_HOMES)


@pytest.mark.parametrize(
    "text", ["packing: auto", "seq_len: auto", "seq_len:", "lora:", "strategy: {}", "data: []"]
)
def test_auto_and_empty_mean_unstated(write: Write, text: str) -> None:
    assert read_recipe(write(f"model: m\n{text}")) == read_recipe(write("model: m"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate: 1.0", ["line 2", "lerning_rate", "learning_rate"]),
        ("lora:\n  rnak: 3", ["line 3", "lora.rnak", "`rank`"]),
        ("strategy:\n  atention: sdpa", ["line 3", "strategy.atention", "`attention`"]),
        ("strategy: {lora_rank: 3}", ["lora.rank"]),
        ("seq_len: '2048'", ["seq_len", "whole number", "2048"]),
        ("seq_len: 2048.5", ["seq_len", "whole number", "2048.5"]),
        ("seq_len: -1", ["seq_len", "-1"]),
        ("seq_len: true", ["seq_len", "whole number", "true"]),
        ("max_steps: 10000000000", ["max_steps", "1,000,000,000"]),
        ("epochs: .nan", ["epochs", "finite"]),
        ("epochs: .inf", ["epochs", "inf"]),
        ("epochs: 3\nmax_steps: 5", ["epochs", "max_steps", "keep one"]),
        ("learning_rate: fast", ["learning_rate", "a number", "fast"]),
        ("method: loraa", ["method", "auto, full, lora or qlora"]),
        ("method: qlora\nstrategy: {weights: bf16}", ["qlora", "bf16"]),
        ("packing: maybe", ["packing", "true or false", "maybe"]),
        ("data: 5", ["data", "a list", "5"]),
        ("data:\n  - path: a\n    weight: 0", ["line 4", "data[0].weight"]),
        ("data: [{weight: 1}]", ["data[0].path", "missing"]),
        ("eval_fraction: 1.5", ["eval_fraction", "0.5"]),
        ("lora: 8", ["lora", "mapping", "8"]),
        ("on: ''", ["`on`", "not empty"]),
        ("5: x", ["line 2", "`5`"]),
        ("seed: !!binary aGVsbG8=", ["seed", "bytes"]),
        ("seed: !!timestamp 2020-01-01", ["seed", "date"]),
        ("seed: 0x" + "f" * 60, ["seed", "large"]),
    ],
)
def test_an_error_names_place_expectation_and_finding(
    write: Write, text: str, words: list[str]
) -> None:
    problem = error_of(write(f"model: m\n{text}\n"))

    assert problem.splitlines()[0].endswith("has 1 error:")
    assert [word for word in words if word not in problem] == []


def test_all_errors_are_reported_at_once(write: Write) -> None:
    lines = error_of(write("modle: m\nseq_len: x\nlora:\n  rank: -4\n  alfa: 2\n")).splitlines()

    assert lines[0].endswith("has 5 errors:")
    assert [line.split(":")[0].strip() for line in lines[2:]] == [
        "line 1",
        "line 2",
        "line 4",
        "line 5",
    ]
    assert "`model` is missing" in lines[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [unclosed", ["line"]),
        ("model: m\n\tseq_len: 5", ["line 2"]),
        ("model: m\nmodel: n", ["line 2", "twice"]),
        ("a: &x [1]\nb: *x", ["line 2", "alias"]),
        ("model: !!python/object:os.system x", ["line 1"]),
        ("model: m\n--- \nmodel: n", ["line 2"]),
        ("", ["empty"]),
        ("# nothing", ["empty"]),
        ("just words", ["just words"]),
        ("- model", ["a list"]),
        ("model: " + "[" * 5000, ["nested"]),
        ("model: \x07", ["line 1", "not allowed"]),
        ("seed: 1" + "0" * 5000, ["digits"]),
    ],
)
def test_what_is_not_yaml_says_where(write: Write, text: str, words: list[str]) -> None:
    problem = error_of(write(text))

    assert [word for word in words if word not in problem] == []


def test_an_alias_bomb_is_refused_at_once(write: Write) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]

    assert "alias" in error_of(write("\n".join(["a0: &a0 x", *levels])))


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    big, latin = tmp_path / "big.yaml", tmp_path / "latin.yaml"
    big.write_text("model: m\n" + "# filler\n" * 100_000)
    latin.write_bytes("model: m\non: caf\u00e9".encode("latin-1"))

    assert "larger" in error_of(big)
    assert "line 2 is not UTF-8" in error_of(latin)
    assert "not a file" in error_of(tmp_path)
    assert "not a file name" in error_of(Path("a\0b.yaml"))


def test_a_missing_recipe_suggests_its_neighbour(write: Write, tmp_path: Path) -> None:
    write("model: m")

    with pytest.raises(NotFoundError, match=r"Did you mean `job\.yaml`"):
        read_recipe(tmp_path / "jobs.yaml")


def test_messages_hold_no_control_characters(write: Write) -> None:
    problem = error_of(write('model: m\n"\\e[31mred": 1\nmethod: "\\a\\u202e"\n'))

    assert all(char.isprintable() or char == "\n" for char in problem)


KEYS = st.sampled_from(
    [*Recipe.model_fields, "path", "weight", "split", "rank", "alpha", "targets", "micro_batch"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "lora", "qlora", "nf4", "1e-4", "all-linear", "train", 10**400])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | SCALARS, inner, max_size=4),
    max_leaves=8,
)
RECIPES = st.dictionaries(KEYS | st.text(string.ascii_letters, max_size=8), VALUES, max_size=8)
YAML_LIKE = st.text(
    alphabet=st.sampled_from(list("abmodel:0123 -\n\t[]{}&*!|>'\"#%@,?~.\\\x00é\ud7ff"))
)


def fuzz(max_examples: int) -> settings:
    ignored = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=ignored)


def read_or_refuse(path: Path, text: str) -> Recipe | None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        return read_recipe(path)
    except UserError as refusal:
        return None if refusal.problem and refusal.remedy else pytest.fail("an empty message")


@fuzz(600)
@given(value=RECIPES)
def test_fuzz_random_structures(tmp_path: Path, value: dict[str, Any]) -> None:
    recipe = read_or_refuse(tmp_path / "job.yaml", yaml.safe_dump(value, allow_unicode=True))
    if recipe is not None:
        Strategy(**recipe.fixed_strategy())
        assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@fuzz(700)
@given(value=st.fixed_dictionaries({"model": st.just("m")}, optional={
    "data": VALUES, "lora": VALUES, "strategy": VALUES, "epochs": SCALARS, "seq_len": SCALARS,
    "learning_rate": SCALARS, "seed": SCALARS, "method": SCALARS, "packing": SCALARS,
}))  # fmt: skip
def test_fuzz_nearly_right_recipes(tmp_path: Path, value: dict[str, Any]) -> None:
    recipe = read_or_refuse(tmp_path / "job.yaml", yaml.safe_dump(value))
    if recipe is not None:
        assert recipe.epochs is None or math.isfinite(recipe.epochs)
        assert recipe.seq_len is None or recipe.seq_len > 0


@fuzz(2000)
@given(text=YAML_LIKE | st.text())
def test_fuzz_random_text(tmp_path: Path, text: str) -> None:
    read_or_refuse(tmp_path / "job.yaml", text)


def test_a_number_of_rows_needs_no_quotes(write: Write) -> None:
    text = "model: gpt2\ndata:\n  - path: a.jsonl\n    take: 500\n"

    assert read_recipe(write(text)).data[0].take == "500"
    assert "`data[0].take`" in error_of(write(text.replace("500", "true")))


def test_adapters_need_a_place(write: Write) -> None:
    assert "`lora.targets`" in error_of(write("model: gpt2\nlora:\n  targets: []\n"))


@pytest.mark.parametrize(("old", "new"), RENAMED_SETTINGS.items())
def test_an_old_name_of_a_setting_is_refused_with_the_new_one(old: str, new: str) -> None:
    assert old not in Strategy.model_fields
    assert new in Strategy.model_fields
    with pytest.raises(ValidationError, match=f"`{old}` is now called `{new}`"):
        Strategy.model_validate({old: True})
