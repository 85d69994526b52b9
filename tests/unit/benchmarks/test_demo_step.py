"""The demo's step beside trl's: what the committed times show, and what would make them void."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
LOSSES = (1.1, 0.9, 0.6, 0.5)
NAMES = ("tightfit", "trl-default", "trl-best")


@pytest.fixture(scope="module")
def demo_step() -> Iterator[ModuleType]:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("measure_demo_step")
    finally:
        sys.path.remove(folder)


def make_rounds(seconds: list[tuple[float, float, float]]) -> list[dict[str, Any]]:
    """Per round the seconds a step of each contestant, after two slow steps of warm-up."""
    return [
        {
            name: [
                {"seconds": 99.0 if step < 2 else each, "loss": loss}
                for step, loss in enumerate(LOSSES)
            ]
            for name, each in zip(NAMES, taken, strict=True)
        }
        for taken in seconds
    ]


def make_result(demo_step: ModuleType, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rounds": rounds, "total": demo_step.summarise(rounds)}


def test_ratio_is_of_medians_and_its_spread_of_rounds(demo_step: ModuleType) -> None:
    total = demo_step.summarise(make_rounds([(2.0, 4.0, 2.2), (2.0, 5.0, 3.0), (4.0, 6.0, 4.4)]))

    assert total["num_steps"] == 6
    assert total["seconds"] == {"tightfit": 2.0, "trl-default": 5.0, "trl-best": 3.0}
    assert total["trl-best / tightfit"] == {
        "ratio": 1.5,
        "low": 1.1,
        "high": 1.5,
        "of_fastest": 1.1,
    }
    assert total["trl-default / tightfit"] == {
        "ratio": 2.5,
        "low": 1.5,
        "high": 2.5,
        "of_fastest": 2.0,
    }


def test_equal_times_pass_and_slower_ones_beyond_the_noise_do_not(demo_step: ModuleType) -> None:
    equal = make_result(demo_step, make_rounds([(2.0, 2.0, 2.0)] * 10))
    slower = make_result(demo_step, make_rounds([(2.0, 3.0, 1.8)] * 10))

    assert demo_step.find_faults(equal) == []
    assert demo_step.find_faults(slower) == [
        "the median step of trl-best takes 0.90 of tightfit's time",
        "the fastest step of trl-best takes 0.90 of tightfit's time",
    ]


def test_too_few_steps_are_a_fault(demo_step: ModuleType) -> None:
    few = make_result(demo_step, make_rounds([(2.0, 3.0, 3.0)] * 9))

    assert demo_step.find_faults(few) == ["18 steps were timed, and 20 are needed"]


@pytest.mark.parametrize(("step", "change", "is_void"), [(0, 1.02, True), (2, 1.02, False)])
def test_other_losses_make_the_comparison_void(
    demo_step: ModuleType, step: int, change: float, is_void: bool
) -> None:
    rounds = make_rounds([(2.0, 3.0, 3.0)] * 10)
    rounds[4]["trl-best"][step]["loss"] *= change

    errors = demo_step.find_faults(make_result(demo_step, rounds))

    assert errors == (
        ["round 5: the losses of trl-best differ, so this is another job"] if is_void else []
    )


def test_committed_total_follows_from_its_steps(demo_step: ModuleType) -> None:
    result = json.loads(demo_step.RESULT.read_text())

    assert result["total"] == demo_step.summarise(deepcopy(result["rounds"]))
    assert all(len(taken) == len(NAMES) for taken in result["rounds"])


def test_trl_gets_the_recipe_and_its_own_defaults(demo_step: ModuleType) -> None:
    recipe = demo_step.read_yaml(demo_step.RECIPE).value | {"max_steps": 8}

    default = demo_step.sft_arguments(recipe, demo_step.SWITCHES["trl-default"], "out")
    best = demo_step.sft_arguments(recipe, demo_step.SWITCHES["trl-best"], "out")

    assert default["per_device_train_batch_size"] == recipe["effective_batch"]
    assert default["learning_rate"] == 1e-3
    assert default["warmup_steps"] == 1
    assert not {"bf16", "gradient_checkpointing"} & set(default)
    assert best["gradient_checkpointing"] is False


def test_packs_in_a_grid_keep_rows_apart(demo_step: ModuleType) -> None:
    long = {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "seq_lengths": [1, 3]}
    short = {"input_ids": [9, 10], "labels": [-100, 10], "seq_lengths": [2]}

    batch = demo_step.collate_grid([long, short])

    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8], [-100, 10, -100, -100]]
