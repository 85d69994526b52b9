"""Words that options accept, and what the shell offers."""

from __future__ import annotations

import pytest

from cli_run import run_process
from tightfit.api.estimate import read_count
from tightfit.api.options.common import (
    complete_gpu,
    complete_hardware,
    complete_job,
    complete_model,
)
from tightfit.api.options.training import ESTIMATE_METHODS
from tightfit.core.errors import UsageError
from tightfit.core.settings import Method, RecipeMethod, words_of
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.planning.request import METHODS


def test_the_words_are_those_of_the_contract() -> None:
    assert set(ESTIMATE_METHODS) == {method.value for method in Method} | {"qlora"}
    assert words_of(RecipeMethod) == METHODS


@pytest.mark.parametrize(
    ("text", "number"),
    [("2851e6", 2_851_000_000), ("2.851B", 2_851_000_000), ("32M", 32_000_000), ("7_000", 7000)],
)
def test_counts_are_read_as_people_write_them(text: str, number: int) -> None:
    assert read_count(text, option="--total-params") == number


@pytest.mark.parametrize("text", ["", "many", "-1", "0", "nan", "inf", "1e99", "b", "1e400"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--total-params"):
        read_count(text, option="--total-params")


def test_every_offered_name_resolves() -> None:
    models = complete_model("")
    assert len(models) > 100
    for name in models:
        resolve_model(name)
    cards = complete_gpu("")
    assert len(cards) > 30
    for name in cards:
        resolve_hardware(name)


def test_completion_goes_on_after_a_count() -> None:
    offered = complete_hardware("2n x 4xa100")
    assert offered
    for text in offered:
        assert text.startswith("2n x 4x")
        assert resolve_hardware(text).num_gpus == 8
    assert complete_hardware("sl") == ["slurm", "slurm:"]
    assert complete_hardware("he") == ["here"]


def test_a_recipe_in_the_folder_is_offered(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("llama.yaml", "w"):  # noqa: PTH123
        pass
    assert complete_job("llama")[0] == "llama.yaml"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tightfit estimate Llama-2", "Llama-2-13b-hf"),
        ("tightfit plan gpt2 --on 4xV100-32", "4xV100-32GB"),
        ("tightfit plan gpt2 --method ql", "qlora"),
        ("tightfit hardware RTX", "RTX-4090"),
        ("tightfit est", "estimate"),
    ],
)
def test_bash_completes(words: str, expected: str) -> None:
    answer = run_process(
        _TIGHTFIT_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )
    assert expected in answer.out.split()
