"""Levers held against luck: what the noise is, who is within it, whose gradients are precise."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tightfit.core.settings import Loss, Method
from tightfit.data.token_store import EncodedRow
from tightfit.planning.ranking import LEVERS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        names = ("_lever_cases", "_lever_runs", "measure_levers")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(folder)


def make_run(offset: float, *, order_seed: int = 0, held_out: float = 2.0) -> dict[str, Any]:
    losses = [3.0 - step / 100 + offset for step in range(100)]
    return {"losses": losses, "held_out_loss": held_out, "order_seed": order_seed}


@pytest.fixture
def lucky() -> dict[str, dict[str, Any]]:
    return {
        "plain": make_run(0.0),
        "adapters 1": make_run(0.010, held_out=2.02),
        "adapters 2": make_run(-0.004, held_out=2.04),
        "order 1": make_run(0.5, order_seed=1, held_out=2.06),
        "once more": make_run(0.001),
    }


def test_noise_is_what_other_adapters_and_orders_change(
    scripts: dict[str, ModuleType], lucky: dict[str, Any]
) -> None:
    noise = scripts["_lever_cases"].find_noise(lucky)

    assert noise.mean_step_difference == pytest.approx(0.004)
    assert noise.all_step_differences == pytest.approx((0.004, 0.010, 0.014))
    pairs = (0.02, 0.04, 0.06, 0.02, 0.04, 0.02)
    assert noise.held_out_difference == pytest.approx(sum(pairs) / 6)
    assert noise.repeated.mean_step_difference == pytest.approx(0.001)


def test_no_noise_is_told_without_other_adapters(
    scripts: dict[str, ModuleType], lucky: dict[str, Any]
) -> None:
    few = {name: lucky[name] for name in ("plain", "order 1", "once more")}

    assert scripts["_lever_cases"].find_noise(few) is None


def test_only_the_last_steps_are_compared(scripts: dict[str, ModuleType]) -> None:
    one, other = make_run(0.0), make_run(0.0)
    other["losses"] = [loss + (9.0 if at < 50 else 0.25) for at, loss in enumerate(one["losses"])]

    distance = scripts["_lever_cases"].compare_runs(one, other)

    assert distance.mean_step_difference == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("offset", "held_out", "is_within"),
    [(0.003, 2.01, True), (-0.005, 2.01, False), (0.003, 2.05, False)],
)
def test_levers_are_judged_by_curve_and_by_what_was_learnt(
    scripts: dict[str, ModuleType],
    lucky: dict[str, Any],
    offset: float,
    held_out: float,
    is_within: bool,
) -> None:
    runs = lucky | {"packing": make_run(offset, held_out=held_out)}
    (row,) = scripts["_lever_cases"].judge_levers(runs)

    assert row["lever"] == "packing"
    assert row["is_within_noise"] is is_within
    assert row["is_precise"] is None


def test_fused_lora_are_held_against_unfolded_ones(
    scripts: dict[str, ModuleType], lucky: dict[str, Any]
) -> None:
    runs = lucky | {"bf16 adapters": make_run(0.1), "fused LoRA": make_run(0.1)}
    rows = {row["lever"]: row for row in scripts["_lever_cases"].judge_levers(runs)}

    assert rows["fused LoRA"]["is_within_noise"] is True
    assert rows["bf16 adapters"]["is_within_noise"] is False
    table = scripts["measure_levers"].render_table(runs).splitlines()
    assert len(table) == 1 + 2 + 2


@pytest.mark.parametrize(
    ("error", "wide", "is_precise"), [(0.012, 1e-6, True), (0.013, 1e-6, False), (0.01, 0.1, False)]
)
def test_gradients_may_err_as_much_as_plain_ones(
    scripts: dict[str, ModuleType],
    lucky: dict[str, Any],
    error: float,
    wide: float,
    is_precise: bool,
) -> None:
    plain = lucky["plain"] | {"gradient_error": 0.01}
    lever = make_run(0.0) | {"gradient_error": error, "fp32_gradient_error": wide}
    (row,) = scripts["_lever_cases"].judge_levers(lucky | {"plain": plain, "packing": lever})

    assert row["is_precise"] is is_precise


def test_errors_are_relative_to_the_truth(scripts: dict[str, ModuleType]) -> None:
    truth = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0]), "zero": torch.zeros(2)}
    found = {"a": torch.tensor([3.0, 5.0]), "b": torch.tensor([12.0]), "zero": torch.zeros(2)}
    error, worst = scripts["_lever_runs"].measure_error(found, truth)

    assert error == pytest.approx(1 / 13, rel=1e-3)
    assert worst == pytest.approx(1 / 5, rel=1e-3)
    with pytest.raises(RuntimeError, match="2 gradients"):
        scripts["_lever_runs"].measure_error({"a": truth["a"], "b": truth["b"]}, truth)
    with pytest.raises(RuntimeError, match="finite"):
        scripts["_lever_runs"].measure_error(found | {"b": torch.tensor([math.nan])}, truth)


def test_every_lever_of_one_gpu_has_a_case(scripts: dict[str, ModuleType]) -> None:
    make = scripts["_lever_cases"].make_strategy
    sizes = {"num_rows": 8, "seq_len": 1024, "num_layers": 30}
    cases = {case.name: case for case in scripts["_lever_cases"].CASES}
    plain = make(cases["plain"], **sizes)
    others = [make(case, **sizes) for case in cases.values() if case.is_lever]
    elsewhere = {"no recomputation", "flash attention", "flex attention", "offload to host memory"}
    elsewhere |= {"sharding over the GPUs", "rows shared by GPUs", "dequantized base"}
    elsewhere |= {"reference before training", "reference in each step"}
    for name in {lever.name for lever in LEVERS} - elsewhere:
        levers = [lever for lever in LEVERS if lever.name == name]
        assert not any(lever.is_pulled(plain) for lever in levers), name
        assert any(lever.is_pulled(other) for lever in levers for other in others), name
    assert make(cases["recomputing half the layers"], **sizes).count_recomputed(30) == 15
    assert make(cases["2 micro-batches"], **sizes).grad_accum == 2
    assert {make(case, **sizes).loss for case in cases.values()} == set(Loss)


def test_full_tuning_has_a_noise_of_its_own(
    scripts: dict[str, ModuleType], lucky: dict[str, Any]
) -> None:
    """Half batches for the curve; they and other orders for what was learnt."""
    full = {
        "full tuning": make_run(0.0),
        "full tuning in half batches": make_run(0.002, held_out=2.01),
        "full tuning in order 1": make_run(0.5, order_seed=1, held_out=2.02),
        "fp8 gradients": make_run(0.003),
    }
    script = scripts["_lever_cases"]
    noise = script.find_noise(full, Method.FULL)
    assert noise.mean_step_difference == pytest.approx(0.002)
    assert noise.held_out_difference == pytest.approx((0.01 + 0.02 + 0.01) / 3)
    assert noise.repeated is None
    assert script.find_noise(full) is None

    (row,) = script.judge_levers(lucky | full)
    assert (row["lever"], row["against"]) == ("fp8 gradients", "full tuning")
    assert row["is_within_noise"] is False, "0.003 of 0.002; the adapters' noise is 0.004"
    table = scripts["measure_levers"].render_table(lucky | full).splitlines()
    assert [line.split("  ")[0] for line in table[2:]] == [
        *("noise, lora", "the same run twice", "noise, full"),
    ]


def test_all_ways_of_a_step_hold_the_same_rows(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    lengths = [5, 30, 17, 9, 12, 40, 8, 21, 6, 11, 13, 7]
    rows = [
        EncodedRow(draw.integers(5, 90, n, dtype=np.int32), np.arange(n) > n // 2, "row")
        for n in lengths
    ]
    scripts["_lever_runs"].write_rows(tmp_path / "rows.npz", rows)
    read = scripts["_lever_runs"].Rows(tmp_path / "rows.npz", vocab_size=100)
    assert [row.tokens.tolist() for row in (*read.trained, *read.held_out)] == [
        row.tokens.tolist() for row in rows
    ]

    seen = []
    cases = {case.name: case for case in scripts["_lever_cases"].CASES}
    for name in ("plain", "packing", "2 micro-batches"):
        strategy = scripts["_lever_cases"].make_strategy(
            cases[name], num_rows=8, seq_len=64, num_layers=2
        )
        step = read.of_step(1, 8, order_seed=0)
        batches = scripts["_lever_runs"].make_batches(step, strategy)
        assert len(batches) == strategy.grad_accum
        labels = torch.cat([batch["labels"].flatten() for batch in batches])
        seen.append(labels[labels != -100].sort().values.tolist())
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 20
    other = read.of_step(1, 8, order_seed=1)
    assert [len(row.tokens) for row in other] != [len(row.tokens) for row in step]


def test_cases_that_need_a_gpu_are_left_out_without_one(scripts: dict[str, ModuleType]) -> None:
    cases, left = scripts["measure_levers"].list_cases("fused LoRA,fused loss", "cpu")

    assert [case.name for case in cases] == ["plain", "bf16 adapters", "fused LoRA"]
    assert left == ["fused loss"]
